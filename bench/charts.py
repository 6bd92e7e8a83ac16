"""Charts as SVG, and where they and their tables go in the README.

Three forms: panels of bars, lines over logarithmic axes, and plots over time. An SVG brings its own background and
follows the reader's choice of light or dark. No library is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).with_name("charts")
README = Path(__file__).with_name("README.md")

STYLE = """
.back { fill: #ffffff } .grid { stroke: #d8dee4 } .axis { stroke: #8c959f }
text { fill: #1f2328; font: 12px system-ui, sans-serif } .title { font-weight: 600 } .soft { fill: #59636e }
.a { fill: #bc4c00 } .b { fill: #6e7781 } .span { stroke: #1f2328 }
.line { fill: none; stroke-width: 2 } .line.a { stroke: #bc4c00; fill: none }
.line.b { stroke: #0969da; stroke-dasharray: 5 3; fill: none } .dot.b { fill: #0969da }
@media (prefers-color-scheme: dark) {
.back { fill: #0d1117 } .grid { stroke: #2f353d } .axis { stroke: #848d97 }
text { fill: #e6edf3 } .soft { fill: #9198a1 }
.a { fill: #f0883e } .b { fill: #9198a1 } .span { stroke: #e6edf3 }
.line.a { stroke: #f0883e } .line.b { stroke: #58a6ff } .dot.b { fill: #58a6ff }
}
"""

LABELS, BARS, VALUES = 110, 190, 80
BAR_STEP, PANEL_HEAD, PANEL_GAP, COLUMNS = 20, 44, 24, 2
LINE_WIDTH, LINE_HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 56, 48
PLOT_WIDTH, PLOT_HEIGHT, PLOT_HEAD, PLOT_GAP = 720, 130, 48, 16


@dataclass(frozen=True)
class Bar:
    label: str
    #: None where there is no figure.
    value: float | None
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Line:
    label: str
    #: x, median, lowest, highest.
    points: Sequence[tuple[float, float, float, float]]


@dataclass(frozen=True)
class Trace:
    label: str
    #: Time and value.
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    title: str
    unit: str
    #: Two at most can be told apart; the first stands out.
    traces: Sequence[Trace]
    logarithmic: bool = False


def number(value: float) -> str:
    """Three digits are as many as a run repeats."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size and abs(value) >= 9995:
            return f"{_digits(value / size)}{unit}"
    return _digits(value)


def _digits(value: float) -> str:
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{decimals}f}"


def bars(title: str, panels: Sequence[Panel]) -> str:
    """Panels side by side; the first bar of each is the one that stands out, thin lines are the spans."""
    width = COLUMNS * (LABELS + BARS + VALUES + PANEL_GAP) + PANEL_GAP
    parts: list[str] = []
    top = PANEL_GAP
    for start in range(0, len(panels), COLUMNS):
        row = panels[start : start + COLUMNS]
        for column, panel in enumerate(row):
            left = PANEL_GAP + column * (LABELS + BARS + VALUES + PANEL_GAP)
            parts += _panel(panel, left, top)
        top += PANEL_HEAD + BAR_STEP * max(len(panel.bars) for panel in row) + PANEL_GAP
    return _document(title, width, top, parts)


def _panel(panel: Panel, left: float, top: float) -> list[str]:
    longest = max((bar.high or bar.value or 0.0 for bar in panel.bars), default=0.0) or 1.0
    parts = [
        _text(left, top + 12, panel.title, "title"),
        _text(left, top + 28, panel.unit, "soft"),
    ]
    for index, bar in enumerate(panel.bars):
        y = top + PANEL_HEAD + index * BAR_STEP
        parts.append(_text(left + LABELS - 8, y + 11, bar.label, anchor="end"))
        x = left + LABELS
        if bar.value is None:
            parts.append(_text(x + 4, y + 11, "not measured", "soft"))
            continue
        length = BARS * bar.value / longest
        parts.append(
            f'<rect class="{"b" if index else "a"}" x="{x:.1f}" y="{y:.1f}" width="{max(length, 1):.1f}" height="14"/>'
        )
        if bar.high > bar.low:
            low, high = x + BARS * bar.low / longest, x + BARS * bar.high / longest
            parts.append(f'<line class="span" x1="{low:.1f}" x2="{high:.1f}" y1="{y + 7:.1f}" y2="{y + 7:.1f}"/>')
            length = max(length, BARS * bar.high / longest)
        parts.append(_text(x + length + 6, y + 11, number(bar.value)))
    return parts


def lines(title: str, x_title: str, y_title: str, series: Sequence[Line]) -> str:
    """Both axes are logarithmic; an x of 0 is drawn at the left edge. The first line stands out."""
    xs = sorted({point[0] for line in series for point in line.points})
    ys = [value for line in series for point in line.points for value in point[1:] if value > 0]
    low, high = _decades(min(ys), max(ys))
    x_low, x_high = _x_range(xs)

    def at_x(value: float) -> float:
        place = (math.log10(value) - x_low) / (x_high - x_low) if value > 0 else 0.0
        return LEFT + place * (LINE_WIDTH - LEFT - RIGHT)

    def at_y(value: float) -> float:
        return LINE_HEIGHT - BOTTOM - (math.log10(value) - low) / (high - low) * (LINE_HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 20, title, "title")]
    for tick in _ticks(low, high):
        y = at_y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LINE_WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 4, _short(tick), "soft", "end"))
    for x in xs:
        parts.append(
            f'<line class="axis" x1="{at_x(x):.1f}" x2="{at_x(x):.1f}"'
            f' y1="{LINE_HEIGHT - BOTTOM}" y2="{LINE_HEIGHT - BOTTOM + 4}"/>'
        )
        parts.append(_text(at_x(x), LINE_HEIGHT - BOTTOM + 18, _short(x), "soft", "middle"))
    parts.append(_text((LEFT + LINE_WIDTH - RIGHT) / 2, LINE_HEIGHT - 10, x_title, "soft", "middle"))
    left: float = LEFT
    for index, line in enumerate(series):
        kind = "b" if index else "a"
        points = " ".join(f"{at_x(x):.1f},{at_y(value):.1f}" for x, value, _, _ in line.points)
        parts.append(f'<polyline class="line {kind}" points="{points}"/>')
        for x, value, lowest, highest in line.points:
            parts.append(_dot(kind, at_x(x), at_y(value)))
            if highest > lowest > 0:
                parts.append(
                    f'<line class="span" x1="{at_x(x):.1f}" x2="{at_x(x):.1f}"'
                    f' y1="{at_y(lowest):.1f}" y2="{at_y(highest):.1f}"/>'
                )
        parts.append(_dot(kind, left + 4, 36))
        parts.append(_text(left + 14, 40, line.label))
        left += 30 + 7 * len(line.label)
    parts.append(_text(LINE_WIDTH - RIGHT, 40, y_title, "soft", "end"))
    return _document(f"{title}: {y_title} by {x_title}", LINE_WIDTH, LINE_HEIGHT, parts)


def over_time(title: str, x_title: str, plots: Sequence[Plot]) -> str:
    """Draw plots below each other that share an axis of time, which begins at 0."""
    end = max((x for plot in plots for trace in plot.traces for x, _ in trace.points), default=0.0) or 1.0
    x_ticks = _linear_ticks(end)

    def at_x(value: float) -> float:
        return LEFT + value / end * (PLOT_WIDTH - LEFT - RIGHT)

    parts = [_text(LEFT, 20, title, "title")]
    top = 24.0
    for plot in plots:
        top += PLOT_HEAD
        parts += _plot(plot, top, x_ticks, at_x)
        top += PLOT_HEIGHT + PLOT_GAP
    parts += [_text(at_x(tick), top, _short(tick) if tick else "0", "soft", "middle") for tick in x_ticks]
    parts.append(_text((LEFT + PLOT_WIDTH - RIGHT) / 2, top + 22, x_title, "soft", "middle"))
    return _document(f"{title}: {', '.join(plot.title for plot in plots)}", PLOT_WIDTH, top + 34, parts)


def _plot(plot: Plot, top: float, x_ticks: Sequence[float], at_x: Callable[[float], float]) -> list[str]:
    values = [value for trace in plot.traces for _, value in trace.points if value > 0] or [1.0]
    if plot.logarithmic:
        low, high = _decades(min(values), max(values))
        ticks = _ticks(low, high)
    else:
        ticks = _linear_ticks(max(values))
        low, high = 0.0, max(ticks[-1], max(values))

    def at_y(value: float) -> float:
        place = math.log10(max(value, 10**low)) if plot.logarithmic else value
        return top + PLOT_HEIGHT * (high - place) / (high - low)

    parts = [_text(LEFT, top - 12, f"{plot.title}, {plot.unit}")]
    for tick in ticks:
        y = at_y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{PLOT_WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 4, _short(tick) if tick else "0", "soft", "end"))
    bottom = top + PLOT_HEIGHT
    parts += [
        f'<line class="axis" x1="{at_x(tick):.1f}" x2="{at_x(tick):.1f}" y1="{bottom:.1f}" y2="{bottom + 4:.1f}"/>'
        for tick in x_ticks
    ]
    right: float = PLOT_WIDTH - RIGHT
    for index, trace in reversed(list(enumerate(plot.traces))):
        kind = "b" if index else "a"
        points = " ".join(f"{at_x(x):.1f},{at_y(value):.1f}" for x, value in trace.points)
        parts.append(f'<polyline class="line {kind}" points="{points}"/>')
        parts.append(_text(right, top - 12, trace.label, anchor="end"))
        right -= 14 + 7 * len(trace.label)
        parts.append(_dot(kind, right, top - 16))
        right -= 20
    return parts


def _linear_ticks(highest: float) -> list[float]:
    """Return about five round numbers from 0 on; the last one is not above the highest value."""
    rough = highest / 4
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough * 0.75)
    return [step * index for index in range(int(highest / step + 1e-9) + 1)]


def _x_range(xs: Sequence[float]) -> tuple[float, float]:
    positive = [x for x in xs if x > 0]
    low, high = math.log10(positive[0]), math.log10(positive[-1])
    if 0 in xs:
        # A place of its own, left of the smallest.
        low -= 1
    return low, max(high, low + 1)


def _decades(low: float, high: float) -> tuple[float, float]:
    """The axis begins and ends at 1, 2 or 5 times a power of ten."""
    steps = [math.log10(m) + e for e in range(-4, 8) for m in (1, 2, 5)]
    below = max((s for s in steps if s <= math.log10(low) + 1e-9), default=steps[0])
    above = min((s for s in steps if s >= math.log10(high) - 1e-9), default=steps[-1])
    return below, above if above > below else below + 1


def _ticks(low: float, high: float) -> list[float]:
    marks = (1, 2, 5) if high - low < 2.5 else (1,)
    ticks = [m * 10.0**e for e in range(-4, 8) for m in marks]
    return [tick for tick in ticks if low - 1e-9 <= math.log10(tick) <= high + 1e-9]


def _short(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _dot(kind: str, x: float, y: float) -> str:
    if kind == "a":
        return f'<circle class="dot a" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    return f'<rect class="dot b" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    extra = f' class="{kind}"' if kind else ""
    extra += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(text)}</text>'


def _document(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
            f' height="{height:.0f}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            '<rect class="back" width="100%" height="100%"/>',
            *parts,
            "</svg>",
            "",
        )
    )


def replace_section(name: str, text: str, path: Path = README) -> None:
    """Put text between the markers of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = path.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path} has no markers {begin} and {end}")
    path.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")
