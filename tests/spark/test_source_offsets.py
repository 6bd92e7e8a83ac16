"""Offsets and how ranges are shared out: the same in, the same out, nothing lost and nothing twice."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.errors import DataLossError
from flintmq.spark.shipped.offsets import Mark, Offset, Range, cut, log_offset, ranges_between, read_offset, share

marks = st.dictionaries(
    st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")),
    st.builds(Mark, st.just("e"), st.integers(0, 1 << 54)),
    max_size=9,
)


@given(marks, marks)
def test_an_offset_survives_its_json_and_is_always_the_same_text(places, init):
    offset = Offset(places, init, "spark-1")
    text = json.dumps(offset.to_json())
    again = log_offset(json.loads(text))
    assert again == offset
    assert json.dumps(again.to_json()) == text
    assert json.dumps(Offset(dict(reversed(places.items())), init, "spark-1").to_json()) == text


def test_an_offset_looks_as_the_documents_say():
    offset = Offset({("orders", "n"): Mark("e", 5)}, {("orders", "n"): Mark("e", 2)}, "r")
    assert offset.to_json() == {
        "v": 1,
        "mode": "log",
        "p": {"orders": {"n": {"e": "e", "o": 5}}},
        "init": {"orders": {"n": {"e": "e", "o": 2}}},
        "reader": "r",
    }


def test_an_offset_of_another_mode_or_version_is_refused():
    with pytest.raises(DataLossError, match="one of spool mode: set mode=spool"):
        read_offset({"v": 1, "mode": "spool"}, "log")
    with pytest.raises(DataLossError, match="another version"):
        read_offset({"v": 2, "mode": "log"}, "log")


def test_a_batch_begins_where_its_end_says_it_began():
    # Asked again after a crash, "latest" is another place; the end was written down, and it is right.
    key = ("t", "n")
    first_time = Offset({key: Mark("e", 10)}, {key: Mark("e", 10)})
    second_time = Offset({key: Mark("e", 99)}, {key: Mark("e", 99)})
    end = Offset({key: Mark("e", 20)}, {key: Mark("e", 10)})
    assert ranges_between(first_time, end) == ranges_between(second_time, end) == [Range("t", "n", "e", 10, 20)]


def test_later_batches_begin_where_the_one_before_ended():
    start = Offset({("t", "n"): Mark("e", 10), ("t", "m"): Mark("e", 5)}, {})
    end = Offset(
        {("t", "n"): Mark("e", 20), ("t", "m"): Mark("e", 5), ("u", "n"): Mark("f", 7)}, {("u", "n"): Mark("f", 3)}
    )
    assert ranges_between(start, end) == [Range("t", "n", "e", 10, 20), Range("u", "n", "f", 3, 7)]


def test_a_range_without_a_beginning_is_not_guessed():
    with pytest.raises(DataLossError, match="does not say where"):
        ranges_between(Offset({}, {}), Offset({("t", "n"): Mark("e", 5)}, {}))
    with pytest.raises(DataLossError, match="does not say where"):
        ranges_between(Offset({("t", "n"): Mark("old", 2)}, {}), Offset({("t", "n"): Mark("new", 5)}, {}))


available = st.dictionaries(st.tuples(st.sampled_from("abcdef"), st.just("n")), st.integers(0, 10_000), max_size=6)


@given(available, st.integers(1, 20_000))
def test_a_limit_is_shared_and_kept(counts, limit):
    parts = share(counts, limit)
    assert parts.keys() == counts.keys()
    assert all(0 <= parts[key] <= counts[key] for key in counts)
    assert sum(parts.values()) == min(limit, sum(counts.values()))


def test_a_small_topic_is_not_starved():
    assert share({("big", "n"): 1_000_000, ("small", "n"): 3}, 100)[("small", "n")] >= 1


range_lists = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 500)), max_size=6).map(
    lambda pairs: [Range(f"t{n}", "n", "e", first, first + size) for n, (first, size) in enumerate(pairs)]
)


@given(range_lists, st.integers(0, 40), st.integers(0, 100))
def test_cut_ranges_are_the_same_messages_in_more_pieces(ranges, min_partitions, max_records):
    pieces = cut(ranges, min_partitions, max_records)
    for found in ranges:
        mine = [piece for piece in pieces if piece.topic == found.topic]
        assert [seq for piece in mine for seq in range(piece.first, piece.stop)] == list(range(found.first, found.stop))
        assert all(piece.size > 0 for piece in mine)
    if max_records:
        assert all(piece.size <= max_records for piece in pieces)
    assert len(pieces) >= min(min_partitions, sum(found.size for found in ranges))
    assert pieces == cut(ranges, min_partitions, max_records)
    if not min_partitions and not max_records:
        assert pieces == ranges


@pytest.mark.parametrize(
    "damaged",
    [
        {"v": 1, "mode": "log"},
        {"v": 1, "mode": "log", "p": []},
        {"v": 1, "mode": "log", "p": {"t": {"n": {"e": "e"}}}},
        {"v": 1, "mode": "log", "p": {"t": {"n": {"e": "e", "o": "x"}}}},
        {"v": 1, "mode": "log", "p": {"t": {"n": {"e": "e", "o": float("inf")}}}},
        {"v": 1, "mode": "log", "p": {"t": 5}, "init": 7},
        ["v", 1],
        7,
    ],
)
def test_an_offset_that_is_damaged_is_refused_in_words(damaged):
    with pytest.raises(DataLossError, match="start with a new one"):
        log_offset(damaged)
