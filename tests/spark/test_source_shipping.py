"""What is shipped runs where flintmq is not: everything is pickled by value, and needs pyspark and pyarrow alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("pyspark")

from .conftest import SOURCE


def run(code, *arguments, path=(), python=sys.executable):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    done = subprocess.run(
        [python, "-c", textwrap.dedent(code), *arguments], env=env, cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class Catalog:
    """As much of a session as `register` touches: what it would have pickled."""

    def __init__(self):
        self.dataSource = self
        self.pickled = b""

    def register(self, source):
        from pyspark import cloudpickle

        self.pickled = cloudpickle.dumps(source)


def test_a_shipped_source_needs_nothing_of_ours(bare_python, broker, topic, tmp_path):
    from flintmq.spark import register

    broker.publish(topic, (b"%d" % n for n in range(100)))
    catalog = Catalog()
    register(catalog, ship=True)
    (tmp_path / "source").write_bytes(catalog.pickled)
    printed = run(
        """
        import sys
        from pyspark import cloudpickle
        from pyspark.sql.datasource import CaseInsensitiveDict
        from pyspark.sql.types import StructType
        assert not any(name.startswith("flintmq") for name in sys.modules)
        Source = cloudpickle.loads(open(sys.argv[1], "rb").read())
        given = CaseInsensitiveDict({"nsq.nsqd.addresses": sys.argv[2], "subscribe": sys.argv[3]})
        schema = StructType()
        for field in Source(given).schema().split(", "):
            name, kind = field.split()
            schema = schema.add(name, {"BIGINT": "long", "INT": "integer"}.get(kind, kind.lower()))
        while True:
            reader = Source(given).reader(schema)
            rows = 0
            for part in reader.partitions():
                # To an executor and back.
                reader, part = cloudpickle.loads(cloudpickle.dumps((reader, part)))
                rows += sum(batch.num_rows for batch in reader.read(part))
            if rows == 100:
                break
        print(rows)
        stream = Source(given).streamReader(schema)
        stream.initialOffset()
        print(len(cloudpickle.dumps(stream)) > 0)
        stream.stop()
        try:
            Source(CaseInsensitiveDict({"subscrib": "x"})).schema()
        except Exception as exc:
            print(exc)
        Sink = Source(CaseInsensitiveDict({"nsq.nsqd.addresses": sys.argv[2], "topic": sys.argv[3] + "-out"}))
        writer = Sink.writer(schema=StructType().add("value", "string"), overwrite=False)
        writer = cloudpickle.loads(cloudpickle.dumps(writer))
        import pyarrow as pa
        rows = iter([pa.record_batch([pa.array(["a", "b"])], names=["value"])])
        done = writer._job.write(rows, writer._write, 0)
        # To the driver and back.
        done = cloudpickle.loads(cloudpickle.dumps(done))
        print(done.rows, done.staged is not None)
        writer.commit([done])
        print(any(name.startswith("flintmq") for name in sys.modules))
        """,
        str(tmp_path / "source"),
        broker.tcp,
        topic,
        python=bare_python,
    )
    assert printed == [
        "100",
        "True",
        'format "nsq" has no option subscrib: did you mean subscribe?',
        "2 True",
        "False",
    ]
    assert broker.get("/log/info", topic=f"{topic}-out")["topic"]


def test_without_shipping_a_source_is_a_name():
    from flintmq.spark import register

    catalog = Catalog()
    register(catalog)
    assert len(catalog.pickled) < 200
    register(catalog, ship=True)
    shipped = len(catalog.pickled)
    register(catalog)
    # What was said for one is not said for the next.
    assert len(catalog.pickled) < 200 < shipped


def test_spark_finds_the_source_by_itself_and_pays_nothing_before():
    printed = run(
        """
        import sys
        import pyspark_nsq
        print(sorted(name for name in sys.modules if name.startswith(("pyspark.", "flintmq", "pyarrow"))))
        from pyspark.sql.datasource import DataSource
        print(hasattr(pyspark_nsq, "DefaultSource") and issubclass(pyspark_nsq.DefaultSource, DataSource))
        print(pyspark_nsq.DefaultSource.name(), "pyarrow" in sys.modules)
        """,
        path=[SOURCE],
    )
    assert printed == ["[]", "True", "nsq False"]


def test_where_the_source_cannot_be_imported_there_is_simply_none():
    printed = run(
        """
        import sys
        sys.modules["flintmq"] = None
        import pyspark_nsq
        print(hasattr(pyspark_nsq, "DefaultSource"))
        """,
        path=[SOURCE],
    )
    assert printed == ["False"]


@pytest.mark.parametrize(
    ("words", "is_local"),
    [
        (["--conf", "spark.master=local[2,4]"], True),
        (["--master", "local"], True),
        (["--master", "local[*]"], True),
        (["--conf", "spark.master=local-cluster[2,1,1024]"], False),
        (["--master", "spark://host:7077"], False),
        (["--master", "yarn"], False),
        ([], False),
    ],
)
def test_a_spool_has_a_place_of_its_own_only_on_one_machine(words, is_local):
    """Spark's JVM is some ancestor of the source's process; its command line says where it runs."""
    child = """
        from flintmq.spark.shipped.options import read_source_options
        from flintmq.spark.spool_mode.spool import default_location
        given = {"nsq.nsqd.addresses": "a:1", "subscribe": "t", "channel": "c", "mode": "spool"}
        try:
            print(default_location(read_source_options(given, streaming=True)).rpartition("/")[0][-14:])
        except Exception as exc:
            print(exc)
    """
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {textwrap.dedent(child)!r}], check=True)"
    (printed,) = run(parent, *words, path=[SOURCE])
    assert printed == "/flintmq/spool" if is_local else "needs the option spoolLocation" in printed


def test_columns_are_the_same_with_and_without_the_kernel():
    pytest.importorskip("pyarrow")
    from flintmq.spark.shipped.columns import Shape, frame_columns, plain_columns

    def frame(n, body):
        head = (
            (len(body) + 30).to_bytes(4, "big")
            + (2).to_bytes(4, "big")
            + (1_770_000_000_000_000_000 + n).to_bytes(8, "big")
        )
        return head + n.to_bytes(2, "big") + b"%016x" % ((5 << 54) | n) + body

    data = b"".join(frame(n, b"body %d" % n) for n in range(50)) + frame(50, b"cut off")[:-2]
    fast = frame_columns()
    assert fast is not plain_columns
    for rows in (1, 7, 50, 100):
        at = 0
        while True:
            one, two = fast(data, at, len(data), rows, 1000), plain_columns(data, at, len(data), rows, 1000)
            assert [bytes(part) if not isinstance(part, int) else part for part in one] == [
                bytes(part) if not isinstance(part, int) else part for part in two
            ]
            if not one[0]:
                break
            shape = Shape("t", "n", 100)
            assert shape.batch(one) == shape.batch(two)
            at = one[1]
        assert at == len(data) - len(frame(50, b"cut off")) + 2
