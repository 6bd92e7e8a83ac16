package main

import (
	"fmt"
	"io"
	"log"

	"github.com/nsqio/go-nsq"
)

// nsqSystem serves flintmq and nsqd alike: the acknowledgement of a publish is OK, that of a message FIN.
type nsqSystem struct{}

const nsqChannel = "bench"

func (*nsqSystem) module() string { return "github.com/nsqio/go-nsq" }

func (*nsqSystem) settings() []string {
	return []string{
		fmt.Sprintf("MPUB of %d, %d under way on each of the producers", options.batch, options.window),
		fmt.Sprintf("MaxInFlight %d, FIN for each message", options.inFlight),
		"output buffering off for the latency at 1,000/s, the default elsewhere",
	}
}

func quiet() *log.Logger { return log.New(io.Discard, "", 0) }

func nsqConfig() *nsq.Config {
	config := nsq.NewConfig()
	config.MaxInFlight = options.inFlight
	if options.unbuffered {
		config.OutputBufferSize = -1
		config.OutputBufferTimeout = -1
	}
	return config
}

func (s *nsqSystem) setup(topic string) error {
	// A subscription without RDY creates both.
	config := nsqConfig()
	config.MaxInFlight = 0
	consumer, err := nsq.NewConsumer(topic, nsqChannel, config)
	if err != nil {
		return err
	}
	consumer.SetLogger(quiet(), nsq.LogLevelError)
	consumer.AddHandler(nsq.HandlerFunc(func(*nsq.Message) error { return nil }))
	if err := consumer.ConnectToNSQD(options.address); err != nil {
		return err
	}
	consumer.Stop()
	<-consumer.StopChan
	return nil
}

type nsqPublisher struct {
	producer *nsq.Producer
	topic    string
	done     chan *nsq.ProducerTransaction
}

func (*nsqSystem) publisher(topic string) (publisher, error) {
	producer, err := nsq.NewProducer(options.address, nsqConfig())
	if err != nil {
		return nil, err
	}
	producer.SetLogger(quiet(), nsq.LogLevelError)
	if err := producer.Ping(); err != nil {
		return nil, err
	}
	p := &nsqPublisher{producer, topic, make(chan *nsq.ProducerTransaction, 1024)}
	go func() {
		for transaction := range p.done {
			transaction.Args[0].(func(error))(transaction.Error)
		}
	}()
	return p, nil
}

func (p *nsqPublisher) one(body []byte) error { return p.producer.Publish(p.topic, body) }

func (p *nsqPublisher) many(bodies [][]byte, done func(error)) {
	var err error
	if len(bodies) == 1 {
		err = p.producer.PublishAsync(p.topic, bodies[0], p.done, done)
	} else {
		err = p.producer.MultiPublishAsync(p.topic, bodies, p.done, done)
	}
	if err != nil {
		go done(err)
	}
}

func (p *nsqPublisher) close() { p.producer.Stop() }

func (*nsqSystem) consume(topic string, handle func(body []byte)) (func(), error) {
	consumer, err := nsq.NewConsumer(topic, nsqChannel, nsqConfig())
	if err != nil {
		return nil, err
	}
	consumer.SetLogger(quiet(), nsq.LogLevelError)
	consumer.AddHandler(nsq.HandlerFunc(func(message *nsq.Message) error {
		handle(message.Body)
		return nil
	}))
	if err := consumer.ConnectToNSQD(options.address); err != nil {
		return nil, err
	}
	return func() {
		consumer.Stop()
		<-consumer.StopChan
	}, nil
}
