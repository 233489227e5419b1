"""Chunks gathered from paged caches on one rank and on several, and attention over them merged into that over all keys."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_workspace.context import ChunkGather, RunningMerge, Workspace, chunk_gathers
from mla_workspace.plan import ContextPlan, plan_context
from mla_workspace.size import context_alignment
from npu_ops.contract import ContractError
from npu_ops.shards import Shard

WIDTHS = (16, 8)
MODES = ("proportional", "equal")
Rows = list[tuple[Tensor, Tensor]]


def some_rows(contexts: list[int]) -> Rows:
    """Latent and rope rows of each request's context."""
    return [(torch.randn(context, WIDTHS[0]), torch.randn(context, WIDTHS[1])) for context in contexts]


def own_positions(context: int, shard: Shard) -> list[int]:
    """The positions of a rank, found by asking each."""
    return [position for position in range(context) if position // shard.interleave % shard.dcp == shard.rank]


def paged(rows: Rows, block_size: int, shard: Shard, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's caches and its block table: blocks shuffled, rows that belong to nobody NaN, block 0 nobody's."""
    own = [own_positions(len(latent), shard) for latent, _ in rows]
    blocks = [math.ceil(len(positions) / block_size) for positions in own]
    ids = iter((torch.randperm(sum(blocks)) + 1).tolist())
    table = torch.zeros(len(rows), max(blocks, default=0) + 2, dtype=torch.int32)
    caches = [torch.full((sum(blocks) + 1, block_size, 1, width), math.nan) for width in WIDTHS]
    for request, (parts, positions, count) in enumerate(zip(rows, own, blocks, strict=True)):
        for block in range(count):
            table[request, block] = next(ids)
        for index, position in enumerate(positions):
            for cache, part in zip(caches, parts, strict=True):
                cache[table[request, index // block_size], index % block_size, 0] = part[position]
    return caches[0].to(device), caches[1].to(device), table.to(device)


def wanted_rows(plan: ContextPlan, rows: Rows) -> Rows:
    """Each chunk, cut out of the requests' rows."""
    chunks = []
    for chunk in plan.chunks:
        spans = list(zip(chunk.requests, chunk.starts, chunk.lengths, strict=True))
        latent, rope = (torch.cat([rows[r][part][start : start + n] for r, start, n in spans]) for part in (0, 1))
        chunks.append((latent, rope))
    return chunks


class Ranks:
    """An all-gather among threads, each of them a rank."""

    def __init__(self, count: int) -> None:
        self._given: list[Tensor] = [torch.empty(0)] * count
        self._barrier = threading.Barrier(count, timeout=60)

    def release(self) -> None:
        """Let nobody wait for a rank that has failed."""
        self._barrier.abort()

    def all_gather(self, rank: int) -> Callable[[Tensor], Tensor]:
        """The collective as a rank calls it."""

        def gather(tensor: Tensor) -> Tensor:
            self._given[rank] = tensor
            self._barrier.wait()
            result = torch.cat(self._given)
            self._barrier.wait()
            return result

        return gather


def gathered(plan: ContextPlan, rows: Rows, tokens: int, block_size: int, dcp: int, interleave: int, device: str) -> list[Rows]:
    """Every chunk as every rank has it, each rank in a thread of its own."""
    ranks = Ranks(dcp)
    jobs = []
    for shard in (Shard(rank, dcp, interleave) for rank in range(dcp)):
        latent, rope, table = paged(rows, block_size, shard, device)
        calls = chunk_gathers(plan, table, lambda host: host.to(device), shard)
        all_gather = ranks.all_gather(shard.rank) if dcp > 1 else None
        workspace = Workspace(tokens, latent.dtype, device, dcp, all_gather, WIDTHS)
        jobs.append((workspace, latent, rope, calls))

    def run(job: tuple[Workspace, Tensor, Tensor, list[ChunkGather]]) -> Rows:
        workspace, latent, rope, calls = job
        try:
            results = (workspace.gather(latent, rope, call) for call in calls)
            return [(key[:, 0].cpu().clone(), value[:, 0].cpu().clone()) for key, value in results]
        except BaseException:
            ranks.release()
            raise

    with ThreadPoolExecutor(dcp) as pool:
        return list(pool.map(run, jobs))


batches = st.lists(st.integers(0, 90), min_size=1, max_size=5)


@pytest.mark.parametrize("mode", MODES)
@given(batch=batches, block_size=st.sampled_from([4, 16]), units=st.integers(0, 6), interleave=st.sampled_from([1, 4]),
       dcp=st.sampled_from([1, 2, 3, 4]))  # fmt: skip
def test_every_rank_gathers_every_chunk_in_global_order(device, mode, batch, block_size, units, interleave, dcp):
    alignment = context_alignment(block_size, dcp, interleave)
    tokens = (len(batch) + units) * alignment
    plan, rows = plan_context(batch, tokens, alignment, mode), some_rows(batch)
    wanted = wanted_rows(plan, rows)
    for found in gathered(plan, rows, tokens, block_size, dcp, interleave, device):
        assert len(found) == len(wanted)
        for chunk, expected in zip(found, wanted, strict=True):
            assert torch.equal(chunk[0], expected[0])
            assert torch.equal(chunk[1], expected[1])


def test_four_ranks_share_the_last_chunk_of_a_thousand_tokens(device):
    plan = plan_context([1000], 256, context_alignment(16, 4, 1))
    table = torch.zeros(1, 16, dtype=torch.int32)
    calls = [chunk_gathers(plan, table, torch.clone, Shard(rank, 4, 1)) for rank in range(4)]
    assert [[int(call.seq_lens.sum()) for call in chunk] for chunk in zip(*calls, strict=True)] == [[64] * 4] * 3 + [[58] * 4]
    assert [sum(int(call.seq_lens.sum()) for call in chunk) for chunk in zip(*calls, strict=True)] == [256, 256, 256, 232]
    rows = some_rows([1000])
    for found in gathered(plan, rows, 256, 16, 4, 1, device):
        assert torch.equal(torch.cat([latent for latent, _ in found]), rows[0][0])
        assert torch.equal(torch.cat([rope for _, rope in found]), rows[0][1])


def test_ranks_without_a_row_take_part(device):
    rows = some_rows([1])
    plan = plan_context([1], 16, 16)
    for found in gathered(plan, rows, 16, 16, 8, 1, device):
        assert torch.equal(found[0][0], rows[0][0])


def test_a_step_copies_to_the_device_once():
    copies = []

    def on_device(host: Tensor) -> Tensor:
        copies.append(host)
        return host.clone()

    table = torch.zeros(2, 8, dtype=torch.int32)
    calls = chunk_gathers(plan_context([100, 40], 32, 16), table, on_device, Shard(1, 2, 1))
    assert len(calls) == 5
    assert [host.dtype for host in copies] == [torch.int32]
    assert chunk_gathers(plan_context([0, 0], 32, 16), table, on_device) == []
    assert len(copies) == 1


def test_the_workspace_is_one_allocation(device):
    rows = some_rows([70, 20])
    latent, rope, table = paged(rows, 16, Shard(), device)
    workspace = Workspace(32, latent.dtype, device, widths=WIDTHS)
    calls = chunk_gathers(plan_context([70, 20], 32, 16), table, lambda host: host.to(device))
    memory = {tuple(part.data_ptr() for part in workspace.gather(latent, rope, call)) for call in calls}
    assert len(calls) == 4
    assert len(memory) == 1


def test_bad_calls_say_what_to_do(device):
    latent, rope, table = paged(some_rows([70]), 16, Shard(), device)
    call = chunk_gathers(plan_context([70], 64, 16), table, lambda host: host.to(device))[0]
    with pytest.raises(ValueError, match=r"a chunk of at most 48 rows is required, got 64\. Plan for this workspace\."):
        Workspace(48, latent.dtype, device, widths=WIDTHS).gather(latent, rope, call)
    with pytest.raises(ContractError, match=r"a contiguous key \[R, 1, 16\] of torch\.float32"):
        Workspace(64, torch.bfloat16, device, widths=WIDTHS).gather(latent, rope, call)
    for dcp, all_gather in ((2, None), (1, torch.clone)):
        with pytest.raises(ValueError, match=r"all_gather is required if dcp > 1, and only then"):
            Workspace(64, latent.dtype, device, dcp, all_gather)


HEADS = 2


def attend(query: Tensor, keys: Tensor, values: Tensor, empty: float) -> tuple[Tensor, Tensor]:
    """[t, N, D] and LSE of query rows over keys [k, N, D]; without keys NaN, and an LSE of ``empty``."""
    scores = torch.einsum("tnd,knd->tnk", query, keys)
    if not len(keys):
        return torch.full_like(query, math.nan), torch.full(query.shape[:2], empty)
    return torch.einsum("tnk,knd->tnd", scores.softmax(-1), values), scores.logsumexp(-1)


def attend_causal(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Likewise, of rows that are the last of the keys and see those up to their own."""
    past = len(keys) - len(query)
    rows = [attend(query[i : i + 1], keys[: past + i + 1], values[: past + i + 1], -math.inf) for i in range(len(query))]
    return torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows])


def chunked(requests: list[tuple[int, int]], workspace: int, alignment: int, mode: str, empty: float, base: float,
            device: str) -> tuple[RunningMerge, Tensor, Tensor]:  # fmt: skip
    """Requests (context, new) attended to chunk by chunk, and the same in one piece."""
    contexts = [context for context, _ in requests]
    data = [torch.randn(3, context + new, HEADS, 8) for context, new in requests]
    # In the caches a row is what heads attend to, keys in the latent part and values in the rope part.
    rows = [(keys[:c].flatten(1), values[:c, :1].flatten(1)) for (_, keys, values), c in zip(data, contexts, strict=True)]
    queries = [query[context:] for (query, _, _), context in zip(data, contexts, strict=True)]
    whole = [
        attend_causal(query, keys, values[:, :1].expand(-1, HEADS, -1))
        for query, (_, keys, values) in zip(queries, data, strict=True)
    ]
    own = [
        attend_causal(query, keys[context:], values[context:, :1].expand(-1, HEADS, -1))
        for query, (_, keys, values), context in zip(queries, data, contexts, strict=True)
    ]
    latent, rope, table = paged(rows, 16, Shard(), device)
    plan = plan_context(contexts, workspace, alignment, mode)
    memory = Workspace(workspace, latent.dtype, device, widths=WIDTHS)
    merge = RunningMerge(*(torch.cat(part).to(device) for part in zip(*own, strict=True)))
    ends = torch.tensor([0, *(new for _, new in requests)]).cumsum(0).tolist()
    for chunk, call in zip(plan.chunks, chunk_gathers(plan, table, lambda host: host.to(device)), strict=True):
        found = [part.cpu() for part in memory.gather(latent, rope, call)]
        keys, values = found[0].view(-1, HEADS, 8), found[1].expand(-1, HEADS, -1)
        partials = [
            attend(queries[request], key, value, empty)
            for request, key, value in zip(
                chunk.requests, torch.split(keys, chunk.lengths), torch.split(values, chunk.lengths), strict=True
            )
        ]
        out, lse = (torch.cat(part).to(device) for part in zip(*partials, strict=True))
        merge.add(slice(ends[chunk.requests.start], ends[chunk.requests.stop]), out, lse / math.log(base))
    return merge, *(torch.cat(part) for part in zip(*whole, strict=True))


BATCHES = {
    "tail-169": [(1024, 169)],
    "tail-1": [(1024, 1)],
    "one-more-than-blocks": [(1025, 2)],
    "ended-and-without": [(256, 3), (64, 2), (0, 4), (1000, 1)],
    "ended-between": [(500, 2), (10, 1), (500, 2)],
}


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BATCHES)
def test_chunked_attention_equals_that_over_all_keys(device, name, mode, empty):
    merge, out, lse = chunked(BATCHES[name], 512, 128, mode, empty, math.e, device)
    torch.testing.assert_close(merge.out.cpu(), out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(merge.lse.cpu(), lse, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("workspace", [7, 64, 127, 128, 129, 1000])
def test_the_size_of_a_chunk_changes_nothing(device, workspace):
    merge, out, _ = chunked([(1000, 3)], workspace, 1, "proportional", -math.inf, math.e, device)
    torch.testing.assert_close(merge.out.cpu(), out, atol=1e-5, rtol=1e-4)


def test_a_base_other_than_e_shows(device):
    merge, out, _ = chunked([(1000, 3)], 512, 128, "proportional", -math.inf, 2.0, device)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(merge.out.cpu(), out, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("first", [-math.inf, math.inf])
@pytest.mark.parametrize("second", [-math.inf, math.inf])
def test_rows_empty_on_both_sides_are_zero(device, first, second):
    out = torch.full((3, 2, 8), math.nan, device=device)
    out[2] = 5.0
    lse = torch.full((3, 2), first, device=device)
    lse[2] = 1.0
    merge = RunningMerge(out, lse)
    partial = torch.full((2, 2, 8), math.nan, device=device)
    for _ in range(2):
        merge.add(slice(0, 2), partial, torch.full((2, 2), second, device=device))
    assert not merge.out[:2].any()
    assert (merge.lse[:2] == -math.inf).all()
    assert (merge.out[2] == 5.0).all()
    assert (merge.lse[2] == 1.0).all()
    merge.add(slice(0, 1), torch.ones(1, 2, 8, device=device), torch.zeros(1, 2, device=device))
    assert (merge.out[0] == 1.0).all()


def test_merging_keeps_the_memory_that_it_has(device):
    merge = RunningMerge(torch.zeros(4, 2, 8, device=device), torch.zeros(4, 2, device=device))
    memory = {name: value.data_ptr() for name, value in vars(merge).items()}
    for _ in range(20):
        merge.add(slice(1, 4), torch.ones(3, 2, 8, device=device), torch.zeros(3, 2, device=device))
    assert {name: value.data_ptr() for name, value in vars(merge).items()} == memory
    torch.testing.assert_close(merge.lse[1:].cpu(), torch.full((3, 2), math.log(21.0)))


def test_partials_of_16_bits_are_summed_in_32(device):
    merge = RunningMerge(torch.ones(1, 1, 8, dtype=torch.bfloat16, device=device), torch.zeros(1, 1, device=device))
    for _ in range(511):
        merge.add(slice(0, 1), torch.zeros(1, 1, 8, dtype=torch.bfloat16, device=device), torch.zeros(1, 1, device=device))
    assert merge.out.dtype == torch.float32
    torch.testing.assert_close(merge.out.cpu(), torch.full((1, 1, 8), 1 / 512), rtol=1e-4, atol=0)
