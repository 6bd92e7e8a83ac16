package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

type kafkaSystem struct{}

const (
	kafkaGroup  = "bench"
	kafkaCommit = 100 * time.Millisecond
)

func (*kafkaSystem) module() string { return "github.com/twmb/franz-go" }

func (*kafkaSystem) settings() []string {
	return []string{
		fmt.Sprintf("acks=all, idempotent, no linger, no compression, %d records under way per client", options.batch*options.window),
		fmt.Sprintf("consumer group, position committed every %s", kafkaCommit),
		"1 partition, 1 replica",
	}
}

func (*kafkaSystem) setup(topic string) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(options.address))
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	configs := map[string]*string{}
	if options.durable {
		configs["flush.messages"] = kadm.StringPtr("1")
	}
	_, err = kadm.NewClient(client).CreateTopic(ctx, 1, 1, configs, topic)
	return err
}

type kafkaPublisher struct {
	client *kgo.Client
	topic  string
}

func (*kafkaSystem) publisher(topic string) (publisher, error) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(options.address),
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.ProducerLinger(0),
		kgo.ProducerBatchCompression(kgo.NoCompression()),
		kgo.MaxBufferedRecords(1_000_000),
	)
	if err != nil {
		return nil, err
	}
	return &kafkaPublisher{client, topic}, client.Ping(context.Background())
}

func (p *kafkaPublisher) one(body []byte) error {
	return p.client.ProduceSync(context.Background(), &kgo.Record{Topic: p.topic, Value: body}).FirstErr()
}

func (p *kafkaPublisher) many(bodies [][]byte, done func(error)) {
	var left atomic.Int64
	var first atomic.Pointer[error]
	left.Store(int64(len(bodies)))
	acknowledged := func(_ *kgo.Record, err error) {
		if err != nil {
			first.CompareAndSwap(nil, &err)
		}
		if left.Add(-1) > 0 {
			return
		}
		if failed := first.Load(); failed != nil {
			done(*failed)
		} else {
			done(nil)
		}
	}
	for _, body := range bodies {
		p.client.Produce(context.Background(), &kgo.Record{Topic: p.topic, Value: body}, acknowledged)
	}
}

func (p *kafkaPublisher) close() { p.client.Close() }

func (*kafkaSystem) consume(topic string, handle func(body []byte)) (func(), error) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(options.address),
		kgo.ConsumeTopics(topic),
		kgo.ConsumerGroup(kafkaGroup+"-"+topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.AutoCommitInterval(kafkaCommit),
	)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Add(1)
	go func() {
		defer ended.Done()
		for ctx.Err() == nil {
			fetches := client.PollFetches(ctx)
			for _, failure := range fetches.Errors() {
				if ctx.Err() == nil {
					fail(failure.Err)
				}
			}
			fetches.EachRecord(func(record *kgo.Record) { handle(record.Value) })
		}
	}()
	return func() {
		cancel()
		ended.Wait()
		if err := client.CommitUncommittedOffsets(context.Background()); err != nil {
			fail(err)
		}
		client.Close()
	}, nil
}
