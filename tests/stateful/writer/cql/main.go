// Cql runs the statements of its standard input, one a line, at one member of a Cassandra ring, and prints the rows.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"reflect"
	"time"

	gocql "github.com/apache/cassandra-gocql-driver/v2"
)

const (
	timeout      = 30 * time.Second
	maxStatement = 16 << 20
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cql:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("%q; expected HOST:PORT CONSISTENCY, such as cassandra:9042 QUORUM", args)
	}
	consistency, err := gocql.ParseConsistencyWrapper(args[1])
	if err != nil {
		return fmt.Errorf("the consistency %q: %w", args[1], err)
	}
	cluster := gocql.NewCluster(args[0])
	cluster.Consistency = consistency
	cluster.Timeout = timeout
	cluster.ConnectTimeout = timeout
	cluster.NumConns = 1
	cluster.DisableInitialHostLookup = true
	session, err := cluster.CreateSession()
	if err != nil {
		return err
	}
	defer session.Close()
	statements := bufio.NewScanner(os.Stdin)
	statements.Buffer(nil, maxStatement)
	for statements.Scan() {
		if err := printRows(session, statements.Text()); err != nil {
			return err
		}
	}
	return statements.Err()
}

func printRows(session *gocql.Session, statement string) error {
	rows := session.Query(statement).Iter()
	values, err := rows.RowData()
	if err != nil {
		return errors.Join(err, rows.Close())
	}
	for rows.Scan(values.Values...) {
		line := make([]any, 0, len(values.Values))
		for _, value := range values.Values {
			line = append(line, reflect.Indirect(reflect.ValueOf(value)).Interface())
		}
		fmt.Println(line...)
	}
	return rows.Close()
}
