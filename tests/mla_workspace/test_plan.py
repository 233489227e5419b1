"""What both plans promise, against the batch itself; Ascend's plan against its formula; the comparison."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_workspace.compare import BATCHES, Batch, markdown
from mla_workspace.plan import ContextPlan, plan_context
from mla_workspace.size import cdiv

ROOT = Path(__file__).parent.parent.parent
contexts = st.lists(st.one_of(st.just(0), st.integers(1, 40), st.integers(1, 5000), st.just(1280)), max_size=12)
alignments = st.sampled_from([1, 7, 16, 128, 384])
MODES = ("proportional", "equal")


def workspace_for(mode: str, batch: list[int], alignment: int, spare: int) -> int:
    """The least workspace that the plan takes, and some more, not always whole units."""
    count = sum(context > 0 for context in batch)
    return max(count if mode == "equal" else 1, 1) * alignment + spare


def parts(plan: ContextPlan, request: int) -> list[tuple[int, int]]:
    """(start, length) of a request in each chunk that holds some of it."""
    found = [
        (start, length)
        for chunk in plan.chunks
        for number, start, length in zip(chunk.requests, chunk.starts, chunk.lengths, strict=True)
        if number == request
    ]
    return [part for part in found if part[1]]


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=100)
@given(batch=contexts, alignment=alignments, spare=st.integers(0, 2000))
def test_every_token_once_in_order_aligned_and_within_the_workspace(mode, batch, alignment, spare):
    workspace = workspace_for(mode, batch, alignment, spare)
    plan = plan_context(batch, workspace, alignment, mode)
    for request, context in enumerate(batch):
        position = 0
        for start, length in parts(plan, request):
            assert start == position
            assert start % alignment == 0
            position += length
        assert position == context
    for chunk in plan.chunks:
        assert all(start % alignment == 0 for start in chunk.starts)
        assert sum(cdiv(length, alignment) for length in chunk.lengths) <= workspace // alignment
        assert 0 < chunk.rows == sum(chunk.lengths) <= workspace
        assert chunk.requests.start >= 0
        assert chunk.requests.stop <= len(batch)
    assert plan.iterations == len(plan.chunks)
    assert plan.rows == sum(batch)
    assert plan.peak_rows == max((chunk.rows for chunk in plan.chunks), default=0)
    assert plan.requests_run == sum(len(chunk.lengths) for chunk in plan.chunks)


@settings(max_examples=200)
@given(contexts, alignments, st.integers(0, 2000))
def test_proportional_needs_the_fewest_chunks(batch, alignment, spare):
    workspace = workspace_for("proportional", batch, alignment, spare)
    plan = plan_context(batch, workspace, alignment)
    units = workspace // alignment
    used = [sum(cdiv(length, alignment) for length in chunk.lengths) for chunk in plan.chunks]
    assert all(count == units for count in used[:-1])
    assert plan.iterations == cdiv(sum(cdiv(context, alignment) for context in batch), units)
    assert all(chunk.lengths[0] and chunk.lengths[-1] for chunk in plan.chunks)
    if units >= len(batch):
        assert plan.iterations <= cdiv(sum(batch), units * alignment) + 1


@settings(max_examples=200)
@given(contexts, alignments, st.integers(0, 2000))
def test_proportional_shares_are_fair_and_short_requests_end_first(batch, alignment, spare):
    plan = plan_context(batch, workspace_for("proportional", batch, alignment, spare), alignment)
    left = [cdiv(context, alignment) for context in batch]
    for chunk in plan.chunks:
        shares = [0] * len(batch)
        for request, length in zip(chunk.requests, chunk.lengths, strict=True):
            shares[request] = cdiv(length, alignment)
        # Nobody has more than one unit above a request that wanted more.
        assert (
            max(shares) - min((share for share, need in zip(shares, left, strict=True) if share < need), default=max(shares))
            <= 1
        )
        left = [need - share for need, share in zip(left, shares, strict=True)]
        needs = sorted(zip([cdiv(context, alignment) for context in batch], left, strict=True))
        assert [rest for _, rest in needs] == sorted(left)


@settings(max_examples=200)
@given(contexts, alignments, st.integers(0, 2000))
def test_proportional_is_never_worse_than_equal(batch, alignment, spare):
    workspace = workspace_for("equal", batch, alignment, spare)
    ours, ascends = (plan_context(batch, workspace, alignment, mode) for mode in MODES)
    assert ours.iterations <= ascends.iterations
    assert ours.rows <= ascends.rows
    assert ours.requests_run <= ascends.requests_run
    for request in range(len(batch)):
        assert len(parts(ours, request)) <= len(parts(ascends, request))


@given(contexts, alignments, st.integers(0, 2000))
def test_equal_is_ascends_formula(batch, alignment, spare):
    workspace = workspace_for("equal", batch, alignment, spare)
    plan = plan_context(batch, workspace, alignment, "equal")
    if not any(batch):
        assert plan.chunks == ()
        return
    lengths = torch.tensor(batch)
    part = workspace // int((lengths > 0).sum()) // alignment * alignment
    starts = torch.arange(-(-max(batch) // part))[:, None].expand(-1, len(batch)) * part
    ends = torch.minimum(lengths, starts + part)
    assert [list(chunk.starts) for chunk in plan.chunks] == starts.tolist()
    assert [list(chunk.lengths) for chunk in plan.chunks] == (ends - starts).clamp(min=0).tolist()
    assert {chunk.requests for chunk in plan.chunks} == {range(len(batch))}


def test_equal_runs_a_request_that_has_ended():
    plan = plan_context([256, 64], 256, 128, "equal")
    assert [chunk.lengths for chunk in plan.chunks] == [(128, 64), (128, 0)]


def test_proportional_leaves_out_a_request_that_has_ended():
    plan = plan_context([256, 64], 256, 128)
    assert [(chunk.requests, chunk.starts, chunk.lengths) for chunk in plan.chunks] == [
        (range(2), (0, 0), (128, 64)),
        (range(1), (128,), (128,)),
    ]


def test_a_request_that_has_ended_between_others_has_no_length():
    plan = plan_context([0, 500, 100, 0, 500, 0], 512, 128)
    assert [(chunk.requests, chunk.starts, chunk.lengths) for chunk in plan.chunks] == [
        (range(1, 5), (0, 0, 0, 0), (256, 100, 0, 128)),
        (range(1, 5), (256, 0, 0, 128), (244, 0, 0, 256)),
        (range(4, 5), (384,), (116,)),
    ]


def test_more_requests_than_units_take_turns():
    plan = plan_context([300, 40, 128, 129, 7], 256, 128)
    assert [chunk.rows for chunk in plan.chunks] == [47, 256, 129, 172]
    with pytest.raises(ValueError, match=r"at least 640 tokens is required by the plan 'equal' for 5 .*got 256\. Raise mla_w"):
        plan_context([300, 40, 128, 129, 7], 256, 128, "equal")
    with pytest.raises(ValueError, match=r"at least 128 tokens is required by the plan 'proportional' for 1 .*got 127\."):
        plan_context([1], 127, 128)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [[], [0], [0] * 8])
def test_no_context_needs_no_chunk_and_no_workspace(mode, batch):
    plan = plan_context(batch, 0, 128, mode)
    assert (plan.chunks, plan.iterations, plan.rows, plan.peak_rows, plan.requests_run) == ((), 0, 0, 0, 0)


def test_plans_are_frozen():
    with pytest.raises(FrozenInstanceError):
        plan_context([1], 128, 128).chunks = ()  # type: ignore[misc]


def test_twenty_batches_are_compared():
    assert len({batch.name for batch in BATCHES}) == 20
    assert len(markdown().splitlines()) == 22


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
def test_proportional_is_never_worse_on_the_stated_batches(batch: Batch):
    ours, ascends = (batch.plan(mode) for mode in MODES)
    assert ours.iterations <= ascends.iterations
    assert batch.rows(ours) <= batch.rows(ascends)
    assert ours.requests_run <= ascends.requests_run


def test_a_short_request_beside_a_huge_one_costs_one_chunk():
    huge = next(batch for batch in BATCHES if batch.name == "huge before many small")
    assert huge.plan("equal").iterations == 512
    assert huge.plan("proportional").iterations == 9


def test_the_comparison_is_printed():
    env = {**os.environ, "COLUMNS": "240"}
    run = subprocess.run(
        [sys.executable, "-m", "mla_workspace"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    for batch in BATCHES:
        assert batch.name in run.stdout
    assert "512 / 9" in run.stdout
