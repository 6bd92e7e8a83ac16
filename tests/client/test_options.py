"""The options: one list of names and types for type checkers, one with defaults for Python, both the same."""

from __future__ import annotations

import dataclasses
import ssl
import subprocess
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any

import pytest

from flintmq import sync
from flintmq.client import Consumer, Producer, connection, options

PAIRS = [
    (options.ConnectionOptions, connection.Settings),
    (options.ProducerOptions, options.ProducerSettings),
    (options.ConsumerOptions, options.ConsumerSettings),
]


@pytest.mark.parametrize(("typed", "defaults"), PAIRS, ids=lambda each: each.__name__)
def test_names_and_types_are_the_same_in_both(typed: Any, defaults: Any) -> None:
    names = {**vars(connection), **vars(options), "ssl": ssl}
    hints = typing.get_type_hints(typed, names, names)
    if defaults is not connection.Settings:
        for name in typing.get_type_hints(options.ConnectionOptions, names, names):
            del hints[name]
    known = typing.get_type_hints(defaults, names, names)
    assert hints == {field.name: known[field.name] for field in dataclasses.fields(defaults)}


@pytest.mark.parametrize(
    "make",
    [
        lambda **given: Consumer("t", "c", nsqd="127.0.0.1:1", **given),
        lambda **given: Producer("127.0.0.1:1", **given),
        lambda **given: sync.Consumer("t", "c", nsqd="127.0.0.1:1", **given),
        lambda **given: sync.Producer("127.0.0.1:1", **given),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_one(make: Any) -> None:
    with pytest.raises(TypeError, match="'heartbeat_intervall'; did you mean 'heartbeat_interval'"):
        make(heartbeat_intervall=5)


PROGRAM = """
    import asyncio
    from dataclasses import dataclass

    from flintmq import Consumer, Message, Producer, sync
    from flintmq.testing import NsqBroker, NsqCluster


    @dataclass
    class Order:
        item: str
        amount: int = 1


    async def handler(message: Message[Order]) -> None:
        print(message.value.item, message.body.decode())


    async def plain(message: Message) -> None:
        print(message.value.decode())


    async def main() -> None:
        async with Producer("127.0.0.1:4150", linger=0.1) as producer:
            await producer.publish("orders", Order(item="tea"))
            await producer.publish("orders", {"item": "tea"})
            await producer.publish_many("orders", [b"bytes", Order("coffee", 2)])
        async with Consumer("orders", "billing", nsqd="127.0.0.1:4150", type=Order, max_in_flight=5) as consumer:
            async for message in consumer:
                total: int = message.value.amount
            async for batch in consumer.batches(10, wait=1.0):
                with batch:
                    print([message.value.amount for message in batch], total)
        await Consumer("orders", "billing", nsqd="127.0.0.1:4150", type=Order, handler=handler).run()
        await Consumer("orders", "billing", nsqd="127.0.0.1:4150", handler=plain).run()


    with sync.Consumer("orders", "billing", nsqd="127.0.0.1:4150", type=Order) as waiting:
        name: str = waiting.get(timeout=1).value.item
    sync.publish("orders", Order("tea"), timeout=3)
    asyncio.run(main())
    with NsqBroker(max_msg_size=1024, msg_timeout="5s"), NsqCluster(2, snappy=False):
        pass
"""

MISTAKES = {
    "an option of a consumer": ("type=Order, max_in_flight=5)", "type=Order, max_in_fligth=5)"),
    "an option of a producer": ("linger=0.1", "lingre=0.1"),
    "an option of publish": ("timeout=3", "timeuot=3"),
    "the type of an option": ("max_in_flight=5", 'max_in_flight="5"'),
    "an option of a broker": ("max_msg_size", "max_msg_siez"),
    "a time without a unit": ('msg_timeout="5s"', "msg_timeout=5"),
    "an option of a cluster": ("snappy=False", "snapyp=False"),
    "a field": ("message.value.item", "message.value.itme"),
    "a field in a loop": ("total: int = message.value.amount", "total: int = message.value.amuont"),
    "a field in a batch": ("[message.value.amount", "[message.value.amonut"),
    "a field without asyncio": ("get(timeout=1).value.item", "get(timeout=1).value.itme"),
    "a field of what is published": ('Order(item="tea")', 'Order(itme="tea")'),
    "a text for a message": ('{"item": "tea"}', '"tea"'),
    "a handler of something else": ("type=Order, handler=handler", "type=int, handler=handler"),
    "a handler without the type": ("type=Order, handler=handler", "handler=handler"),
}
MISTAKES_IN_EXAMPLES = [
    ("batching.py", "max_in_flight=", "max_in_fligth="),
    ("script.py", '"reader", nsqd=', '"reader", nsdq='),
    ("typed.py", "message.value.amount", "message.value.amuont"),
    ("typed.py", "amount=2", "amuont=2"),
]


@pytest.mark.timeout(300)
def test_mypy_knows_every_option_and_field(tmp_path: Path) -> None:
    """The right program has no error, and each mistake is one, on its line."""
    program = textwrap.dedent(PROGRAM)
    files: dict[str, tuple[str, int | None]] = {"right": (program, None)}
    examples = Path(__file__).parents[2] / "examples"
    for path in [*examples.glob("*.py"), *examples.glob("testing/*.py")]:
        files[path.stem] = (path.read_text(), None)
    mistakes = [(program, *mistake) for mistake in MISTAKES.values()]
    mistakes += [((examples / name).read_text(), right, wrong) for name, right, wrong in MISTAKES_IN_EXAMPLES]
    for number, (text, right, wrong) in enumerate(mistakes):
        assert text.count(right) == 1, right
        line = text[: text.index(right)].count("\n") + 1
        files[f"wrong{number}"] = (text.replace(right, wrong), line)
    for name, (text, _) in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(tmp_path / "cache")]
    source = Path(options.__file__).parents[2]
    done = subprocess.run(
        [*command, *(f"{name}.py" for name in files)],
        cwd=tmp_path,
        env={"MYPYPATH": str(source), "PATH": ""},
        capture_output=True,
        text=True,
    )
    found: dict[str, set[int]] = {name: set() for name in files}
    for error in done.stdout.splitlines():
        path, number, kind, *_ = error.split(":")
        if kind.strip() == "error":
            found[path.removesuffix(".py")].add(int(number))
    assert done.stderr == ""
    expected = {name: set() if line is None else {line} for name, (_, line) in files.items()}
    assert found == expected, done.stdout
