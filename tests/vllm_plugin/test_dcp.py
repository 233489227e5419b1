"""Decode context parallelism over real process groups, and ASCEND_FIA's step under it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_ops.shards import Shard

RANK = Path(__file__).parent / "dcp_rank.py"


def test_partial_results_merge_over_ranks(tmp_path, ranks=4):
    """Both styles, keys of every width that we serve, rows that no rank or one rank has keys for."""
    env = {**os.environ, "VLLM_NPU_PARITY_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(ranks), str(tmp_path / "rendezvous")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for rank, process in enumerate(started):
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, f"rank {rank}:\n{output[-3000:]}"
            assert "all right" in output
    finally:
        for process in started:
            process.kill()


def positions(rows: int, shard: Shard) -> list[int]:
    """Positions of a rank's first ``rows`` keys of a request."""
    turn = shard.dcp * shard.interleave
    return [row // shard.interleave * turn + shard.rank * shard.interleave + row % shard.interleave for row in range(rows)]


def seen_keys(batch: list[tuple[int, int]], dcp: int, interleave: int) -> list[Counter[int]]:
    """Keys that each row of a batch of (new tokens, cached tokens) sees, over all ranks, as ASCEND_FIA plans it."""
    from vllm_plugin.attention.fia_dcp import plan_step

    starts = [0, *torch.tensor([new for new, _ in batch]).cumsum(0).tolist()]
    location = torch.tensor(starts, dtype=torch.int32)
    table = torch.arange(len(batch), dtype=torch.int32)[:, None]
    seen: list[Counter[int]] = [Counter() for _ in range(starts[-1])]
    for rank in range(dcp):
        shard = Shard(rank, dcp, interleave)
        step = plan_step(starts, [sum(pair) for pair in batch], location, table, 128, shard, torch.tensor)
        if rank == 0:
            assert step.new["sparse_mode"] == 3
            assert step.new["seq_lens"].tolist() == [new for new, _ in batch]
            for (first, last), (_, cached) in zip(pairwise([0, *step.new["actual_seq_qlen"]]), batch, strict=True):
                for row in range(first, last):
                    seen[row].update(range(cached, cached + row - first + 1))
        assert (step.context is None) == (not any(cached for _, cached in batch)), "ranks must agree on the exchange"
        if step.context:
            assert step.context["sparse_mode"] == 0
            assert step.context["seq_lens"].tolist() == step.context["actual_seq_kvlen"]
            ends = [0, *step.context["actual_seq_qlen"]]
            for (first, last), keys in zip(pairwise(ends), step.context["actual_seq_kvlen"], strict=True):
                for row in range(first, last):
                    seen[row].update(positions(keys, shard))
    return seen


@settings(derandomize=True, deadline=None, max_examples=100, database=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 300)), min_size=1, max_size=5),
    st.sampled_from([2, 3, 8]),
    st.sampled_from([1, 16, 128]),
)
def test_every_row_sees_every_key_it_may_once(batch, dcp, interleave):
    expected = [Counter(range(cached + row + 1)) for new, cached in batch for row in range(new)]
    assert seen_keys(batch, dcp, interleave) == expected


def test_speculative_rows_see_one_key_more_each():
    # 129 keys are cached, in turns of 128 on two ranks; four rows of one request follow.
    assert [len(seen) for seen in seen_keys([(4, 129)], 2, 128)] == [130, 131, 132, 133]


def test_one_key_on_eight_ranks():
    assert seen_keys([(1, 0)], 8, 1) == [Counter([0])]
    assert seen_keys([(1, 1)], 8, 1) == [Counter([0, 1])]
