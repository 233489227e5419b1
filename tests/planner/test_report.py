"""Quantities as text, a figure traced to its source, JSON, and a page that needs nothing else."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from planner import html, report
from planner.figure import Figure, PlanError
from planner.html import page
from planner.plan import Bars, Lines, Plan, PlanRequest, Section

ROW = Figure("latent row", 1152, "B", "2 B x (512 + 64)", "config.json: kv_lora_rank, qk_rope_head_dim")
ALL = Figure("KV of the prompt", 70.272e9, "B", "61 layers x 1,000,000 x latent row", "docs")
GUESS = Figure("host <link>", 25e9, "B/s", "given | as is", "unsourced")
PLAN = Plan(
    title="a <model> & a card",
    request=PlanRequest("config.json"),
    sections=(Section("Memory", (ROW, ALL), ("Every layer keeps its own.",)), Section("Hardware", (GUESS,))),
    command="vllm serve model \\\n  --tensor-parallel-size 8",
    lines=(Lines("TTFT", "s", {"all": ((4096, 0.5), (131072, 30.0)), "none": ((4096, 0.0),)}),),
    bars=(Bars("Prefill", "s", (("at 4K", {"attention": 1.0, "experts": 2.0}), ("at 1M", {"attention": 9.0}))),),
)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1152, "B", "1,152 B"),
        (656.5, "B", "656 B"),
        (85_888, "B", "85,888 B"),
        (7_813, "blocks", "7,813 blocks"),
        (12.5, "requests", "12.5 requests"),
        (1, "requests", "1 request"),
        (0, "requests", "0 requests"),
        (70.272e9, "B", "70.3 GB"),
        (6.442450944e9, "B", "6.44 GB"),
        (0, "B", "0 B"),
        (1.234e15, "FLOP", "1.23 PFLOP"),
        (3.2e12, "B/s", "3.20 TB/s"),
        (7813, "1", "7,813"),
        (0.654, "1", "0.654"),
        (1_000_000, "tokens", "1,000,000 tokens"),
        (1234.5, "tokens/s", "1,234 tokens/s"),
        (1.0, "1", "1"),
        (0.02304, "s", "23.0 ms"),
        (8.4e-6, "s", "8.40 µs"),
        (75.0, "s", "75.0 s"),
        (7200, "s", "2.00 h"),
        (0.0, "s", "0.00 s"),
        (9.999, "s", "10.0 s"),
    ],
)
def test_quantities(value, unit, text):
    assert report.quantity(value, unit) == text


def test_explain_gives_formula_inputs_and_source():
    text = report.explain(PLAN, "KV of the prompt")
    assert "exactly   70,272,000,000 B = 65.45 GiB" in text
    assert "formula   61 layers x 1,000,000 x latent row" in text
    assert "source    docs" in text
    assert "input     latent row = 1,152 B (config.json: kv_lora_rank, qk_rope_head_dim)" in text


def test_explain_says_unsourced():
    assert "source    unsourced" in report.explain(PLAN, "HOST <link>")
    bare = Plan("", PLAN.request, (Section("", (Figure("x", 1.5, "1", "1.5", ""),)),), "")
    assert "source    unsourced" in report.explain(bare, "x")
    assert report.unsourced(bare.sections[0].figures[0])
    assert not report.unsourced(ROW)


def test_explain_all_and_parts_of_names():
    assert report.explain(PLAN, "all").count("formula") == 3
    assert report.explain(PLAN, "of the").startswith("KV of the prompt")
    with pytest.raises(PlanError, match=r"no figure is called 'speed'\. Known: all, latent row, KV of the prompt, host <link>"):
        report.explain(PLAN, "speed")


def test_json_has_every_figure_with_its_source():
    told = json.loads(report.as_json(PLAN))
    figures = [figure for section in told["sections"] for figure in section["figures"]]
    assert [figure["name"] for figure in figures] == ["latent row", "KV of the prompt", "host <link>"]
    assert all(set(figure) == {"name", "value", "unit", "formula", "source"} for figure in figures)
    assert told["request"]["chunk"] == 8192


def test_tables_show_notes_marks_and_the_command():
    wide, narrow = Console(file=io.StringIO(), width=120), Console(file=io.StringIO(), width=80)
    for console in (wide, narrow):
        report.show(PLAN, console)
    text = wide.file.getvalue()
    assert "70.3 GB" in text
    assert "unsourced given | as is" in text
    assert "unsourced 25.0 GB/s" in narrow.file.getvalue()
    assert "given" not in narrow.file.getvalue()
    assert "Every layer keeps its own." in text
    assert "vllm serve model \\\n  --tensor-parallel-size 8\n" in text


def test_markdown_escapes_pipes():
    rows = report.markdown(PLAN.sections).splitlines()
    assert len(rows) == 5
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows)


def test_plans_side_by_side():
    other = Plan("", PLAN.request, (Section("Memory", (ALL, Figure("weights: x", 1, "B", "1", "1"), GUESS)),), "")
    assert report.comparison({"one": PLAN, "two": other}).splitlines() == [
        "| figure | one | two |",
        "|---|--:|--:|",
        "| latent row | 1,152 B |  |",
        "| KV of the prompt | 70.3 GB | 70.3 GB |",
        "| host <link> | 25.0 GB/s | 25.0 GB/s |",
    ]


class Reader(HTMLParser):
    """Checks that tags nest, and collects addresses and text."""

    VOID = frozenset({"meta"})

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.text, self.tags = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_asks_nobody():
    written = page(PLAN)
    reader = Reader()
    reader.feed(written)
    assert not reader.open
    assert not reader.addresses
    assert "script" not in reader.tags
    assert not re.search(r"https?:|url\(|@import", written)
    assert {"svg", "polyline", "rect", "table"} <= set(reader.tags)
    text = "".join(reader.text)
    assert "a <model> & a card" in text
    assert "vllm serve model" in text
    assert 'class="unsourced">unsourced' in written


def test_plots_stand_inside_their_frame():
    written = page(PLAN)
    for x, y in re.findall(r'cx="([\d.-]+)" cy="([\d.-]+)"', written):
        assert 0 <= float(x) <= 560
        assert 0 <= float(y) <= 300
    bars = [tuple(map(float, found)) for found in re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', written)]
    assert len(bars) == 3
    # The second bar is three times the first: 9 s against 1 s + 2 s; its parts stand end to end.
    assert bars[0][0] + bars[0][1] == pytest.approx(bars[1][0], abs=0.1)
    assert bars[2][1] == pytest.approx(3 * (bars[0][1] + bars[1][1]), abs=0.1)


def test_plots_without_points_are_left_out():
    empty = Plan("t", PLAN.request, (), "", (Lines("l", "s", {"a": ((1024, 0.0),)}),), (Bars("b", "s", ()),))
    assert "<svg" not in page(empty)


@pytest.mark.parametrize(
    ("values", "log", "ticks"),
    [
        ([0.5, 30.0], True, [0.1, 1, 10, 100]),
        ([10.0], True, [10, 100]),
        ([3.0, 118.0], False, [0, 20, 40, 60, 80, 100, 120]),
        ([1.0, 9.0], False, [0, 2, 4, 6, 8, 10]),
        ([4.0], False, [0, 1, 2, 3, 4]),
    ],
)
def test_ticks_surround_the_values(values, log, ticks):
    assert html._ticks(values, log) == pytest.approx(ticks)


def test_one_length_is_a_plot_too():
    assert "<circle" in page(Plan("t", PLAN.request, (), "", (Lines("l", "B", {"a": ((1024, 5.0),)}),)))
