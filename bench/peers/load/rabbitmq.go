package main

import (
	"context"
	"errors"
	"fmt"
	"sync"

	amqp "github.com/rabbitmq/amqp091-go"
)

type rabbitSystem struct{}

func (*rabbitSystem) module() string { return "github.com/rabbitmq/amqp091-go" }

func (*rabbitSystem) settings() []string {
	return []string{
		fmt.Sprintf("publisher confirms, %d under way on each of the connections", options.batch*options.window),
		fmt.Sprintf("prefetch %d, ack of each message", options.inFlight),
		"durable classic queue, persistent messages",
	}
}

func rabbitChannel() (*amqp.Connection, *amqp.Channel, error) {
	connection, err := amqp.Dial("amqp://guest:guest@" + options.address + "/")
	if err != nil {
		return nil, nil, err
	}
	channel, err := connection.Channel()
	return connection, channel, err
}

func (*rabbitSystem) setup(topic string) error {
	connection, channel, err := rabbitChannel()
	if err != nil {
		return err
	}
	defer connection.Close()
	_, err = channel.QueueDeclare(topic, true, false, false, false, nil)
	return err
}

type rabbitPublisher struct {
	connection *amqp.Connection
	channel    *amqp.Channel
	topic      string
}

func (*rabbitSystem) publisher(topic string) (publisher, error) {
	connection, channel, err := rabbitChannel()
	if err != nil {
		return nil, err
	}
	return &rabbitPublisher{connection, channel, topic}, channel.Confirm(false)
}

func (p *rabbitPublisher) begin(body []byte) (*amqp.DeferredConfirmation, error) {
	message := amqp.Publishing{DeliveryMode: amqp.Persistent, Body: body}
	return p.channel.PublishWithDeferredConfirmWithContext(context.Background(), "", p.topic, false, false, message)
}

var errRefused = errors.New("the broker refused a message")

func (p *rabbitPublisher) one(body []byte) error {
	confirmation, err := p.begin(body)
	if err != nil {
		return err
	}
	if !confirmation.Wait() {
		return errRefused
	}
	return nil
}

func (p *rabbitPublisher) many(bodies [][]byte, done func(error)) {
	confirmations := make([]*amqp.DeferredConfirmation, 0, len(bodies))
	for _, body := range bodies {
		confirmation, err := p.begin(body)
		if err != nil {
			go done(err)
			return
		}
		confirmations = append(confirmations, confirmation)
	}
	go func() {
		for _, confirmation := range confirmations {
			if !confirmation.Wait() {
				done(errRefused)
				return
			}
		}
		done(nil)
	}()
}

func (p *rabbitPublisher) close() { p.connection.Close() }

func (*rabbitSystem) consume(topic string, handle func(body []byte)) (func(), error) {
	connection, channel, err := rabbitChannel()
	if err != nil {
		return nil, err
	}
	if err := channel.Qos(options.inFlight, 0, false); err != nil {
		return nil, err
	}
	const tag = "bench"
	deliveries, err := channel.Consume(topic, tag, false, false, false, false, nil)
	if err != nil {
		return nil, err
	}
	var ended sync.WaitGroup
	ended.Add(1)
	go func() {
		defer ended.Done()
		for delivery := range deliveries {
			handle(delivery.Body)
			if err := delivery.Ack(false); err != nil {
				fail(err)
			}
		}
	}()
	return func() {
		// The server's answer to this comes after all acks.
		if err := channel.Cancel(tag, false); err != nil {
			fail(err)
		}
		ended.Wait()
		connection.Close()
	}, nil
}
