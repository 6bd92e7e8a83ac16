/* The load generator: one thread, one epoll, and little CPU of its own, so that the daemon is what gets measured.
 *
 * It speaks NSQ's V2 protocol, or HTTP, to one daemon on the loopback address. One process runs one mode:
 *
 *   mpub     publish batches; each connection sends the next one when the last is answered
 *   pub      the same with single messages
 *   hmpub    mpub over HTTP: POST /mpub, messages separated by newlines, on keep-alive connections
 *   hpub     pub over HTTP: POST /pub
 *   sub      subscribe, finish every message, and note when 95 % of the expected ones had arrived
 *   latency  publish at a fixed rate with the time in the body, and consume it in the same process
 *   idle     open connections, with --subscribed also subscribe, and only answer heartbeats
 *   connect  connect, IDENTIFY, wait for the answer and close, again and again on each of the connections
 *   flow     publish numbered messages and consume them in the same process; keep account of every number, and report
 *            rates and latencies every --every seconds
 *
 * With --topics N, pub and mpub publish round robin to N topics, <topic>-000000 and so on, and the consumers of sub are
 * spread over them. With --window W, pub and mpub keep W requests under way on each connection instead of one.
 *
 * flow publishes to --topic on --connections, in batches if --batch is above 1, and consumes --channel on --consumers.
 * --rate is in messages a second; 0 publishes as fast as --window allows. It is never more than --ahead messages ahead of
 * its consumers: at a fixed rate it leaves out what is due then, and reports it as skipped. With --lag N one more
 * consumer, of the channel <channel>-lagging, stays between N / 2 and N messages behind. At the end flow stops to
 * publish, and waits until every number has arrived, --grace seconds at most.
 *
 * Standard output carries JSON lines: sub, idle and flow print {"event":"ready"} once every connection stands, and every
 * mode ends with {"event":"done", ...}. All times are CLOCK_MONOTONIC in seconds, so those of two processes can be compared.
 * An error frame, a status other than 200, a closed connection or a missing answer ends the program with a message and status 1.
 * SIGTERM ends sub, idle and flow early; they still report.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum mode { MODE_MPUB, MODE_PUB, MODE_SUB, MODE_LATENCY, MODE_IDLE, MODE_HMPUB, MODE_HPUB, MODE_CONNECT, MODE_FLOW };
enum frame_type { FRAME_RESPONSE = 0, FRAME_ERROR = 1, FRAME_MESSAGE = 2 };

/* A message frame: size (4), type (4), timestamp (8), attempts (2), id (16), body. */
enum { FRAME_HEADER = 8, ATTEMPTS_OFFSET = FRAME_HEADER + 8, ID_OFFSET = FRAME_HEADER + 10, ID_SIZE = 16 };
enum { BODY_OFFSET = ID_OFFSET + ID_SIZE };
enum { FIN_SIZE = 4 + ID_SIZE + 1 };

enum { ANSWER_TIMEOUT = 10, PUBLISH_GRACE = 60, LATENCY_GRACE = 10, MARK_PERCENT = 95, MAX_EVENTS = 64 };

/* flow: a body begins with the time of sending (8) and the number (8). */
enum { NUMBER_OFFSET = 8, FLOW_HEAD = 16 };
/* The numbers that one channel has received: those below low, and from there on those of a window of bits. */
enum { WINDOW = 1 << 22 };
struct ledger {
    uint64_t received, again, low;
    uint64_t seen[WINDOW / 64];
};

struct connection {
    int fd;
    bool watching_writes;
    uint64_t messages;
    /* The topic of its next request, and the answers that came since the last one. */
    int next_topic, answers;
    /* The id of its last first attempt: ids of a topic grow. */
    unsigned char last_id[ID_SIZE];
    /* flow: what this consumer enters its messages into; NULL for a publisher, which counts its requests under way. */
    struct ledger *ledger;
    int under_way;
    /* Received and not yet parsed. */
    unsigned char *in;
    size_t in_len;
    /* What the socket would not take at once; empty nearly always. */
    unsigned char *out;
    size_t out_len, out_cap;
};

static struct {
    enum mode mode;
    const char *topic, *channel, *identify;
    bool numbered_channels, subscribed;
    int port, connections, consumers, batch, size, rdy, rate, topics, window;
    uint64_t messages; /* 0: no limit but the time */
    uint64_t ahead, lag;
    double seconds, every, grace;
} options = {.topic = "bench", .channel = "bench", .identify = "{\"feature_negotiation\":true}", .connections = 1,
             .batch = 200, .size = 200, .rdy = 2500, .rate = 1000, .topics = 1, .window = 1, .consumers = 1,
             .ahead = 100000, .seconds = 5, .every = 1, .grace = 120};

static struct connection *connections;
static size_t in_cap;
static int epoll_fd, timer_fd = -1;
static uint64_t heartbeats;
static volatile sig_atomic_t asked_to_stop;

/* Publishing: the request is the same every time, or one for each topic, all of the same length, in a row. */
static unsigned char *request;
static size_t request_len;
static uint64_t sent, answered;
static int outstanding;

/* Consuming. */
static unsigned char *fins;
static uint64_t received, redelivered, disordered, marked_messages;
static double first_at, marked_at;
static int closing; /* connections that have not answered CLS yet */
static bool closed_for_good;

/* Latency. */
static uint64_t *latencies;

/* Flow: by channel what arrived; late FINs; the latencies since the last report, by buckets. */
static struct ledger ledgers[2];
static uint64_t late_fins, skipped, requests_due, latency_max;
static bool lagging_is_ready, draining;
/* Sixteen buckets for each power of two of nanoseconds. */
enum { BUCKET_BITS = 4, PER_POWER = 1 << BUCKET_BITS, BUCKETS = (64 - BUCKET_BITS + 1) * PER_POWER };
static uint64_t buckets[BUCKETS];

/* The first bytes of every connection that is not HTTP. */
static unsigned char *hello;
static size_t hello_len;

static double started_at, finished_at, cpu_at_start;

static int turn_within(int milliseconds);
static void die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

static void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("load: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

static void *allocate(size_t size)
{
    void *memory = malloc(size);
    if (memory == NULL)
        die("out of memory");
    return memory;
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static bool over_http(void)
{
    return options.mode == MODE_HMPUB || options.mode == MODE_HPUB;
}

static bool in_batches(void)
{
    return options.mode == MODE_MPUB || options.mode == MODE_HMPUB || (options.mode == MODE_FLOW && options.batch > 1);
}

static double now(void)
{
    return (double)now_ns() * 1e-9;
}

static double own_cpu(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

/* All of them: of flow also its consumers. */
static int connection_count(void)
{
    if (options.mode == MODE_LATENCY)
        return 2;
    return options.connections + (options.mode == MODE_FLOW ? options.consumers + (options.lag > 0) : 0);
}

static void put32(unsigned char *p, uint32_t value)
{
    value = htonl(value);
    memcpy(p, &value, 4);
}

static uint32_t get32(const unsigned char *p)
{
    uint32_t value;
    memcpy(&value, p, 4);
    return ntohl(value);
}

static void on_sigterm(int signal_number)
{
    (void)signal_number;
    asked_to_stop = 1;
}

/* ---- sending ---- */

static void watch(struct connection *c, bool writes)
{
    if (c->watching_writes == writes)
        return;
    struct epoll_event event = {.events = EPOLLIN | (writes ? EPOLLOUT : 0), .data.ptr = c};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event) < 0)
        die("epoll_ctl: %s", strerror(errno));
    c->watching_writes = writes;
}

/* How many bytes the socket took; fewer than len when its buffer is full. */
static size_t send_some(struct connection *c, const unsigned char *data, size_t len)
{
    size_t done = 0;
    while (done < len) {
        ssize_t n = send(c->fd, data + done, len - done, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EINTR)
                continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK)
                break;
            die("send: %s", strerror(errno));
        }
        done += (size_t)n;
    }
    return done;
}

/* Waiting for a full socket here could lock up with a daemon that does not read while it writes: keep the rest. */
static void send_bytes(struct connection *c, const void *data, size_t len)
{
    const unsigned char *rest = data;
    if (c->out_len == 0) {
        size_t done = send_some(c, rest, len);
        rest += done;
        len -= done;
    }
    if (len == 0)
        return;
    if (c->out_len + len > c->out_cap) {
        c->out_cap = 2 * (c->out_len + len);
        c->out = realloc(c->out, c->out_cap);
        if (c->out == NULL)
            die("out of memory");
    }
    memcpy(c->out + c->out_len, rest, len);
    c->out_len += len;
    watch(c, true);
}

static void flush_rest(struct connection *c)
{
    size_t done = send_some(c, c->out, c->out_len);
    memmove(c->out, c->out + done, c->out_len - done);
    c->out_len -= done;
    if (c->out_len == 0)
        watch(c, false);
}

static void send_text(struct connection *c, const char *text)
{
    send_bytes(c, text, strlen(text));
}

/* ---- opening a connection: blocking, with a time limit on each answer ---- */

static bool is_heartbeat(const unsigned char *data, size_t len)
{
    return len == 11 && memcmp(data, "_heartbeat_", 11) == 0;
}

/* Read exactly one frame and no byte beyond it. Returns why not, or NULL. */
static const char *await_response(struct connection *c)
{
    for (;;) {
        unsigned char header[FRAME_HEADER];
        ssize_t n = recv(c->fd, header, sizeof header, MSG_WAITALL);
        if (n != (ssize_t)sizeof header)
            return n < 0 ? strerror(errno) : "connection closed by the server";
        uint32_t size = get32(header);
        if (size < 4 || size - 4 > in_cap)
            return "frame size out of range";
        size_t len = size - 4;
        n = recv(c->fd, c->in, len, MSG_WAITALL);
        if (n != (ssize_t)len)
            return n < 0 ? strerror(errno) : "connection closed by the server";
        if (get32(header + 4) == FRAME_ERROR)
            die("the server answered: %.*s", (int)len, (const char *)c->in);
        if (!is_heartbeat(c->in, len))
            return NULL;
        send_text(c, "NOP\n");
    }
}

static void build_hello(void)
{
    size_t body = strlen(options.identify);
    hello = allocate(17 + body);
    memcpy(hello, "  V2IDENTIFY\n", 13);
    put32(hello + 13, (uint32_t)body);
    memcpy(hello + 17, options.identify, body);
    hello_len = 17 + body;
}

/* Connect, and where it is not HTTP, IDENTIFY. Returns why not, or NULL. */
static const char *open_connection(struct connection *c)
{
    struct timeval limit = {.tv_sec = ANSWER_TIMEOUT};
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)options.port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1;

    c->in = allocate(in_cap);
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0)
        return strerror(errno);
    setsockopt(c->fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(c->fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address) < 0)
        return strerror(errno);
    if (over_http())
        return NULL;

    if (send_some(c, hello, hello_len) != hello_len)
        return "the server does not read";
    return await_response(c);
}

/* The name of a topic; with several of them all names are equally long. */
static const char *topic_name(int number)
{
    static char name[80];
    if (options.topics == 1)
        return options.topic;
    snprintf(name, sizeof name, "%s-%06d", options.topic, number);
    return name;
}

static void subscribe(struct connection *c, int number)
{
    char line[256];
    const char *topic = topic_name(number % options.topics);
    if (c->ledger == &ledgers[1])
        snprintf(line, sizeof line, "SUB %s %s-lagging\n", topic, options.channel);
    else if (options.numbered_channels)
        snprintf(line, sizeof line, "SUB %s %s-%d\n", topic, options.channel, number);
    else
        snprintf(line, sizeof line, "SUB %s %s\n", topic, options.channel);
    send_text(c, line);
    const char *why = await_response(c);
    if (why != NULL)
        die("SUB: %s", why);
}

/* From here on the connection belongs to the event loop. */
static void hand_to_loop(struct connection *c)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    if (fcntl(c->fd, F_SETFL, O_NONBLOCK) < 0)
        die("fcntl: %s", strerror(errno));
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event) < 0)
        die("epoll_ctl: %s", strerror(errno));
}

static bool subscribes(int number)
{
    switch (options.mode) {
    case MODE_SUB: return true;
    case MODE_IDLE: return options.subscribed;
    case MODE_LATENCY: return number == 0;
    case MODE_FLOW: return connections[number].ledger != NULL;
    default: return false;
    }
}

static void open_all(int count)
{
    for (int i = 0; i < count; i++) {
        const char *why = open_connection(&connections[i]);
        if (why != NULL) {
            /* Idle connections: as many as the limits of this machine allow, and the report says how many. */
            if (options.mode == MODE_IDLE && i > 0) {
                fprintf(stderr, "load: opened %d of %d connections: %s\n", i, count, why);
                options.connections = i;
                return;
            }
            die("connection %d: %s", i + 1, why);
        }
        if (subscribes(i))
            subscribe(&connections[i], i);
        hand_to_loop(&connections[i]);
        /* The first of many want their heartbeats answered while the last ones connect. */
        if (i % MAX_EVENTS == 0)
            while (turn_within(0) == MAX_EVENTS)
                ;
    }
}

/* ---- publishing ---- */

/* The head that a client library sends: what Go's and Python's have in common. */
static void build_http_request(size_t batch, size_t body)
{
    bool many = options.mode == MODE_HMPUB;
    request_len = (size_t)sprintf((char *)request,
                                  "POST /%s?topic=%s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: bench\r\n"
                                  "Content-Length: %zu\r\nContent-Type: application/octet-stream\r\n"
                                  "Accept-Encoding: gzip\r\n\r\n",
                                  many ? "mpub" : "pub", options.topic, options.port, batch * (body + many) - many);
    for (size_t i = 0; i < batch; i++) {
        if (i > 0)
            request[request_len++] = '\n';
        memset(request + request_len, 'a' + (int)(i % 26), body);
        request_len += body;
    }
}

/* Returns where the request for this topic ends. */
static unsigned char *build_topic_request(unsigned char *p, int number, size_t batch, size_t body)
{
    if (in_batches()) {
        p += sprintf((char *)p, "MPUB %s\n", topic_name(number));
        put32(p, (uint32_t)(4 + batch * (4 + body)));
        put32(p + 4, (uint32_t)batch);
        p += 8;
    } else {
        p += sprintf((char *)p, "PUB %s\n", topic_name(number));
    }
    for (size_t i = 0; i < batch; i++) {
        put32(p, (uint32_t)body);
        memset(p + 4, 'a' + (int)(i % 26), body);
        p += 4 + body;
    }
    return p;
}

static void build_request(void)
{
    size_t body = (size_t)options.size;
    size_t batch = in_batches() ? (size_t)options.batch : 1;
    request = allocate((size_t)options.topics * (600 + batch * (4 + body)));
    if (over_http()) {
        build_http_request(batch, body);
        return;
    }
    unsigned char *end = request;
    for (int i = 0; i < options.topics; i++)
        end = build_topic_request(end, i, batch, body);
    request_len = (size_t)(end - request) / (size_t)options.topics;
}

static uint64_t request_messages(void)
{
    return in_batches() ? (uint64_t)options.batch : 1;
}

/* As many requests as there is room for in the connection's window; those of consecutive topics go out together. */
static void publish_next(struct connection *c, int count)
{
    if (now() >= started_at + options.seconds)
        return;
    if (options.messages > 0) {
        uint64_t left = (options.messages - sent) / request_messages();
        count = left < (uint64_t)count ? (int)left : count;
    }
    while (count > 0) {
        int run = options.topics - c->next_topic < count ? options.topics - c->next_topic : count;
        send_bytes(c, request + (size_t)c->next_topic * request_len, (size_t)run * request_len);
        c->next_topic = (c->next_topic + run) % options.topics;
        sent += (uint64_t)run * request_messages();
        outstanding += run;
        count -= run;
    }
}

/* Send what the timer says is due. The stamp is the time of sending: a late wake-up of ours is not the daemon's. */
static void publish_due(void)
{
    uint64_t due, stamp;
    if (read(timer_fd, &due, sizeof due) != (ssize_t)sizeof due)
        return;
    while (due-- > 0 && sent < options.messages) {
        stamp = now_ns();
        memcpy(request + request_len - (size_t)options.size, &stamp, sizeof stamp);
        send_bytes(&connections[1], request, request_len);
        sent++;
    }
}

static void start_timer(long interval)
{
    struct timespec step = {.tv_sec = interval / 1000000000L, .tv_nsec = interval % 1000000000L};
    struct itimerspec timer = {.it_interval = step, .it_value = step};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (timer_fd < 0 || timerfd_settime(timer_fd, 0, &timer, NULL) < 0)
        die("timerfd: %s", strerror(errno));
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer_fd, &event) < 0)
        die("epoll_ctl: %s", strerror(errno));
}

/* ---- receiving ---- */

static void on_published(struct connection *c)
{
    answered += request_messages();
    outstanding--;
    c->answers++;
}

/* After all answers of one read, so that a window is filled with one write. */
static void go_on_publishing(struct connection *c)
{
    int answers = c->answers;
    c->answers = 0;
    finished_at = now();
    publish_next(c, answers);
}

static void on_response(struct connection *c, const unsigned char *data, size_t len)
{
    if (is_heartbeat(data, len)) {
        send_text(c, "NOP\n");
        heartbeats++;
        return;
    }
    if (len == 10 && memcmp(data, "CLOSE_WAIT", 10) == 0) {
        closing--;
        return;
    }
    if (options.mode == MODE_MPUB || options.mode == MODE_PUB || options.mode == MODE_CONNECT
        || (options.mode == MODE_FLOW && c->ledger == NULL))
        on_published(c);
}

/* A message that timed out here is not ours any more: it comes again. */
static bool is_late_fin(const unsigned char *data, size_t len)
{
    return options.mode == MODE_FLOW && len >= 12 && memcmp(data, "E_FIN_FAILED", 12) == 0;
}

/* One request is under way per connection, so one answer is all that can be in the buffer. */
static void handle_http(struct connection *c)
{
    static const char ok[] = "HTTP/1.1 200 OK\r\n";
    size_t compared = c->in_len < sizeof ok - 1 ? c->in_len : sizeof ok - 1;
    const unsigned char *end;
    if (memcmp(c->in, ok, compared) != 0)
        die("the server answered: %.*s", (int)c->in_len, (const char *)c->in);
    end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
    /* The body is "OK", of both daemons. */
    if (end == NULL || (size_t)(c->in + c->in_len - end) < 6)
        return;
    if (c->in + c->in_len != end + 6 || memcmp(end + 4, "OK", 2) != 0)
        die("an answer that is not OK");
    c->in_len = 0;
    on_published(c);
}

static void on_message_body(const unsigned char *body, size_t len)
{
    uint64_t stamp;
    if (len != (size_t)options.size || received >= options.messages)
        die("a message that was not published");
    memcpy(&stamp, body, sizeof stamp);
    latencies[received] = now_ns() - stamp;
}

static bool is_seen(const struct ledger *l, uint64_t number)
{
    return l->seen[number % WINDOW / 64] >> number % 64 & 1;
}

/* Returns whether this number has come for the first time. */
static bool enter(struct ledger *l, uint64_t number)
{
    if (number >= sent)
        die("message %llu was not published", (unsigned long long)number);
    if (number >= l->low + WINDOW)
        die("message %llu is missing, and %llu has come", (unsigned long long)l->low, (unsigned long long)number);
    if (number < l->low || is_seen(l, number)) {
        l->again++;
        return false;
    }
    l->received++;
    l->seen[number % WINDOW / 64] |= 1ull << number % 64;
    for (; is_seen(l, l->low); l->low++)
        l->seen[l->low % WINDOW / 64] &= ~(1ull << l->low % 64);
    return true;
}

static int bucket_of(uint64_t ns)
{
    if (ns < PER_POWER)
        return (int)ns;
    int power = 63 - __builtin_clzll(ns);
    return (power - BUCKET_BITS + 1) * PER_POWER + (int)(ns >> (power - BUCKET_BITS) & (PER_POWER - 1));
}

static void on_numbered_body(struct connection *c, const unsigned char *body, size_t len, uint64_t arrived)
{
    uint64_t stamp, message;
    if (len != (size_t)options.size)
        die("a message that was not published");
    memcpy(&stamp, body, sizeof stamp);
    memcpy(&message, body + NUMBER_OFFSET, sizeof message);
    /* The lagging channel tells nothing about latency. */
    if (!enter(c->ledger, message) || c->ledger != &ledgers[0])
        return;
    uint64_t latency = arrived > stamp ? arrived - stamp : 0;
    buckets[bucket_of(latency)]++;
    latency_max = latency > latency_max ? latency : latency_max;
}

/* Parse every whole frame in the buffer; all FINs of one read go out in one write. */
static void handle_frames(struct connection *c)
{
    size_t at = 0, fins_len = 0;
    uint64_t arrived = options.mode == MODE_FLOW ? now_ns() : 0;
    while (c->in_len - at >= FRAME_HEADER) {
        const unsigned char *frame = c->in + at;
        size_t total = 4 + (size_t)get32(frame);
        if (total < FRAME_HEADER || total > in_cap)
            die("frame size out of range: %zu", total);
        if (c->in_len - at < total)
            break;
        switch (get32(frame + 4)) {
        case FRAME_RESPONSE:
            on_response(c, frame + FRAME_HEADER, total - FRAME_HEADER);
            break;
        case FRAME_ERROR:
            if (is_late_fin(frame + FRAME_HEADER, total - FRAME_HEADER)) {
                late_fins++;
                break;
            }
            die("the server answered: %.*s", (int)(total - FRAME_HEADER), (const char *)(frame + FRAME_HEADER));
        case FRAME_MESSAGE:
            if (total < BODY_OFFSET)
                die("message frame too short: %zu", total);
            if (closed_for_good)
                break;
            if (options.mode == MODE_LATENCY)
                on_message_body(frame + BODY_OFFSET, total - BODY_OFFSET);
            if (options.mode == MODE_FLOW)
                on_numbered_body(c, frame + BODY_OFFSET, total - BODY_OFFSET, arrived);
            received++;
            if (frame[ATTEMPTS_OFFSET] != 0 || frame[ATTEMPTS_OFFSET + 1] > 1) {
                redelivered++;
            } else {
                disordered += memcmp(frame + ID_OFFSET, c->last_id, ID_SIZE) <= 0;
                memcpy(c->last_id, frame + ID_OFFSET, ID_SIZE);
            }
            c->messages++;
            memcpy(fins + fins_len, "FIN ", 4);
            memcpy(fins + fins_len + 4, frame + ID_OFFSET, ID_SIZE);
            fins[fins_len + FIN_SIZE - 1] = '\n';
            fins_len += FIN_SIZE;
            break;
        default:
            die("unknown frame type %u", get32(frame + 4));
        }
        at += total;
    }
    memmove(c->in, c->in + at, c->in_len - at);
    c->in_len -= at;
    if (fins_len == 0)
        return;
    finished_at = now();
    if (first_at == 0)
        first_at = finished_at;
    if (marked_at == 0 && options.messages > 0 && received * 100 >= options.messages * MARK_PERCENT) {
        marked_at = finished_at;
        marked_messages = received;
    }
    send_bytes(c, fins, fins_len);
}

/* Connections from one address would use up its ports, which stay reserved for a while after the close. */
static void connect_next(struct connection *c)
{
    struct sockaddr_in from = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1 + sent % 200)};
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)options.port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    int one = 1;
    if ((options.messages > 0 && sent >= options.messages) || now() >= started_at + options.seconds)
        return;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (c->fd < 0)
        die("socket: %s", strerror(errno));
    setsockopt(c->fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (bind(c->fd, (struct sockaddr *)&from, sizeof from) < 0)
        die("bind: %s", strerror(errno));
    if (connect(c->fd, (struct sockaddr *)&to, sizeof to) < 0 && errno != EINPROGRESS)
        die("connect: %s", strerror(errno));
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event) < 0)
        die("epoll_ctl: %s", strerror(errno));
    c->watching_writes = false;
    sent++;
    outstanding++;
    /* A socket that is not connected yet takes nothing: the rest goes out when it is. */
    send_bytes(c, hello, hello_len);
}

static void connect_again(struct connection *c)
{
    c->answers = 0;
    close(c->fd);
    finished_at = now();
    connect_next(c);
}

static void receive(struct connection *c)
{
    ssize_t n = recv(c->fd, c->in + c->in_len, in_cap - c->in_len, 0);
    if (n < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)
            return;
        die("recv: %s", strerror(errno));
    }
    if (n == 0)
        die("connection closed by the server");
    c->in_len += (size_t)n;
    if (over_http())
        handle_http(c);
    else
        handle_frames(c);
    if (c->answers == 0)
        return;
    if (options.mode == MODE_CONNECT) {
        connect_again(c);
    } else if (options.mode == MODE_FLOW) {
        c->under_way -= c->answers;
        c->answers = 0;
    } else {
        go_on_publishing(c);
    }
}

/* ---- flow: publishing ---- */

static bool flow_has_room(void)
{
    if (sent - ledgers[0].received >= options.ahead)
        return false;
    return options.lag == 0 || sent - ledgers[1].received < 2 * options.lag;
}

static void flow_publish(struct connection *c)
{
    size_t step = 4 + (size_t)options.size, count = (size_t)request_messages();
    unsigned char *body = request + request_len - count * step + 4;
    uint64_t stamp = now_ns();
    for (size_t i = 0; i < count; i++, body += step, sent++) {
        memcpy(body, &stamp, sizeof stamp);
        memcpy(body + NUMBER_OFFSET, &sent, sizeof sent);
    }
    send_bytes(c, request, request_len);
    c->under_way++;
    outstanding++;
}

/* At a fixed rate: what the clock says is due. */
static void flow_due(void)
{
    uint64_t expirations, due;
    if (read(timer_fd, &expirations, sizeof expirations) != (ssize_t)sizeof expirations || draining)
        return;
    due = (uint64_t)((now() - started_at) * options.rate / (double)request_messages());
    for (; requests_due < due; requests_due++) {
        if (flow_has_room())
            flow_publish(&connections[requests_due % (uint64_t)options.connections]);
        else
            skipped += request_messages();
    }
}

/* As fast as it goes. */
static void flow_fill(void)
{
    for (int i = 0; i < options.connections; i++)
        while (connections[i].under_way < options.window && flow_has_room())
            flow_publish(&connections[i]);
}

static void flow_steer_lagging(void)
{
    char line[32];
    uint64_t behind = sent - ledgers[1].received;
    bool ready = draining || behind > (lagging_is_ready ? options.lag / 2 : options.lag);
    if (options.lag == 0 || ready == lagging_is_ready)
        return;
    lagging_is_ready = ready;
    snprintf(line, sizeof line, "RDY %d\n", ready ? options.rdy : 0);
    send_text(&connections[connection_count() - 1], line);
}

/* ---- the loop ---- */

/* Returns the number of events, MAX_EVENTS if there may be more. */
static int turn_within(int milliseconds)
{
    struct epoll_event events[MAX_EVENTS];
    int n = epoll_wait(epoll_fd, events, MAX_EVENTS, milliseconds);
    if (n < 0 && errno != EINTR)
        die("epoll_wait: %s", strerror(errno));
    for (int i = 0; i < n; i++) {
        struct connection *c = events[i].data.ptr;
        if (c == NULL) {
            if (options.mode == MODE_FLOW)
                flow_due();
            else
                publish_due();
            continue;
        }
        if (events[i].events & EPOLLOUT)
            flush_rest(c);
        if (events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP))
            receive(c);
    }
    return n;
}

static void turn(void)
{
    turn_within(50);
}

/* CLS is answered after every command before it, so its answer says that all our FINs were handled. */
static void close_consumers(void)
{
    double limit = now() + ANSWER_TIMEOUT;
    closed_for_good = true;
    for (int i = 0; i < connection_count(); i++) {
        if (!subscribes(i))
            continue;
        send_text(&connections[i], "CLS\n");
        closing++;
    }
    while (closing > 0) {
        if (now() > limit)
            die("CLS was not answered");
        turn();
    }
}

static void announce_ready(void)
{
    /* Of idle connections perhaps fewer than were asked for. */
    printf("{\"event\":\"ready\",\"connections\":%d}\n", connection_count());
    fflush(stdout);
}

static void begin(void)
{
    cpu_at_start = own_cpu();
    started_at = now();
    finished_at = started_at;
}

/* The part of the report that every mode has; the caller closes the object. */
static void report_common_as(const char *event, uint64_t messages)
{
    printf("{\"event\":\"%s\",\"connections\":%d,\"messages\":%llu,\"started\":%.6f,\"finished\":%.6f,\"cpu\":%.6f", event,
           connection_count(), (unsigned long long)messages, started_at, finished_at, own_cpu() - cpu_at_start);
}

static void report_common(uint64_t messages)
{
    report_common_as("done", messages);
}

static void run_publish(void)
{
    build_request();
    open_all(options.connections);
    begin();
    for (int i = 0; i < options.connections; i++) {
        connections[i].next_topic = (int)((long)i * options.topics / options.connections);
        publish_next(&connections[i], options.window);
    }
    while (outstanding > 0) {
        if (now() > started_at + options.seconds + PUBLISH_GRACE)
            die("a publish was not answered");
        turn();
    }
    report_common(answered);
    puts("}");
}

static void run_connect(void)
{
    for (int i = 0; i < options.connections; i++)
        connections[i].in = allocate(in_cap);
    begin();
    for (int i = 0; i < options.connections; i++)
        connect_next(&connections[i]);
    while (outstanding > 0) {
        if (now() > started_at + options.seconds + ANSWER_TIMEOUT)
            die("an IDENTIFY was not answered");
        turn();
    }
    report_common(answered);
    puts("}");
}

static void run_sub(void)
{
    char line[32];
    uint64_t least = UINT64_MAX, most = 0;
    open_all(options.connections);
    snprintf(line, sizeof line, "RDY %d\n", options.rdy);
    begin();
    for (int i = 0; i < options.connections; i++)
        send_text(&connections[i], line);
    announce_ready();
    while (!asked_to_stop && now() < started_at + options.seconds) {
        if (options.messages > 0 && received >= options.messages)
            break;
        turn();
    }
    report_common(received); /* before the closing, so that the CPU is that of the messages alone */
    for (int i = 0; i < options.connections; i++) {
        least = connections[i].messages < least ? connections[i].messages : least;
        most = connections[i].messages > most ? connections[i].messages : most;
    }
    printf(",\"redelivered\":%llu,\"first\":%.6f,\"marked\":%.6f,\"marked_messages\":%llu,\"least\":%llu,\"most\":%llu"
           ",\"disordered\":%llu",
           (unsigned long long)redelivered, first_at, marked_at, (unsigned long long)marked_messages,
           (unsigned long long)least, (unsigned long long)most,
           (unsigned long long)disordered);
    close_consumers();
    puts("}");
}

static int compare_latencies(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

/* The smallest latency that at least this share of the messages did not exceed, in seconds. */
static double quantile(double share)
{
    double exact = share * (double)received;
    uint64_t rank = (uint64_t)exact;
    if ((double)rank < exact)
        rank++;
    return (double)latencies[rank > 0 ? rank - 1 : 0] * 1e-9;
}

static void run_latency(void)
{
    options.connections = 2; /* the consumer, then the publisher */
    options.messages = (uint64_t)(options.rate * options.seconds);
    if (options.messages == 0)
        die("nothing to publish at this rate in this time");
    latencies = allocate(options.messages * sizeof *latencies);
    build_request();
    open_all(options.connections);
    char line[32];
    snprintf(line, sizeof line, "RDY %d\n", options.rdy);
    send_text(&connections[0], line);
    begin();
    start_timer(1000000000L / options.rate);
    while (received < options.messages) {
        if (now() > started_at + options.seconds + LATENCY_GRACE)
            die("%llu of %llu messages arrived", (unsigned long long)received, (unsigned long long)options.messages);
        turn();
    }
    qsort(latencies, received, sizeof *latencies, compare_latencies);
    report_common(received);
    printf(",\"p50\":%.9f,\"p99\":%.9f,\"p999\":%.9f,\"max\":%.9f}\n", quantile(0.5), quantile(0.99), quantile(0.999),
           quantile(1.0));
}

/* Totals so far, and the latencies since the last report. */
static void report_flow(const char *event)
{
    const char *separator = "";
    report_common_as(event, ledgers[0].received);
    printf(",\"published\":%llu,\"answered\":%llu,\"skipped\":%llu,\"lagging\":%llu,\"again\":%llu,\"late\":%llu,\"max\":%.9f",
           (unsigned long long)sent, (unsigned long long)answered, (unsigned long long)skipped,
           (unsigned long long)ledgers[1].received, (unsigned long long)(ledgers[0].again + ledgers[1].again),
           (unsigned long long)late_fins, (double)latency_max * 1e-9);
    printf(",\"buckets\":[");
    for (int i = 0; i < BUCKETS; i++) {
        if (buckets[i] == 0)
            continue;
        printf("%s[%d,%llu]", separator, i, (unsigned long long)buckets[i]);
        separator = ",";
    }
    puts("]}");
    fflush(stdout);
    memset(buckets, 0, sizeof buckets);
    latency_max = 0;
}

static bool flow_is_drained(void)
{
    return outstanding == 0 && ledgers[0].received == sent && (options.lag == 0 || ledgers[1].received == sent);
}

static void flow_turn(double *report_at)
{
    flow_steer_lagging();
    turn();
    finished_at = now();
    if (finished_at < *report_at)
        return;
    *report_at += options.every;
    report_flow("interval");
}

static void run_flow(void)
{
    char line[32];
    double report_at, limit;
    for (int i = options.connections; i < connection_count(); i++)
        connections[i].ledger = &ledgers[i >= options.connections + options.consumers];
    build_request();
    open_all(connection_count());
    snprintf(line, sizeof line, "RDY %d\n", options.rdy);
    for (int i = 0; i < options.consumers; i++)
        send_text(&connections[options.connections + i], line);
    announce_ready();
    begin();
    if (options.rate > 0) {
        /* Not more often than each millisecond: what is due goes out together. */
        long interval = (long)(1e9 * (double)request_messages() / options.rate);
        start_timer(interval > 1000000 ? interval : 1000000);
    }
    report_at = started_at + options.every;
    while (!asked_to_stop && now() < started_at + options.seconds) {
        if (options.rate == 0)
            flow_fill();
        flow_turn(&report_at);
    }
    draining = true;
    limit = now() + options.grace;
    while (!flow_is_drained() && now() < limit)
        flow_turn(&report_at);
    finished_at = now();
    close_consumers();
    report_flow("done");
}

static void run_idle(void)
{
    open_all(options.connections);
    begin();
    announce_ready();
    while (!asked_to_stop && now() < started_at + options.seconds)
        turn();
    finished_at = now();
    report_common(0);
    printf(",\"heartbeats\":%llu}\n", (unsigned long long)heartbeats);
}

/* ---- the command line ---- */

static long number(const char *name, const char *text, long lowest, long highest)
{
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno != 0 || *end != '\0' || end == text || value < lowest || value > highest)
        die("--%s: %s is not a number from %ld to %ld", name, text, lowest, highest);
    return value;
}

static enum mode mode_named(const char *name)
{
    static const char *const names[] = {"mpub", "pub", "sub", "latency", "idle", "hmpub", "hpub", "connect",
                                        "flow"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0)
            return (enum mode)i;
    die("unknown mode %s", name);
}

static void parse_options(int argc, char **argv)
{
    static const struct option known[] = {
        {"mode", required_argument, NULL, 'm'},       {"port", required_argument, NULL, 'p'},
        {"topic", required_argument, NULL, 't'},      {"channel", required_argument, NULL, 'C'},
        {"connections", required_argument, NULL, 'c'}, {"batch", required_argument, NULL, 'b'},
        {"size", required_argument, NULL, 's'},       {"rdy", required_argument, NULL, 'r'},
        {"rate", required_argument, NULL, 'R'},       {"messages", required_argument, NULL, 'n'},
        {"seconds", required_argument, NULL, 'd'},    {"numbered-channels", no_argument, NULL, 'N'},
        {"topics", required_argument, NULL, 'T'},     {"window", required_argument, NULL, 'w'},
        {"identify", required_argument, NULL, 'i'},   {"subscribed", no_argument, NULL, 'S'},
        {"consumers", required_argument, NULL, 'k'},  {"ahead", required_argument, NULL, 'a'},
        {"lag", required_argument, NULL, 'l'},        {"every", required_argument, NULL, 'e'},
        {"grace", required_argument, NULL, 'g'},
        {NULL, 0, NULL, 0}};
    bool mode_given = false;
    int option;
    while ((option = getopt_long(argc, argv, "", known, NULL)) != -1) {
        switch (option) {
        case 'm': options.mode = mode_named(optarg); mode_given = true; break;
        case 'p': options.port = (int)number("port", optarg, 1, 65535); break;
        case 't': options.topic = optarg; break;
        case 'C': options.channel = optarg; break;
        case 'N': options.numbered_channels = true; break;
        case 'c': options.connections = (int)number("connections", optarg, 1, 1000000); break;
        case 'b': options.batch = (int)number("batch", optarg, 1, 10000); break;
        case 's': options.size = (int)number("size", optarg, 1, 1 << 20); break;
        case 'r': options.rdy = (int)number("rdy", optarg, 1, 1000000); break;
        case 'R': options.rate = (int)number("rate", optarg, 0, 10000000); break;
        case 'n': options.messages = (uint64_t)number("messages", optarg, 0, 1L << 40); break;
        case 'd': options.seconds = (double)number("seconds", optarg, 1, 86400); break;
        case 'T': options.topics = (int)number("topics", optarg, 1, 1000000); break;
        case 'w': options.window = (int)number("window", optarg, 1, 100000); break;
        case 'i': options.identify = optarg; break;
        case 'S': options.subscribed = true; break;
        case 'k': options.consumers = (int)number("consumers", optarg, 1, 1000000); break;
        case 'a': options.ahead = (uint64_t)number("ahead", optarg, 1, 1L << 40); break;
        case 'l': options.lag = (uint64_t)number("lag", optarg, 0, 1L << 40); break;
        case 'e': options.every = (double)number("every", optarg, 1, 86400); break;
        case 'g': options.grace = (double)number("grace", optarg, 1, 86400); break;
        default: exit(2);
        }
    }
    if (!mode_given || options.port == 0)
        die("--mode and --port are needed");
    if (strlen(options.topic) > 64 || strlen(options.channel) > 64)
        die("the names of topics and channels have at most 64 characters");
    if (in_batches() && options.messages % (uint64_t)options.batch != 0)
        die("--messages must be a multiple of --batch");
    if (options.mode == MODE_LATENCY && options.size < (int)sizeof(uint64_t))
        die("--size must be at least %zu for latency: the time is in the body", sizeof(uint64_t));
    if (options.mode == MODE_FLOW && options.size < FLOW_HEAD)
        die("--size must be at least %d for flow: time and number are in the body", FLOW_HEAD);
    if (options.mode != MODE_FLOW && options.rate == 0)
        die("--rate must be greater than 0");
    if (options.mode == MODE_FLOW && (options.topics > 1 || options.numbered_channels || options.messages > 0))
        die("--topics, --numbered-channels and --messages are not for flow");
    if ((over_http() || options.mode == MODE_LATENCY) && (options.topics > 1 || options.window > 1))
        die("--topics and --window are for pub, mpub and sub");
}

int main(int argc, char **argv)
{
    parse_options(argc, argv);
    /* Never outlive the benchmark, however it ended. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct sigaction on_term = {.sa_handler = on_sigterm};
    sigaction(SIGTERM, &on_term, NULL);

    /* An idle connection receives nothing but heartbeats; 10,000 of them must not cost gigabytes here. Elsewhere a whole
     * message must fit, and several small ones. */
    in_cap = options.mode == MODE_IDLE || options.mode == MODE_CONNECT ? 4096 : 1 << 18;
    if (in_cap < 2 * (size_t)options.size)
        in_cap = 2 * (size_t)options.size;
    build_hello();
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    connections = calloc((size_t)connection_count(), sizeof *connections);
    if (epoll_fd < 0 || connections == NULL)
        die("start: %s", strerror(errno));
    /* A FIN is shorter than the smallest message frame, so the FINs of one full buffer always fit. */
    fins = allocate(in_cap);

    switch (options.mode) {
    case MODE_MPUB:
    case MODE_HMPUB:
    case MODE_HPUB:
    case MODE_PUB: run_publish(); break;
    case MODE_SUB: run_sub(); break;
    case MODE_LATENCY: run_latency(); break;
    case MODE_IDLE: run_idle(); break;
    case MODE_CONNECT: run_connect(); break;
    case MODE_FLOW: run_flow(); break;
    }
    return 0;
}
