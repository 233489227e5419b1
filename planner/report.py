"""A plan for people and programs: rich tables, JSON, and where a figure comes from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.figure import Figure, PlanError
from planner.plan import Plan, Section

if TYPE_CHECKING:
    from rich.console import Console

# Decimal, as datasheets count; `--explain` adds the binary figure, in which vLLM's log counts.
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
SCALED = ("B", "B/s", "FLOP", "FLOP/s", "OP/s", "bit/s")
GIB = 2**30
UNSOURCED = "unsourced"
WIDE = 110  # columns of a terminal; below, formulas are left to --explain
# Left out where plans stand side by side: what adds up to another figure, and the hardware itself.
DETAILS = re.compile("weights: |activations: |hardware: |.*compressor state: |.*: activations|.*: .*: ")


def quantity(value: float, unit: str) -> str:
    """A value as people read it: three digits with a prefix, what is counted in full."""
    if unit == "s":
        return _time(value)
    # One row's or one token's bytes are exact and stay so: 1,152 B, not 1.15 kB.
    if unit not in SCALED or (unit == "B" and abs(value) < 1e6):
        text = f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:,.3g}"
        return f"{text} {unit.removesuffix('s') if value == 1 else unit}".removesuffix(" 1").rstrip()
    scale, prefix = next(((scale, prefix) for scale, prefix in PREFIXES if abs(value) >= scale), (1.0, ""))
    return f"{_three(value / scale)} {prefix}{unit}"


def _time(seconds: float) -> str:
    if seconds >= 3600:
        return f"{_three(seconds / 3600)} h"
    scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if abs(seconds) >= s), (1.0, "s"))
    return f"{_three(seconds / scale)} {unit}"


def _three(value: float) -> str:
    """Three digits, the closing zeros kept: 70.3, 5.00, 1,240."""
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{digits}f}"


def show(plan: Plan, console: Console) -> None:
    """Tables of every section, what to know about each, and the command line."""
    from rich.markup import escape
    from rich.table import Table

    wide = console.width >= WIDE
    console.print(f"[bold]{escape(plan.title)}[/]\n")
    for section in plan.sections:
        table = Table(title=section.title, title_justify="left", expand=True)
        table.add_column("figure")
        table.add_column("value", justify="right", no_wrap=True)
        if wide:
            # A long formula is cut here; --explain has it whole.
            table.add_column("from", ratio=1, no_wrap=True, overflow="ellipsis")
        for figure in section.figures:
            mark = "[yellow]unsourced[/] " if unsourced(figure) else ""
            value = escape(quantity(figure.value, figure.unit))
            table.add_row(
                escape(figure.name), value if wide else mark + value, *([mark + escape(figure.formula)] if wide else [])
            )
        console.print(table)
        for note in section.notes:
            console.print(f"[dim]·[/] {escape(note)}")
        console.print()
    for line in plan.command.splitlines():
        # A command is copied: no wrapping, no colours.
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def unsourced(figure: Figure) -> bool:
    """Whether no source stands behind a figure."""
    return not figure.source or UNSOURCED in figure.source.lower()


def as_json(plan: Plan) -> str:
    """The whole plan as one JSON object."""
    return json.dumps(asdict(plan), indent=2, ensure_ascii=False)


def explain(plan: Plan, name: str) -> str:
    """Formula, inputs and source of the figures of a name, or of all.

    Raises:
        PlanError: if there is no such figure.
    """
    figures = {figure.name: figure for figure in plan.figures()}
    chosen = [figure for figure in plan.figures() if name.casefold() in ("all", figure.name.casefold())]
    if not chosen:
        # A part of a name is enough where it is clear.
        chosen = [figure for figure in plan.figures() if name.casefold() in figure.name.casefold()]
    if not chosen:
        raise PlanError(f"no figure is called {name!r}. Known: all, {', '.join(figures)}")
    return "\n\n".join(_explained(figure, figures) for figure in chosen)


def _explained(figure: Figure, known: dict[str, Figure]) -> str:
    exact = f"{figure.value:,.0f}" if figure.value == round(figure.value) else f"{figure.value:.6g}"
    binary = f" = {figure.value / GIB:,.2f} GiB" if figure.unit == "B" and figure.value >= GIB / 10 else ""
    lines = [
        f"{figure.name}: {quantity(figure.value, figure.unit)}",
        f"  exactly   {exact} {figure.unit}{binary}",
        f"  formula   {figure.formula}",
        f"  source    {UNSOURCED if not figure.source else figure.source}",
    ]
    # Names inside a formula are figures of their own.
    inputs = [other for name, other in known.items() if name != figure.name and name in figure.formula]
    lines += [f"  input     {other.name} = {quantity(other.value, other.unit)} ({other.source})" for other in inputs]
    return "\n".join(lines)


def comparison(plans: Mapping[str, Plan]) -> str:
    """Values of several plans side by side, a row to a figure, for the documents."""
    columns = [{figure.name: quantity(figure.value, figure.unit) for figure in plan.figures()} for plan in plans.values()]
    # By section, so that what only some of the models have stands beside what others have in its place.
    titles = dict.fromkeys(section.title for plan in plans.values() for section in plan.sections)
    sections = [section for title in titles for plan in plans.values() for section in plan.sections if section.title == title]
    names = dict.fromkeys(figure.name for section in sections for figure in section.figures if not DETAILS.match(figure.name))
    rows = (f"| {name} | {' | '.join(column.get(name, '') for column in columns)} |" for name in names)
    return "\n".join([f"| figure | {' | '.join(plans)} |", "|---|" + "--:|" * len(plans), *rows])


def markdown(sections: tuple[Section, ...]) -> str:
    """One table of sections for the documents."""
    return "\n".join(_rows(sections))


def _rows(sections: tuple[Section, ...]) -> Iterator[str]:
    yield "| | figure | value | formula | source |"
    yield "|---|---|---|---|---|"
    for section in sections:
        title = section.title
        for figure in section.figures:
            cells: tuple[Any, ...] = (title, figure.name, quantity(figure.value, figure.unit), figure.formula, figure.source)
            yield f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"
            title = ""
