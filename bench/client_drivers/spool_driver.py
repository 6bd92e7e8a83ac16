import json
import sys
import tempfile
import time

from stopwatch import Reading, Stopwatch

from flintmq.spark.shipped.options import read_source_options
from flintmq.spark.spool_mode.filling import Spooler
from flintmq.spark.spool_mode.spool import Spool

SCENARIO, ADDRESS, MESSAGES = sys.argv[1], sys.argv[2], int(sys.argv[3])


def consume() -> Reading:
    options = {"nsq.nsqd.addresses": ADDRESS, "mode": "spool", "subscribe": "bench", "channel": "clients"}
    with tempfile.TemporaryDirectory(prefix="flintmq-bench-") as folder:
        spooler = Spooler(read_source_options(options, streaming=True), Spool(folder))
        spooler.start()
        try:
            while not spooler.spool.end:
                time.sleep(0.001)
                spooler.check()
            watch = Stopwatch()
            while spooler.spool.end < MESSAGES:
                time.sleep(0.001)
                spooler.check()
            return watch.read()
        finally:
            spooler.close()
            spooler.spool.close()


json.dump({"consume": consume}[SCENARIO](), sys.stdout)
