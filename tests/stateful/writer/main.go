// Writer writes numbers to a database or a broker, one after another, until its standard input ends. Then it reads all of them,
// and reports how many acknowledged numbers are missing and how long it had to wait for an acknowledgement.
//
// An attempt that fails is counted, and followed by the next number. A number counts as acknowledged when so many
// members have it that the loss of one member loses no number.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"strings"
	"sync/atomic"
	"time"
)

// A store is a client of one kind of server.
type store interface {
	// write returns when the number is acknowledged. After an error it may be stored nevertheless.
	write(ctx context.Context, number int) error
	// read returns all stored numbers.
	read(ctx context.Context) ([]int, error)
}

// stores has a function for each kind of server, which gets the addresses of all members.
var stores = map[string]func(addrs []string) (store, error){
	"postgres":      newPostgres,
	"sentinel":      newSentinel,
	"redis-cluster": newRedisCluster,
	"rabbitmq":      newRabbitMQ,
	"kafka":         newKafka,
	"etcd":          newEtcd,
	"zookeeper":     newZooKeeper,
	"nats":          newNATS,
	"cassandra":     newCassandra,
}

// report is the output.
type report struct {
	Acknowledged int            `json:"acknowledged"`
	Failed       int            `json:"failed"`
	Lost         int            `json:"lost"`
	LongestPause float64        `json:"longest_pause_ms"`
	Errors       map[string]int `json:"errors"`
	// ReadError says why the numbers could not be read; then none is counted as lost.
	ReadError string `json:"read_error"`
}

// name is that of the table, set, queue, topic or stream.
var name string

const (
	attemptTimeout = 3 * time.Second
	// Kafka's client tries again by itself until this limit.
	kafkaTimeout = 15 * time.Second
	readTimeout  = 60 * time.Second
	// A request to a member that ends may never be answered.
	readAttemptTimeout = 20 * time.Second
	betweenWrites      = 5 * time.Millisecond
	afterFailure       = 50 * time.Millisecond
	maxErrorLength     = 200
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "writer:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 3 || stores[args[0]] == nil {
		kinds := make([]string, 0, len(stores))
		for kind := range stores {
			kinds = append(kinds, kind)
		}
		sort.Strings(kinds)
		return fmt.Errorf("%q; expected KIND NAME HOST:PORT..., where KIND is one of %s", args, strings.Join(kinds, ", "))
	}
	name = args[1]
	store, err := stores[args[0]](args[2:])
	if err != nil {
		return err
	}
	timeout := attemptTimeout
	if args[0] == "kafka" {
		timeout = kafkaTimeout
	}
	var ended atomic.Bool
	go func() {
		_, _ = os.Stdin.Read(make([]byte, 1))
		ended.Store(true)
	}()
	written, result := writeUntil(store, timeout, &ended)
	return finish(store, written, result)
}

// writeUntil writes numbers until the end, and returns those that were acknowledged. It prints a line after the first.
func writeUntil(store store, timeout time.Duration, ended *atomic.Bool) ([]int, report) {
	var acknowledged []int
	result := report{Errors: map[string]int{}}
	var last time.Time
	for number := 0; !ended.Load(); number++ {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		err := store.write(ctx, number)
		cancel()
		if err != nil {
			result.Failed++
			result.Errors[truncated(err.Error())]++
			time.Sleep(afterFailure)
			continue
		}
		now := time.Now()
		if last.IsZero() {
			fmt.Println("writing")
			// What failed before the disturbance has another cause.
			result = report{Errors: map[string]int{}}
		} else {
			result.LongestPause = max(result.LongestPause, float64(now.Sub(last))/float64(time.Millisecond))
		}
		last = now
		acknowledged = append(acknowledged, number)
		time.Sleep(betweenWrites)
	}
	if !last.IsZero() {
		result.LongestPause = max(result.LongestPause, float64(time.Since(last))/float64(time.Millisecond))
	}
	result.Acknowledged = len(acknowledged)
	return acknowledged, result
}

// finish reads all numbers, and prints the report.
func finish(store store, acknowledged []int, result report) error {
	deadline := time.Now().Add(readTimeout)
	for {
		ctx, cancel := context.WithTimeout(context.Background(), readAttemptTimeout)
		numbers, err := store.read(ctx)
		cancel()
		if err == nil {
			stored := make(map[int]bool, len(numbers))
			for _, number := range numbers {
				stored[number] = true
			}
			for _, number := range acknowledged {
				if !stored[number] {
					result.Lost++
				}
			}
			return json.NewEncoder(os.Stdout).Encode(result)
		}
		if time.Now().After(deadline) {
			result.ReadError = err.Error()
			return json.NewEncoder(os.Stdout).Encode(result)
		}
		time.Sleep(afterFailure)
	}
}

func truncated(message string) string {
	if len(message) > maxErrorLength {
		return message[:maxErrorLength]
	}
	return message
}

// oneCall runs functions that do not end with their context, one at a time.
type oneCall struct {
	isRunning chan struct{}
}

func newOneCall() oneCall {
	return oneCall{isRunning: make(chan struct{}, 1)}
}

func (o oneCall) within(ctx context.Context, call func() error) error {
	select {
	case o.isRunning <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("the call before: %w", ctx.Err())
	}
	done := make(chan error, 1)
	go func() {
		err := call()
		<-o.isRunning
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
