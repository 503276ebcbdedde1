package main

import (
	"context"
	"time"

	gocql "github.com/apache/cassandra-gocql-driver/v2"
)

// cassandra inserts rows that two of three replicas acknowledge.
type cassandra struct {
	addrs   []string
	session *gocql.Session
}

func newCassandra(addrs []string) (store, error) {
	return &cassandra{addrs: addrs}, nil
}

// connected opens a session, and creates the table.
func (c *cassandra) connected(ctx context.Context) (*gocql.Session, error) {
	if c.session != nil {
		return c.session, nil
	}
	cluster := gocql.NewCluster(c.addrs...)
	cluster.Consistency = gocql.Quorum
	cluster.Timeout = 2 * time.Second
	cluster.ConnectTimeout = 2 * time.Second
	session, err := cluster.CreateSession()
	if err != nil {
		return nil, err
	}
	for _, statement := range []string{
		"create keyspace if not exists written with replication = {'class': 'SimpleStrategy', 'replication_factor': 3}",
		"create table if not exists written." + name + " (number int primary key)",
	} {
		if err := session.Query(statement).ExecContext(ctx); err != nil {
			session.Close()
			return nil, err
		}
	}
	c.session = session
	return session, nil
}

func (c *cassandra) write(ctx context.Context, number int) error {
	session, err := c.connected(ctx)
	if err != nil {
		return err
	}
	return session.Query("insert into written."+name+" (number) values (?)", number).ExecContext(ctx)
}

func (c *cassandra) read(ctx context.Context) ([]int, error) {
	session, err := c.connected(ctx)
	if err != nil {
		return nil, err
	}
	var numbers []int
	var number int
	rows := session.Query("select number from written." + name).IterContext(ctx)
	for rows.Scan(&number) {
		numbers = append(numbers, number)
	}
	return numbers, rows.Close()
}
