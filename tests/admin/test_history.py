"""The history: what is kept, in which steps, and what is dropped when memory is short."""

from __future__ import annotations

from flintmq.admin.history import History

NOW = 1_800_000_000.0


def filled(history: History, name: str, seconds: int, step: int = 2) -> None:
    for i in range(seconds // step):
        history.add("topic", name, NOW + i * step, [float(i), None, 5.0, 0, 0, 0, 0])


def test_a_row_every_two_seconds_for_an_hour_and_means_of_minutes_for_a_day() -> None:
    history = History(64 << 20)
    filled(history, "t", 3 * 3600)
    now = NOW + 3 * 3600 - 2
    hour = history.read("topic", "t", now, 3600, 2000)
    assert hour.step == 2 and len(hour.series["published"]) == 1800
    assert hour.series["published"][-1] == 5399.0 and hour.series["published"][0] == 5399.0 - 1799
    assert set(hour.series["delivered"]) == {None}
    day = history.read("topic", "t", now, 86_400, 2000)
    assert day.step == 60 and sum(value is not None for value in day.series["depth"]) == 180
    assert day.series["published"][-2] == 178 * 30 + 14.5


def test_more_points_than_wanted_become_means() -> None:
    history = History(64 << 20)
    filled(history, "t", 3600)
    coarse = history.read("topic", "t", NOW + 3598, 3600, 60)
    assert coarse.step == 60 and len(coarse.series["published"]) in (60, 61)
    assert coarse.series["published"][-1] == 1784.5


def test_a_gap_is_not_known() -> None:
    history = History(64 << 20)
    for second in (0, 2, 10):
        history.add("topic", "t", NOW + second, [1.0] * 7)
    assert history.read("topic", "t", NOW + 10, 12, 100).series["depth"] == [1.0, 1.0, None, None, None, 1.0]


def test_channels_are_kept_for_an_hour_at_ten_seconds() -> None:
    history = History(64 << 20)
    for second in range(0, 7200, 2):
        history.add("channel", "t/c", NOW + second, [1.0] * 7)
    found = history.read("channel", "t/c", NOW + 7198, 86_400, 2000)
    assert found.step == 10 and len(found.series["depth"]) == 360


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    history = History(1 << 18)
    for second in range(0, 3600, 2):
        for name in range(10):
            history.add("topic", f"t{name}", NOW + second, [float(second)] * 7)
        assert history.bytes <= 1 << 18
    found = history.read("topic", "t9", NOW + 3598, 3600, 2000).series["depth"]
    known = [value for value in found if value is not None]
    assert known[-1] == 3598.0 and 0 < len(known) < 1800
    assert found[0] is None and None not in found[-len(known) :]


def test_the_last_row_before_a_time() -> None:
    history = History(64 << 20)
    filled(history, "t", 600)
    assert history.last("topic", "t", "published", NOW + 100) == 50.0
    assert history.last("topic", "t", "published", NOW - 10) is None
    assert history.last("topic", "other", "published", NOW) is None


def test_what_was_not_noted_for_a_day_is_forgotten() -> None:
    history = History(64 << 20)
    filled(history, "gone", 600)
    history.add("topic", "here", NOW + 90_000, [1.0] * 7)
    history.forget(NOW + 80_000)
    assert len(history) == 2
    history.forget(NOW + 90_000)
    assert len(history) == 1 and history.bytes == 0
