package main

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/go-zookeeper/zk"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// etcd puts a key for each number.
type etcd struct {
	client *clientv3.Client
}

func newEtcd(addrs []string) (store, error) {
	endpoints := make([]string, 0, len(addrs))
	for _, addr := range addrs {
		endpoints = append(endpoints, "http://"+addr)
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            endpoints,
		DialTimeout:          2 * time.Second,
		DialKeepAliveTime:    10 * time.Second,
		DialKeepAliveTimeout: 2 * time.Second,
		Logger:               zap.NewNop(),
	})
	return &etcd{client: client}, err
}

func (e *etcd) write(ctx context.Context, number int) error {
	_, err := e.client.Put(ctx, path.Join(name, strconv.Itoa(number)), "")
	return err
}

func (e *etcd) read(ctx context.Context) ([]int, error) {
	found, err := e.client.Get(ctx, name+"/", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return nil, err
	}
	var texts []string
	for _, pair := range found.Kvs {
		texts = append(texts, path.Base(string(pair.Key)))
	}
	return parsed(texts)
}

// zooKeeper creates a node for each number. The client resolves the names of servers only once, so a failed write opens a new session.
type zooKeeper struct {
	addrs     []string
	conn      *zk.Conn
	isCreated bool
	calls     oneCall
	hasFailed atomic.Bool
}

type noLog struct{}

func (noLog) Printf(string, ...any) {}

func newZooKeeper(addrs []string) (store, error) {
	return &zooKeeper{addrs: addrs, calls: newOneCall()}, nil
}

// connect opens a session, unless there is one whose last write has succeeded.
func (z *zooKeeper) connect() error {
	if z.conn != nil && !z.hasFailed.Swap(false) {
		return nil
	}
	if z.conn != nil {
		z.conn.Close()
	}
	conn, _, err := zk.Connect(z.addrs, 4*time.Second, zk.WithLogger(noLog{}))
	z.conn = conn
	return err
}

func (z *zooKeeper) write(ctx context.Context, number int) error {
	err := z.calls.within(ctx, func() error {
		if err := z.connect(); err != nil {
			return err
		}
		parent := "/" + name
		if !z.isCreated {
			_, err := z.conn.Create(parent, nil, 0, zk.WorldACL(zk.PermAll))
			if err != nil && !errors.Is(err, zk.ErrNodeExists) {
				return err
			}
			z.isCreated = true
		}
		_, err := z.conn.Create(path.Join(parent, strconv.Itoa(number)), nil, 0, zk.WorldACL(zk.PermAll))
		return err
	})
	if err != nil {
		z.hasFailed.Store(true)
	}
	return err
}

func (z *zooKeeper) read(ctx context.Context) ([]int, error) {
	var texts []string
	err := z.calls.within(ctx, func() error {
		if err := z.connect(); err != nil {
			return err
		}
		parent := "/" + name
		if _, err := z.conn.Sync(parent); err != nil {
			return fmt.Errorf("sync: %w", err)
		}
		var err error
		texts, _, err = z.conn.Children(parent)
		return err
	})
	if err != nil {
		z.hasFailed.Store(true)
		return nil, err
	}
	return parsed(texts)
}
