package main

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// rabbitMQ publishes to a quorum queue, with publisher confirms.
type rabbitMQ struct {
	addrs   []string
	next    int
	conn    *amqp.Connection
	channel *amqp.Channel
	calls   oneCall
}

func newRabbitMQ(addrs []string) (store, error) {
	return &rabbitMQ{addrs: addrs, calls: newOneCall()}, nil
}

// open returns a channel; after a failure of the last one it connects to the next member.
func (r *rabbitMQ) open() (*amqp.Channel, error) {
	if r.channel != nil && !r.channel.IsClosed() {
		return r.channel, nil
	}
	r.close()
	addr := r.addrs[r.next%len(r.addrs)]
	r.next++
	conn, err := amqp.DialConfig("amqp://guest:guest@"+addr, amqp.Config{
		Heartbeat: 2 * time.Second,
		Dial:      amqp.DefaultDial(2 * time.Second),
	})
	if err != nil {
		return nil, err
	}
	r.conn = conn
	channel, err := conn.Channel()
	if err != nil {
		return nil, err
	}
	if _, err := channel.QueueDeclare(name, true, false, false, false, amqp.Table{"x-queue-type": "quorum"}); err != nil {
		return nil, err
	}
	if err := channel.Confirm(false); err != nil {
		return nil, err
	}
	r.channel = channel
	return channel, nil
}

func (r *rabbitMQ) close() {
	if r.conn != nil {
		conn := r.conn
		// The end of a connection to a member that does not respond takes a while.
		go func() { _ = conn.Close() }()
	}
	r.conn, r.channel = nil, nil
}

func (r *rabbitMQ) write(ctx context.Context, number int) error {
	return r.calls.within(ctx, func() error {
		channel, err := r.open()
		if err != nil {
			return err
		}
		message := amqp.Publishing{DeliveryMode: amqp.Persistent, Body: []byte(strconv.Itoa(number))}
		confirm, err := channel.PublishWithDeferredConfirmWithContext(ctx, "", name, true, false, message)
		if err == nil {
			var isAcknowledged bool
			isAcknowledged, err = confirm.WaitContext(ctx)
			if err == nil && !isAcknowledged {
				err = errors.New("the message is not acknowledged")
			}
		}
		if err != nil {
			r.close()
		}
		return err
	})
}

func (r *rabbitMQ) read(ctx context.Context) ([]int, error) {
	var texts []string
	err := r.calls.within(ctx, func() error {
		// Messages without acknowledgement return to the queue when the connection ends, for another attempt.
		defer r.close()
		channel, err := r.open()
		if err != nil {
			return err
		}
		messages, err := channel.Consume(name, "", false, false, false, false, nil)
		if err != nil {
			return err
		}
		for {
			select {
			case message, isOpen := <-messages:
				if !isOpen {
					return errors.New("the channel is closed")
				}
				texts = append(texts, string(message.Body))
			case <-time.After(time.Second):
				queue, err := channel.QueueDeclarePassive(name, true, false, false, false, nil)
				if err != nil || queue.Messages == 0 {
					return err
				}
			}
		}
	})
	if err != nil {
		return nil, err
	}
	return parsed(texts)
}

// kafka produces to a topic with three replicas, acknowledged by at least two.
type kafka struct {
	client    *kgo.Client
	isCreated bool
}

func newKafka(addrs []string) (store, error) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(addrs...),
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.DialTimeout(2*time.Second),
		kgo.ProducerLinger(0),
		kgo.ConsumeTopics(name),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
	)
	return &kafka{client: client}, err
}

func (k *kafka) write(ctx context.Context, number int) error {
	if !k.isCreated {
		_, err := kadm.NewClient(k.client).CreateTopic(ctx, 1, 3, nil, name)
		if err != nil && !errors.Is(err, kerr.TopicAlreadyExists) {
			return err
		}
		k.isCreated = true
	}
	record := &kgo.Record{Topic: name, Value: []byte(strconv.Itoa(number))}
	return k.client.ProduceSync(ctx, record).FirstErr()
}

func (k *kafka) read(ctx context.Context) ([]int, error) {
	ends, err := kadm.NewClient(k.client).ListEndOffsets(ctx, name)
	if err != nil {
		return nil, err
	}
	end, isFound := ends.Lookup(name, 0)
	if !isFound || end.Err != nil {
		return nil, errors.Join(errors.New("no end of the topic"), end.Err)
	}
	var texts []string
	for offset := int64(0); offset < end.Offset; {
		fetches := k.client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return nil, err
		}
		fetches.EachRecord(func(record *kgo.Record) {
			texts = append(texts, string(record.Value))
			offset = record.Offset + 1
		})
	}
	return parsed(texts)
}

const batchSize = 500

// natsStore publishes to a stream with three replicas.
type natsStore struct {
	stream    jetstream.JetStream
	isCreated bool
}

func newNATS(addrs []string) (store, error) {
	conn, err := nats.Connect("",
		func(options *nats.Options) error {
			for _, addr := range addrs {
				options.Servers = append(options.Servers, "nats://"+addr)
			}
			return nil
		},
		nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.ReconnectWait(100*time.Millisecond),
		nats.PingInterval(2*time.Second), nats.MaxPingsOutstanding(1), nats.Timeout(2*time.Second))
	if err != nil {
		return nil, err
	}
	stream, err := jetstream.New(conn)
	return &natsStore{stream: stream}, err
}

func (n *natsStore) write(ctx context.Context, number int) error {
	if !n.isCreated {
		config := jetstream.StreamConfig{Name: name, Subjects: []string{name}, Replicas: 3, AllowDirect: true}
		if _, err := n.stream.CreateOrUpdateStream(ctx, config); err != nil {
			return err
		}
		n.isCreated = true
	}
	_, err := n.stream.Publish(ctx, name, []byte(strconv.Itoa(number)), jetstream.WithRetryAttempts(0))
	return err
}

func (n *natsStore) read(ctx context.Context) ([]int, error) {
	stream, err := n.stream.Stream(ctx, name)
	if err != nil {
		return nil, err
	}
	consumer, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return nil, err
	}
	var texts []string
	for uint64(len(texts)) < stream.CachedInfo().State.Msgs {
		batch, err := consumer.Fetch(batchSize, jetstream.FetchMaxWait(attemptTimeout))
		if err != nil {
			return nil, err
		}
		n := len(texts)
		for message := range batch.Messages() {
			texts = append(texts, string(message.Data()))
		}
		if len(texts) == n {
			return nil, errors.Join(errors.New("some messages cannot be read"), batch.Error())
		}
	}
	return parsed(texts)
}
