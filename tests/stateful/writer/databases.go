package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
)

// postgres writes rows to the member that accepts writes. The server is configured to wait for its standbys.
type postgres struct {
	url  string
	conn *pgx.Conn
}

func newPostgres(addrs []string) (store, error) {
	hosts := strings.Join(addrs, ",")
	return &postgres{url: "postgres://postgres@" + hosts + "/postgres?target_session_attrs=read-write&connect_timeout=2"}, nil
}

func (p *postgres) connected(ctx context.Context) (*pgx.Conn, error) {
	if p.conn != nil && !p.conn.IsClosed() {
		return p.conn, nil
	}
	conn, err := pgx.Connect(ctx, p.url)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Exec(ctx, "create table if not exists "+name+" (number bigint)"); err != nil {
		_ = conn.Close(ctx)
		return nil, err
	}
	p.conn = conn
	return conn, nil
}

func (p *postgres) write(ctx context.Context, number int) error {
	conn, err := p.connected(ctx)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, "insert into "+name+" values ($1)", number)
	return err
}

func (p *postgres) read(ctx context.Context) ([]int, error) {
	conn, err := p.connected(ctx)
	if err != nil {
		return nil, err
	}
	rows, err := conn.Query(ctx, "select number from "+name)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[int])
}

// redisStore adds numbers to a set, and waits until one replica has each.
type redisStore struct {
	// master returns the client of the master that has the set.
	master func(ctx context.Context) (*redis.Client, error)
	// afterFailure finds out which member is the master now.
	afterFailure func(ctx context.Context)
}

const redisTimeout = time.Second

func newSentinel(addrs []string) (store, error) {
	client := redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName:    "main",
		SentinelAddrs: addrs,
		DialTimeout:   redisTimeout,
		ReadTimeout:   redisTimeout,
		MaxRetries:    -1,
	})
	return &redisStore{
		master:       func(context.Context) (*redis.Client, error) { return client, nil },
		afterFailure: func(context.Context) {}, // the client subscribes to the sentinels
	}, nil
}

func newRedisCluster(addrs []string) (store, error) {
	client := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs:        addrs,
		DialTimeout:  redisTimeout,
		ReadTimeout:  redisTimeout,
		MaxRedirects: -1,
	})
	return &redisStore{
		master:       func(ctx context.Context) (*redis.Client, error) { return client.MasterForKey(ctx, name) },
		afterFailure: client.ReloadState,
	}, nil
}

func (r *redisStore) write(ctx context.Context, number int) error {
	err := r.add(ctx, number)
	if err != nil {
		r.afterFailure(ctx)
	}
	return err
}

func (r *redisStore) add(ctx context.Context, number int) error {
	client, err := r.master(ctx)
	if err != nil {
		return err
	}
	conn := client.Conn()
	defer func() { _ = conn.Close() }()
	if err := conn.SAdd(ctx, name, number).Err(); err != nil {
		return err
	}
	replicas, err := conn.Do(ctx, "wait", 1, int(redisTimeout.Milliseconds()/2)).Int()
	if err != nil {
		return err
	}
	if replicas == 0 {
		return errors.New("no replica has the number")
	}
	return nil
}

func (r *redisStore) read(ctx context.Context) ([]int, error) {
	client, err := r.master(ctx)
	if err != nil {
		return nil, err
	}
	members, err := client.SMembers(ctx, name).Result()
	if err != nil {
		return nil, err
	}
	return parsed(members)
}

func parsed(texts []string) ([]int, error) {
	numbers := make([]int, 0, len(texts))
	for _, text := range texts {
		number, err := strconv.Atoi(text)
		if err != nil {
			return nil, fmt.Errorf("a stored value: %w", err)
		}
		numbers = append(numbers, number)
	}
	return numbers, nil
}
