"""A plan as one page that needs nothing else: tables, and plots as SVG written here. No script, no font, no address."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from planner.plan import Bars, Lines, Plan, Section
from planner.report import quantity, unsourced

# Okabe and Ito's colours, told apart by colour-blind eyes as well; black, the first of them, is the page's ink.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
WIDTH, LEFT, RIGHT, TOP = 560, 72, 16, 14
LINES_HEIGHT, BAR_HEIGHT, BAR_GAP = 300, 18, 9
LABEL = 180  # of a bar, in front of it

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6470; --rule: #d8dde3; --page: #fff; --panel: #f6f8fa;
  --warn: #9a6700 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --soft: #9aa4b1; --rule: #343b45; --page: #14171c; --panel: #1c2027; --warn: #d8a531 } }
body { margin: 0 auto; max-width: 1180px; padding: 24px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 22px; margin: 0 0 16px } h2 { font-size: 16px; margin: 0 0 8px }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(520px, 100%), 1fr)); gap: 16px }
figure, section { margin: 0 0 16px; padding: 16px; background: var(--panel); border: 1px solid var(--rule); border-radius: 8px }
figure { margin: 0 } section { overflow-x: auto } svg { width: 100%; height: auto; display: block }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif } svg .name { fill: var(--ink) }
svg .grid { stroke: var(--rule) }
figcaption, li { color: var(--soft); font-size: 13px } ul { margin: 8px 0 0; padding-left: 20px }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px }
table { border-collapse: collapse; width: 100%; font-size: 13px }
td { border-top: 1px solid var(--rule); padding: 4px 12px 4px 0; vertical-align: top }
td:nth-child(2) { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
td:nth-child(n+3) { color: var(--soft) } td.unsourced { color: var(--warn); font-weight: 600 }
pre { overflow-x: auto; padding: 12px; background: var(--page); border: 1px solid var(--rule); border-radius: 6px; margin: 0 }
"""


def page(plan: Plan) -> str:
    """The whole page."""
    plots = [*map(_lines, plan.lines), *map(_bars, plan.bars)]
    body = (
        f"<h1>{escape(plan.title)}</h1>",
        f'<div class="plots">{"".join(plots)}</div><p></p>',
        *map(_section, plan.sections),
        f"<section><h2>Command</h2><pre>{escape(plan.command)}</pre></section>",
    )
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(plan.title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>{"".join(body)}</body></html>\n'


def _section(section: Section) -> str:
    rows = []
    for figure in section.figures:
        kind = ' class="unsourced"' if unsourced(figure) else ""
        cells = (figure.name, quantity(figure.value, figure.unit), figure.formula)
        source = f"<td{kind}>{escape(figure.source or 'unsourced')}</td>"
        rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}{source}</tr>")
    notes = "".join(f"<li>{escape(note)}</li>" for note in section.notes)
    listed = f"<ul>{notes}</ul>" if notes else ""
    return f"<section><h2>{escape(section.title)}</h2><table>{''.join(rows)}</table>{listed}</section>"


# Plots.


def _figure(title: str, names: Sequence[str], height: float, marks: Iterable[str], note: str) -> str:
    keys = (f'<span><i style="background:{_colour(at)}"></i>{escape(name)}</span>' for at, name in enumerate(names))
    svg = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">{"".join(marks)}</svg>'
    caption = f"<figcaption>{escape(note)}</figcaption>" if note else ""
    return f'<figure><h2>{escape(title)}</h2><div class="key">{"".join(keys)}</div>{svg}{caption}</figure>'


def _colour(at: int) -> str:
    return COLOURS[at % len(COLOURS)]


def _text(x: float, y: float, text: str, anchor: str = "middle", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


def _ticks(values: Sequence[float], log: bool) -> list[float]:
    """Powers of ten around the values; on a linear axis round steps from 0."""
    if log:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return [10.0**power for power in range(low, max(high, low + 1) + 1)]
    power = 10.0 ** math.floor(math.log10(max(values)))
    step = next(step for step in (power / 5, power / 2, power, 2 * power) if max(values) / step <= 6)
    return [step * at for at in range(math.ceil(max(values) / step) + 1)]


def _tick(value: float, unit: str) -> str:
    # Hours and minutes would break a scale of powers of ten.
    return f"{value:,.0f} s" if unit == "s" and value >= 1 else quantity(value, unit)


def _lines(chart: Lines) -> str:
    """Lines over lengths; with both axes logarithmic a straight line is a power of the length, its slope the exponent."""
    points = [point for line in chart.lines.values() for point in line if point[1] > 0]
    if not points:
        return ""
    xs = sorted({x for x, _ in points})
    ticks = _ticks([y for _, y in points], chart.log)
    bottom = LINES_HEIGHT - 34
    scale: Callable[[float], float] = math.log10 if chart.log else float

    def across(x: float) -> float:
        span = math.log(xs[-1] / xs[0]) or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(x / xs[0]) / span

    def up(y: float) -> float:
        return bottom - (bottom - TOP) * (scale(y) - scale(ticks[0])) / (scale(ticks[-1]) - scale(ticks[0]))

    def marks() -> Iterator[str]:
        for tick in ticks:
            y = up(tick)
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield _text(LEFT - 8, y + 4, _tick(tick, chart.unit), "end")
        for x in xs[:: max(1, round(len(xs) / 8))]:
            yield _text(across(x), bottom + 18, _length(x))
        yield _text((LEFT + WIDTH - RIGHT) / 2, bottom + 33, "prompt tokens")
        for at, (name, line) in enumerate(chart.lines.items()):
            drawn = [(x, y) for x, y in line if y > 0]
            path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in drawn)
            yield f'<polyline fill="none" stroke="{_colour(at)}" stroke-width="2" points="{path}"/>'
            for x, y in drawn:
                told = escape(f"{name}, {x:,.0f} tokens: {quantity(y, chart.unit)}")
                yield f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{_colour(at)}"><title>{told}</title></circle>'

    return _figure(chart.title, list(chart.lines), LINES_HEIGHT + 4, marks(), chart.note)


def _length(tokens: float) -> str:
    """4K, 128K, 1M: powers of two as people say them."""
    if tokens % 2**20 == 0:
        return f"{tokens / 2**20:.0f}M"
    return f"{tokens / 1024:.0f}K" if tokens % 1024 == 0 else f"{tokens:,.0f}"


def _bars(chart: Bars) -> str:
    """One bar to a row, of the parts that add up to it, with the sum at its end."""
    if not chart.rows:
        return ""
    names = list(dict.fromkeys(name for _, parts in chart.rows for name, value in parts.items() if value > 0))
    largest = max(sum(parts.values()) for _, parts in chart.rows) or 1.0
    room = WIDTH - LABEL - RIGHT - 62  # what the sum's text takes

    def marks() -> Iterator[str]:
        for row, (label, parts) in enumerate(chart.rows):
            y, x = TOP + row * (BAR_HEIGHT + BAR_GAP), float(LABEL)
            yield _text(LABEL - 8, y + BAR_HEIGHT - 5, label, "end", "name")
            for name, value in parts.items():
                if value <= 0:
                    continue
                width = room * value / largest
                told = escape(f"{label}, {name}: {quantity(value, chart.unit)}")
                box = f'x="{x:.1f}" y="{y}" width="{width:.2f}" height="{BAR_HEIGHT}"'
                yield f'<rect {box} fill="{_colour(names.index(name))}"><title>{told}</title></rect>'
                x += width
            yield _text(x + 6, y + BAR_HEIGHT - 5, quantity(sum(parts.values()), chart.unit), "start", "name")

    height = TOP + len(chart.rows) * (BAR_HEIGHT + BAR_GAP) + 4
    # One part alone needs no key.
    return _figure(chart.title, names if len(names) > 1 else [], height, marks(), chart.note)
