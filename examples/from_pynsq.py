"""A pynsq program. Only the import was changed; it was `import nsq`."""

import os

from flintmq.compat import pynsq as nsq

NSQD = os.environ.get("NSQD", "127.0.0.1:4150")


def handler(message: nsq.Message) -> bool:
    print("received", message.body.decode(), flush=True)
    return True


reader = nsq.Reader("events", "old_program", handler, nsqd_tcp_addresses=[NSQD], max_in_flight=10)
nsq.run()
