// The load generator for the comparison of brokers: one program, so that every broker meets a fast client of the same
// language, and the same loops around it.
//
// It runs one mode against one broker and prints one line of JSON:
//
//	describe  the client, its version and its settings
//	setup     create the topic (stream, queue) with one subscription whose consumer has not come yet
//	one       publish one message at a time on each of -publishers, and wait for each acknowledgement
//	batch     publish batches, with -window of them under way on each of -publishers
//	consume   consume and acknowledge -messages that wait, and note when 95 % had arrived
//	through   publish and consume at once, as fast as it goes with at most -unread messages not yet consumed
//	latency   publish -rate messages a second with the time in the body, and consume them here
//
// The files beside this one hold one broker's client each, behind the interface system.
package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"runtime/debug"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A publisher has a connection of its own and is used by one goroutine.
type publisher interface {
	// one publishes a message and waits for its acknowledgement.
	one(body []byte) error
	// many begins to publish messages and calls done once, when all are acknowledged or one has failed. It may wait
	// where the client library does.
	many(bodies [][]byte, done func(error))
	close()
}

// A system is the client of one kind of broker.
type system interface {
	// module is the Go module of the client.
	module() string
	settings() []string
	setup(topic string) error
	publisher(topic string) (publisher, error)
	// consume calls handle for every message, perhaps from several goroutines, and acknowledges it afterwards.
	consume(topic string, handle func(body []byte)) (stop func(), err error)
}

var options struct {
	system, address, mode, topic            string
	publishers, batch, window, size, unread int
	messages                                int64
	inFlight                                int
	seconds, rate                           float64
	unbuffered, durable                     bool
}

// What every mode reports; a mode fills in what it has.
type report struct {
	Client   string   `json:"client,omitempty"`
	Settings []string `json:"settings,omitempty"`
	Messages int64    `json:"messages"`
	Seconds  float64  `json:"seconds"`
	Rate     float64  `json:"rate"`
	CPU      float64  `json:"cpu"`
	P50      float64  `json:"p50,omitempty"`
	P99      float64  `json:"p99,omitempty"`
	P999     float64  `json:"p999,omitempty"`
	Max      float64  `json:"max,omitempty"`
}

const (
	// The share of the expected messages at which consuming is timed.
	mark = 0.95
	// The longest time without any progress.
	patience = 60 * time.Second
	// Latencies of the first second are not counted: connections and code are warm afterwards.
	warmUp = time.Second
	// The pace of the publisher where messages come faster than that.
	tick = time.Millisecond
)

func main() {
	flag.StringVar(&options.system, "system", "", "nsq, jetstream, redis, kafka or rabbitmq")
	flag.StringVar(&options.address, "address", "", "host:port of the broker")
	flag.StringVar(&options.mode, "mode", "", "describe, setup, one, batch, consume, through or latency")
	flag.StringVar(&options.topic, "topic", "bench", "topic, stream or queue")
	flag.IntVar(&options.publishers, "publishers", 1, "publishers, each with a connection")
	flag.IntVar(&options.batch, "batch", 200, "messages of a batch")
	flag.IntVar(&options.window, "window", 4, "batches under way per publisher")
	flag.IntVar(&options.size, "size", 200, "bytes of a message, at least 8")
	flag.IntVar(&options.unread, "unread", 20000, "messages published and not yet consumed, at most (through)")
	flag.Int64Var(&options.messages, "messages", 0, "messages; 0: as many as the time allows")
	flag.IntVar(&options.inFlight, "in-flight", 2500, "messages that a consumer may hold unacknowledged")
	flag.Float64Var(&options.seconds, "seconds", 5, "the most seconds to publish")
	flag.Float64Var(&options.rate, "rate", 1000, "messages a second (latency)")
	flag.BoolVar(&options.unbuffered, "unbuffered", false, "nsq: switch the daemon's output buffering off")
	flag.BoolVar(&options.durable, "durable", false, "kafka: create topics with flush.messages=1")
	flag.Parse()
	if options.size < 8 || options.batch < 1 || options.publishers < 1 || options.window < 1 {
		fail(errors.New("-size must be at least 8, -batch, -publishers and -window at least 1"))
	}
	// The client's garbage must not be what is measured.
	debug.SetGCPercent(400)
	result, err := run()
	if err != nil {
		fail(err)
	}
	result.CPU = ownCPU() - result.CPU
	if err := json.NewEncoder(os.Stdout).Encode(result); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintf(os.Stderr, "load: %s: %v\n", options.mode, err)
	os.Exit(1)
}

func systemNamed(name string) (system, error) {
	switch name {
	case "nsq":
		return &nsqSystem{}, nil
	case "jetstream":
		return &jetstreamSystem{}, nil
	case "redis":
		return &redisSystem{}, nil
	case "kafka":
		return &kafkaSystem{}, nil
	case "rabbitmq":
		return &rabbitSystem{}, nil
	}
	return nil, fmt.Errorf("unknown system %q", name)
}

func run() (report, error) {
	s, err := systemNamed(options.system)
	if err != nil {
		return report{}, err
	}
	switch options.mode {
	case "describe":
		return report{Client: version(s.module()), Settings: s.settings()}, nil
	case "setup":
		return report{}, s.setup(options.topic)
	case "one":
		return publishOne(s)
	case "batch":
		return publishBatches(s)
	case "consume":
		return consume(s)
	case "through":
		return through(s)
	case "latency":
		return latency(s)
	}
	return report{}, fmt.Errorf("unknown mode %q", options.mode)
}

// The module and its version, as it was built in.
func version(module string) string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dependency := range info.Deps {
			if dependency.Path == module {
				return module + " " + dependency.Version
			}
		}
	}
	return module
}

func ownCPU() float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return float64(u.Utime.Sec+u.Stime.Sec) + float64(u.Utime.Usec+u.Stime.Usec)*1e-6
}

func body() []byte {
	return []byte(strings.Repeat("abcdefghijklmnopqrstuvwxyz", options.size/26+1)[:options.size])
}

func openPublishers(s system) ([]publisher, error) {
	publishers := make([]publisher, options.publishers)
	for i := range publishers {
		p, err := s.publisher(options.topic)
		if err != nil {
			return nil, err
		}
		publishers[i] = p
	}
	return publishers, nil
}

// A budget of messages and of time, shared by the publishers.
type budget struct {
	left  atomic.Int64
	until time.Time
}

func newBudget() *budget {
	b := &budget{until: time.Now().Add(time.Duration(options.seconds * float64(time.Second)))}
	b.left.Store(math.MaxInt64)
	if options.messages > 0 {
		b.left.Store(options.messages)
	}
	return b
}

func (b *budget) take(count int64) bool {
	return time.Now().Before(b.until) && b.left.Add(-count) >= 0
}

// Run publish on every publisher until all have ended. The time is that to the last acknowledgement.
func eachPublisher(s system, publish func(p publisher, b *budget) (int64, error)) (report, error) {
	publishers, err := openPublishers(s)
	if err != nil {
		return report{}, err
	}
	cpu, b, began := ownCPU(), newBudget(), time.Now()
	var total atomic.Int64
	failures := make(chan error, len(publishers))
	for _, p := range publishers {
		go func() {
			count, err := publish(p, b)
			total.Add(count)
			failures <- err
		}()
	}
	for range publishers {
		err = errors.Join(err, <-failures)
	}
	seconds := time.Since(began).Seconds()
	if err != nil {
		return report{}, err
	}
	for _, p := range publishers {
		p.close()
	}
	return report{Messages: total.Load(), Seconds: seconds, Rate: float64(total.Load()) / seconds, CPU: cpu}, nil
}

func publishOne(s system) (report, error) {
	message := body()
	return eachPublisher(s, func(p publisher, b *budget) (count int64, err error) {
		for b.take(1) {
			if err := p.one(message); err != nil {
				return count, err
			}
			count++
		}
		return count, nil
	})
}

func publishBatches(s system) (report, error) {
	bodies := make([][]byte, options.batch)
	for i := range bodies {
		bodies[i] = body()
	}
	return eachPublisher(s, func(p publisher, b *budget) (int64, error) {
		return windowed(p, bodies, func() bool { return b.take(int64(len(bodies))) })
	})
}

// Keep -window batches under way for as long as more returns true; then wait for all.
func windowed(p publisher, bodies [][]byte, more func() bool) (int64, error) {
	done := make(chan error, options.window)
	underway, count := 0, int64(0)
	var failed error
	for failed == nil && more() {
		p.many(bodies, func(err error) { done <- err })
		underway++
		if underway == options.window {
			failed = await(done)
			underway--
			count += int64(len(bodies))
		}
	}
	for ; underway > 0 && failed == nil; underway-- {
		failed = await(done)
		count += int64(len(bodies))
	}
	return count, failed
}

func await(done chan error) error {
	select {
	case err := <-done:
		return err
	case <-time.After(patience):
		return errors.New("a publish was not acknowledged")
	}
}

// Wait until condition holds. Progress is what shows that something still happens.
func wait(condition func() bool, progress func() int64, limit time.Duration) bool {
	seen, since := progress(), time.Now()
	for !condition() {
		time.Sleep(200 * time.Microsecond)
		if now := progress(); now != seen {
			seen, since = now, time.Now()
		} else if time.Since(since) > limit {
			return false
		}
	}
	return true
}

func consume(s system) (report, error) {
	if options.messages < 1 {
		return report{}, errors.New("-messages is needed")
	}
	var received, first, marked, markedAt atomic.Int64
	began, cpu := time.Now(), ownCPU()
	atMark := int64(math.Ceil(mark * float64(options.messages)))
	stop, err := s.consume(options.topic, func([]byte) {
		switch received.Add(1) {
		case 1:
			first.Store(int64(time.Since(began)))
		case atMark:
			marked.Store(int64(time.Since(began)))
			markedAt.Store(atMark)
		}
	})
	if err != nil {
		return report{}, err
	}
	all := func() bool { return received.Load() >= options.messages }
	if !wait(all, received.Load, patience) {
		return report{}, fmt.Errorf("%d of %d messages arrived", received.Load(), options.messages)
	}
	stop()
	if received.Load() != options.messages {
		return report{}, fmt.Errorf("%d messages arrived instead of %d", received.Load(), options.messages)
	}
	seconds := time.Duration(marked.Load() - first.Load()).Seconds()
	return report{Messages: received.Load(), Seconds: seconds, Rate: float64(atMark) / seconds, CPU: cpu}, nil
}

// The consumer is there when a message that was published for that has arrived.
func consumerReady(p publisher, received *atomic.Int64) error {
	if err := p.one(make([]byte, options.size)); err != nil {
		return err
	}
	if !wait(func() bool { return received.Load() > 0 }, received.Load, patience) {
		return errors.New("the consumer received nothing")
	}
	return nil
}

func through(s system) (report, error) {
	publishers, err := openPublishers(s)
	if err != nil {
		return report{}, err
	}
	var received atomic.Int64
	stop, err := s.consume(options.topic, func([]byte) { received.Add(1) })
	if err != nil {
		return report{}, err
	}
	if err := consumerReady(publishers[0], &received); err != nil {
		return report{}, err
	}
	bodies := make([][]byte, options.batch)
	for i := range bodies {
		bodies[i] = body()
	}
	var begun atomic.Int64
	begun.Store(1)
	cpu, began := ownCPU(), time.Now()
	until := began.Add(time.Duration(options.seconds * float64(time.Second)))
	room := func() bool { return begun.Load()-received.Load() < int64(options.unread) }
	failures := make(chan error, len(publishers))
	for _, p := range publishers {
		go func() {
			_, err := windowed(p, bodies, func() bool {
				if !wait(room, received.Load, patience) {
					return false
				}
				begun.Add(int64(len(bodies)))
				return time.Now().Before(until)
			})
			failures <- err
		}()
	}
	time.Sleep(time.Until(began.Add(warmUp)))
	from, at := received.Load(), time.Now()
	time.Sleep(time.Until(until))
	count, seconds := received.Load()-from, time.Since(at).Seconds()
	for range publishers {
		err = errors.Join(err, <-failures)
	}
	stop()
	for _, p := range publishers {
		p.close()
	}
	return report{Messages: count, Seconds: seconds, Rate: float64(count) / seconds, CPU: cpu}, err
}

func latency(s system) (report, error) {
	p, err := s.publisher(options.topic)
	if err != nil {
		return report{}, err
	}
	total := int64(options.rate * options.seconds)
	latencies := make([]int64, total)
	var received, counted atomic.Int64
	epoch := time.Now()
	var countFrom atomic.Int64
	countFrom.Store(math.MaxInt64)
	stop, err := s.consume(options.topic, func(data []byte) {
		stamp := int64(binary.BigEndian.Uint64(data))
		if stamp >= countFrom.Load() {
			if i := counted.Add(1) - 1; i < total {
				latencies[i] = int64(time.Since(epoch)) - stamp
			}
		}
		received.Add(1)
	})
	if err != nil {
		return report{}, err
	}
	if err := consumerReady(p, &received); err != nil {
		return report{}, err
	}
	probes := received.Load()
	cpu, began := ownCPU(), time.Now()
	countFrom.Store(int64(began.Add(warmUp).Sub(epoch)))
	var acknowledged sync.WaitGroup
	var failed atomic.Pointer[error]
	sent := int64(0)
	interval := max(tick, time.Duration(float64(time.Second)/options.rate))
	ticker := time.NewTicker(interval)
	for sent < total && failed.Load() == nil {
		<-ticker.C
		due := min(int64(time.Since(began).Seconds()*options.rate), total) - sent
		for due > 0 {
			bodies := make([][]byte, min(due, int64(options.batch)))
			memory := make([]byte, len(bodies)*options.size)
			stamp := uint64(time.Since(epoch))
			for i := range bodies {
				bodies[i] = memory[i*options.size : (i+1)*options.size : (i+1)*options.size]
				binary.BigEndian.PutUint64(bodies[i], stamp)
			}
			acknowledged.Add(1)
			p.many(bodies, func(err error) {
				if err != nil {
					failed.Store(&err)
				}
				acknowledged.Done()
			})
			sent += int64(len(bodies))
			due -= int64(len(bodies))
		}
	}
	published := time.Since(began).Seconds()
	acknowledged.Wait()
	if err := failed.Load(); err != nil {
		return report{}, *err
	}
	if !wait(func() bool { return received.Load()-probes >= sent }, received.Load, patience) {
		return report{}, fmt.Errorf("%d of %d messages arrived", received.Load()-probes, sent)
	}
	stop()
	p.close()
	measured := latencies[:min(counted.Load(), total)]
	if len(measured) == 0 {
		return report{}, errors.New("no message was measured: -seconds must be more than the warm-up")
	}
	sort.Slice(measured, func(i, j int) bool { return measured[i] < measured[j] })
	return report{
		Messages: sent, Seconds: published, Rate: float64(sent) / published, CPU: cpu,
		P50: quantile(measured, 0.5), P99: quantile(measured, 0.99), P999: quantile(measured, 0.999), Max: quantile(measured, 1),
	}, nil
}

// The smallest latency that at least this share of the messages did not exceed, in seconds.
func quantile(sorted []int64, share float64) float64 {
	rank := int(math.Ceil(share * float64(len(sorted))))
	return float64(sorted[max(rank, 1)-1]) * 1e-9
}
