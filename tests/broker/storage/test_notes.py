"""Notes: the bytes are those of 0.1.0, which wrote plain MessagePack lists."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.broker.storage.notes import _APPLIED, NOTES, AnyNote, Note, decode, encode
from flintmq.errors import FormatError

#: Of topics and channels: they are paths, too.
names = st.from_regex(r"[.a-zA-Z0-9_-]{1,54}(#ephemeral)?", fullmatch=True)
numbers = st.integers(0, (1 << 54) - 1)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: numbers,
    str: st.text(max_size=64),
    bool: st.booleans(),
    bytes: st.binary(max_size=64),
    int | None: st.none() | numbers,
    int | float | None: st.none() | numbers | st.floats(0, 1e9),
    str | None: st.none() | st.text(max_size=64),
    dict[str, Any]: st.dictionaries(st.text(max_size=9), numbers | st.text(max_size=9) | st.booleans(), max_size=3),
}


@pytest.mark.parametrize("verb", NOTES)
@given(data=st.data())
def test_a_note_is_the_list_that_it_always_was(verb: str, data: st.DataObject) -> None:
    kind: Any = NOTES[verb]
    fields = msgspec.structs.fields(kind)
    values = {**VALUES, str: names} if verb in ("topic", "channel", "redrive") else VALUES
    args = [data.draw(values[field.type]) for field in fields]
    written = msgspec.msgpack.encode((verb, *args))
    assert encode(kind(*args)) == written
    note = decode(written)
    assert type(note) is kind and list(msgspec.structs.astuple(note)) == args


#: Entries of a journal that 0.1.0 wrote.
RECORDED: list[tuple[str, type[Note] | Any, tuple[Any, ...]]] = [
    ("95a5746f70696301a56f72646572cf00038d7ea4c68000cf00038d7ea5c68000", "topic", (1, "order", 10**15, 10**15 + 2**24)),
    ("93a666726f7a656e01c0", "frozen", (1, None)),
    ("96a76368616e6e656c0102a162cf00038d7ea4c68000cf0020000000000000", "channel", (1, 2, "b", 10**15, 1 << 53)),
    ("91a5636c65616e", "clean", ()),
]


@pytest.mark.parametrize(("text", "verb", "args"), RECORDED, ids=[row[1] for row in RECORDED])
def test_what_was_recorded_is_read(text: str, verb: str, args: tuple[Any, ...]) -> None:
    assert decode(bytes.fromhex(text)) == NOTES[verb](*args)


def test_every_note_has_its_effect_defined() -> None:
    assert set(_APPLIED) == set(NOTES.values()) == set(typing.get_args(AnyNote))


@pytest.mark.parametrize("written", [["tomorrow", 1], ["durable", "x", 1], ["durable"], {}, 5])
def test_a_note_that_is_none_is_an_error_in_words(written: Any) -> None:
    with pytest.raises(FormatError, match="cannot be understood"):
        decode(msgspec.msgpack.encode(written))
