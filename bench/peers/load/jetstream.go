package main

import (
	"context"
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

type jetstreamSystem struct{}

const (
	jetstreamConsumer = "bench"
	// Above what the windows have under way, so that the client never waits for this limit.
	jetstreamPending = 100_000
)

func (*jetstreamSystem) module() string { return "github.com/nats-io/nats.go" }

func (*jetstreamSystem) settings() []string {
	return []string{
		fmt.Sprintf("PublishAsync, %d under way on each of the connections", options.batch*options.window),
		fmt.Sprintf("durable pull consumer, %d messages fetched ahead, explicit ack of each message", options.inFlight),
		"file storage, 1 replica, limits retention",
	}
}

func jetstreamConnect() (*nats.Conn, jetstream.JetStream, error) {
	connection, err := nats.Connect("nats://" + options.address)
	if err != nil {
		return nil, nil, err
	}
	stream, err := jetstream.New(connection, jetstream.WithPublishAsyncMaxPending(jetstreamPending))
	return connection, stream, err
}

func (*jetstreamSystem) setup(topic string) error {
	connection, stream, err := jetstreamConnect()
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err = stream.CreateStream(ctx, jetstream.StreamConfig{
		Name: topic, Subjects: []string{topic}, Storage: jetstream.FileStorage, Replicas: 1,
	})
	if err != nil {
		return err
	}
	_, err = stream.CreateConsumer(ctx, topic, jetstream.ConsumerConfig{
		Durable: jetstreamConsumer, AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: 10 * options.inFlight,
	})
	return err
}

type jetstreamPublisher struct {
	connection *nats.Conn
	stream     jetstream.JetStream
	topic      string
}

func (*jetstreamSystem) publisher(topic string) (publisher, error) {
	connection, stream, err := jetstreamConnect()
	return &jetstreamPublisher{connection, stream, topic}, err
}

func (p *jetstreamPublisher) one(body []byte) error {
	_, err := p.stream.Publish(context.Background(), p.topic, body)
	return err
}

func (p *jetstreamPublisher) many(bodies [][]byte, done func(error)) {
	futures := make([]jetstream.PubAckFuture, 0, len(bodies))
	for _, body := range bodies {
		future, err := p.stream.PublishAsync(p.topic, body)
		if err != nil {
			go done(err)
			return
		}
		futures = append(futures, future)
	}
	go func() {
		for _, future := range futures {
			select {
			case <-future.Ok():
			case err := <-future.Err():
				done(err)
				return
			}
		}
		done(nil)
	}()
}

func (p *jetstreamPublisher) close() { p.connection.Close() }

func (*jetstreamSystem) consume(topic string, handle func(body []byte)) (func(), error) {
	connection, stream, err := jetstreamConnect()
	if err != nil {
		return nil, err
	}
	consumer, err := stream.Consumer(context.Background(), topic, jetstreamConsumer)
	if err != nil {
		return nil, err
	}
	consuming, err := consumer.Consume(func(message jetstream.Msg) {
		handle(message.Data())
		if err := message.Ack(); err != nil {
			fail(err)
		}
	}, jetstream.PullMaxMessages(options.inFlight))
	if err != nil {
		return nil, err
	}
	return func() {
		consuming.Stop()
		// The acks that are still in the buffer.
		if err := connection.Flush(); err != nil {
			fail(err)
		}
		connection.Close()
	}, nil
}
