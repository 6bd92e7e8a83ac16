// go-nsq behind the line protocol (see ../README.md). scripts/peers builds it.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nsqio/go-nsq"
)

// A body of 900 kB is a line of 1.2 MB.
const longestLine = 16 << 20

// command is one line from the test; encoding/json reads base64 into []byte by itself.
type command struct {
	Number       int      `json:"command"`
	Do           string   `json:"do"`
	Topic        string   `json:"topic"`
	Channel      string   `json:"channel"`
	Body         []byte   `json:"body"`
	Bodies       [][]byte `json:"bodies"`
	DelayMs      int64    `json:"delay_ms"`
	MaxInFlight  int      `json:"max_in_flight"`
	MsgTimeoutMs int64    `json:"msg_timeout_ms"`
	Delivery     int      `json:"delivery"`
}

// driver holds what the handlers' goroutines and the command loop share.
type driver struct {
	address  string
	producer *nsq.Producer

	lock         sync.Mutex
	out          *json.Encoder
	deliveries   map[int]*nsq.Message
	lastDelivery int
}

type fields map[string]interface{}

func (d *driver) write(event string, f fields) {
	d.lock.Lock()
	defer d.lock.Unlock()
	d.writeLocked(event, f)
}

func (d *driver) writeLocked(event string, f fields) {
	f["event"] = event
	if err := d.out.Encode(f); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// Output is go-nsq's logger: what it logs as an error becomes an event, the rest goes to the driver's log.
func (d *driver) Output(_ int, line string) error {
	if strings.HasPrefix(line, "ERR") {
		d.write("error", fields{"text": "go-nsq: " + line})
	}
	fmt.Fprintln(os.Stderr, line)
	return nil
}

func (d *driver) deliver(channel string, message *nsq.Message) {
	d.lock.Lock()
	defer d.lock.Unlock()
	d.lastDelivery++
	d.deliveries[d.lastDelivery] = message
	d.writeLocked("message", fields{
		"delivery":  d.lastDelivery,
		"channel":   channel,
		"id":        string(message.ID[:]),
		"timestamp": strconv.FormatInt(message.Timestamp, 10),
		"attempts":  message.Attempts,
		"body":      message.Body,
	})
}

func (d *driver) message(delivery int) *nsq.Message {
	d.lock.Lock()
	defer d.lock.Unlock()
	return d.deliveries[delivery]
}

func (d *driver) take(delivery int) *nsq.Message {
	d.lock.Lock()
	defer d.lock.Unlock()
	message := d.deliveries[delivery]
	delete(d.deliveries, delivery)
	return message
}

func (d *driver) subscribe(c command) error {
	config := nsq.NewConfig()
	config.MaxInFlight = c.MaxInFlight
	config.MaxAttempts = 0
	config.MsgTimeout = time.Duration(c.MsgTimeoutMs) * time.Millisecond
	consumer, err := nsq.NewConsumer(c.Topic, c.Channel, config)
	if err != nil {
		return err
	}
	consumer.SetLogger(d, nsq.LogLevelInfo)
	consumer.AddHandler(nsq.HandlerFunc(func(message *nsq.Message) error {
		message.DisableAutoResponse()
		d.deliver(c.Channel, message)
		return nil
	}))
	return consumer.ConnectToNSQD(d.address)
}

func (d *driver) perform(c command) error {
	switch c.Do {
	case "pub":
		return d.producer.Publish(c.Topic, c.Body)
	case "mpub":
		return d.producer.MultiPublish(c.Topic, c.Bodies)
	case "dpub":
		return d.producer.DeferredPublish(c.Topic, time.Duration(c.DelayMs)*time.Millisecond, c.Body)
	case "subscribe":
		return d.subscribe(c)
	case "fin":
		d.take(c.Delivery).Finish()
	case "req":
		d.take(c.Delivery).RequeueWithoutBackoff(time.Duration(c.DelayMs) * time.Millisecond)
	case "touch":
		d.message(c.Delivery).Touch()
	default:
		return fmt.Errorf("no such command: %s", c.Do)
	}
	return nil
}

func main() {
	d := &driver{address: os.Args[1], out: json.NewEncoder(os.Stdout), deliveries: map[int]*nsq.Message{}}
	producer, err := nsq.NewProducer(d.address, nsq.NewConfig())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	producer.SetLogger(d, nsq.LogLevelInfo)
	d.producer = producer
	d.write("hello", fields{"lacks": []string{}})

	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, longestLine)
	for lines.Scan() {
		var c command
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			d.write("error", fields{"text": "go-nsq driver: " + err.Error()})
			continue
		}
		if err := d.perform(c); err != nil {
			d.write("failed", fields{"command": c.Number, "error": err.Error()})
		} else {
			d.write("done", fields{"command": c.Number})
		}
	}
}
