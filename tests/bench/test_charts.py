"""The charts of the benchmark, and how they get into the README."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.charts import Bar, Line, Panel, Plot, Trace, bars, lines, over_time, replace_section

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_bar_is_as_long_as_its_share_of_the_longest() -> None:
    svg = bars("rates", [Panel("publish", "msg/s", [Bar("a", 50.0), Bar("b", 100.0), Bar("c", None)])])
    widths = [float(rect.get("width", "0")) for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.get("x")]
    assert len(widths) == 2
    assert widths[0] == pytest.approx(widths[1] / 2)
    assert "not measured" in texts(svg)


def test_a_span_is_drawn_where_runs_differ() -> None:
    root = ElementTree.fromstring(bars("rates", [Panel("p", "u", [Bar("a", 2.0, 1.0, 4.0), Bar("b", 3.0, 3.0, 3.0)])]))
    [span] = [line for line in root.iter(f"{SVG}line") if line.get("class") == "span"]
    assert float(span.get("x2", "0")) > float(span.get("x1", "0"))


def test_a_chart_follows_the_colour_scheme_of_the_reader() -> None:
    svg = bars("t", [Panel("p", "u", [Bar("a", 1.0)])])
    assert "prefers-color-scheme: dark" in svg
    assert ElementTree.fromstring(svg).findtext(f"{SVG}title") == "t"


def test_equal_factors_are_equal_distances_on_a_line() -> None:
    points = [(1.0, 10.0, 10.0, 10.0), (10.0, 100.0, 100.0, 100.0), (100.0, 1000.0, 1000.0, 1000.0)]
    root = ElementTree.fromstring(lines("c", "x", "y", [Line("ours", points)]))
    [line] = root.iter(f"{SVG}polyline")
    places = [tuple(map(float, pair.split(","))) for pair in line.get("points", "").split()]
    assert places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.2)
    assert places[0][1] - places[1][1] == pytest.approx(places[1][1] - places[2][1], abs=0.2)


def test_zero_has_a_place_left_of_the_smallest() -> None:
    root = ElementTree.fromstring(lines("c", "x", "y", [Line("ours", [(0.0, 1.0, 1.0, 1.0), (100.0, 2.0, 2.0, 2.0)])]))
    [line] = root.iter(f"{SVG}polyline")
    first, second = (float(pair.split(",")[0]) for pair in line.get("points", "").split())
    assert first < second


@pytest.mark.parametrize("logarithmic", [False, True])
def test_plots_over_time_share_an_axis_that_begins_at_0(logarithmic: bool) -> None:
    rising, flat = Trace("p99", [(10.0, 1.0), (80.0, 100.0)]), Trace("p50", [(10.0, 0.0), (80.0, 1.0)])
    svg = over_time("soak", "minutes", [Plot("latency", "ms", [rising, flat], logarithmic)] * 2)
    root = ElementTree.fromstring(svg)
    drawn = [line.get("points", "") for line in root.iter(f"{SVG}polyline")]
    assert len(drawn) == 4
    # The first line is drawn last, above the others.
    first, last = (tuple(map(float, pair.split(","))) for pair in drawn[1].split())
    left, right = 64.0, 700.0
    assert (first[0], last[0]) == (pytest.approx(left + (right - left) / 8), pytest.approx(right))
    assert last[1] < first[1]
    assert {"0", "20", "80", "minutes", "p99", "latency, ms"} <= set(texts(svg))


def test_plots_of_nothing_are_still_a_picture() -> None:
    svg = over_time("soak", "minutes", [Plot("memory", "MB", [Trace("resident", [])])])
    assert "memory, MB" in texts(svg)


def test_a_section_is_replaced_between_its_markers_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- peers: begin -->\nold\n<!-- peers: end -->\nafter\n")
    for text in ("new", "newer"):
        replace_section("peers", text, page)
    assert page.read_text() == "before\n<!-- peers: begin -->\n\nnewer\n\n<!-- peers: end -->\nafter\n"
    with pytest.raises(ValueError, match="has no markers <!-- curves: begin -->"):
        replace_section("curves", "new", page)
