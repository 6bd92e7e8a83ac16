package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

type redisSystem struct{}

const (
	redisGroup    = "bench"
	redisConsumer = "bench"
	redisField    = "m"
	redisBlock    = 100 * time.Millisecond
)

func (*redisSystem) module() string { return "github.com/redis/go-redis/v9" }

func (*redisSystem) settings() []string {
	return []string{
		fmt.Sprintf("pipelines of %d XADD, %d under way per publisher", options.batch, options.window),
		fmt.Sprintf("XREADGROUP COUNT %d, one XACK with the ids of each answer", options.inFlight),
		"entries stay in the stream: nothing is trimmed",
	}
}

func redisClient(connections int) *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr: options.address, PoolSize: connections, MinIdleConns: connections,
		ReadTimeout: patience, WriteTimeout: patience, PoolTimeout: patience,
	})
}

func (*redisSystem) setup(topic string) error {
	client := redisClient(1)
	defer client.Close()
	return client.XGroupCreateMkStream(context.Background(), topic, redisGroup, "0").Err()
}

type redisPublisher struct {
	client *redis.Client
	topic  string
}

func (*redisSystem) publisher(topic string) (publisher, error) {
	client := redisClient(options.window)
	return &redisPublisher{client, topic}, client.Ping(context.Background()).Err()
}

func (p *redisPublisher) entry(body []byte) *redis.XAddArgs {
	return &redis.XAddArgs{Stream: p.topic, Values: []any{redisField, body}}
}

func (p *redisPublisher) one(body []byte) error {
	return p.client.XAdd(context.Background(), p.entry(body)).Err()
}

func (p *redisPublisher) many(bodies [][]byte, done func(error)) {
	go func() {
		pipeline := p.client.Pipeline()
		for _, body := range bodies {
			pipeline.XAdd(context.Background(), p.entry(body))
		}
		_, err := pipeline.Exec(context.Background())
		done(err)
	}()
}

func (p *redisPublisher) close() { p.client.Close() }

func (*redisSystem) consume(topic string, handle func(body []byte)) (func(), error) {
	client := redisClient(1)
	if err := client.Ping(context.Background()).Err(); err != nil {
		return nil, err
	}
	stopping := make(chan struct{})
	var ended sync.WaitGroup
	ended.Add(1)
	read := &redis.XReadGroupArgs{
		Group: redisGroup, Consumer: redisConsumer, Streams: []string{topic, ">"},
		Count: int64(options.inFlight), Block: redisBlock,
	}
	go func() {
		defer ended.Done()
		for {
			select {
			case <-stopping:
				return
			default:
			}
			streams, err := client.XReadGroup(context.Background(), read).Result()
			if errors.Is(err, redis.Nil) {
				continue
			}
			if err != nil {
				fail(err)
			}
			ids := make([]string, 0, len(streams[0].Messages))
			for _, message := range streams[0].Messages {
				handle([]byte(message.Values[redisField].(string)))
				ids = append(ids, message.ID)
			}
			if err := client.XAck(context.Background(), topic, redisGroup, ids...).Err(); err != nil {
				fail(err)
			}
		}
	}()
	return func() {
		close(stopping)
		ended.Wait()
		client.Close()
	}, nil
}
