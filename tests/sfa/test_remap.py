"""Indices under decode context parallelism, by property, against dealing tokens out one by one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_ops.shards import Shard
from sfa.remap import gather_is_cheaper, gathered_indices, local_indices, most_blocks, referenced_blocks

ranks = st.integers(1, 8)
interleaves = st.sampled_from([1, 2, 16])
seeds = st.integers(0, 2**31)


def draw(seed: int, rows: int, topk: int, context: int, ordered: bool = True) -> torch.Tensor:
    """Rows of distinct positions below ``context`` [rows, 1, topk], between none and topk of them valid."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((rows, 1, topk), -1, dtype=torch.int32)
    for row in indices[:, 0]:
        count = int(torch.randint(min(topk, context) + 1, (), generator=generator))
        chosen = torch.randperm(context, generator=generator)[:count].int()
        row[:count] = chosen.sort().values if ordered else chosen
    return indices


def hands(context: int, dcp: int, interleave: int) -> list[list[int]]:
    """The positions of each rank, dealt like cards."""
    return [[p for p in range(context) if p // interleave % dcp == rank] for rank in range(dcp)]


@given(seeds, st.integers(0, 5), st.integers(1, 40), st.integers(1, 300), ranks, interleaves, st.booleans())
def test_all_ranks_together_hold_what_was_chosen(seed, rows, topk, context, dcp, interleave, ordered):
    indices = draw(seed, rows, topk, context, ordered)
    kept = indices.clone()
    dealt = hands(context, dcp, interleave)
    for rank in range(dcp):
        local = local_indices(indices, Shard(rank, dcp, interleave))
        assert local.dtype == torch.int32
        assert local.shape == indices.shape
        assert local.is_contiguous()
        for chosen, own in zip(indices[:, 0].tolist(), local[:, 0].tolist(), strict=True):
            # The order of the given ones, exactly as many as are this rank's, and -1 from there on.
            wanted = [position for position in chosen if position in dealt[rank]]
            assert own[len(wanted) :] == [-1] * (topk - len(wanted))
            assert [dealt[rank][position] for position in own[: len(wanted)]] == wanted
    assert torch.equal(indices, kept)


def test_one_rank_changes_nothing():
    indices = draw(0, 4, 8, 100)
    assert local_indices(indices, Shard()) is indices


def test_holes_are_closed():
    indices = torch.tensor([[[-1, 5, -1, 4, 8, -1]]], dtype=torch.int32)
    assert local_indices(indices, Shard(0, 4, 1)).tolist() == [[[1, 2, -1, -1, -1, -1]]]
    assert local_indices(indices, Shard(1, 4, 1)).tolist() == [[[1, -1, -1, -1, -1, -1]]]


def test_positions_past_a_million():
    indices = torch.tensor([[[1_048_574, 1_048_575, 2_147_483_647]]], dtype=torch.int32)
    assert local_indices(indices, Shard(7, 8, 128)).tolist() == [[[131_070, 131_071, 268_435_455]]]


@given(seeds, st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400)), min_size=1, max_size=4), ranks, interleaves)
def test_gathered_rows_are_the_chosen_tokens(seed, batch, dcp, interleave):
    """Caches of all ranks hold (request, position) at each row; what is gathered is only what is referenced."""
    size, topk, shard = 16, 12, Shard(0, dcp, interleave)
    rows, contexts = zip(*batch, strict=True)
    width = max(-(-context // (dcp * size)) for context in contexts) + 1
    generator = torch.Generator().manual_seed(seed)
    table = 1 + torch.randperm(len(batch) * width, generator=generator).int().view(len(batch), width)
    caches = torch.full((dcp, len(batch) * width + 1, size, 2), -7)
    for request, context in enumerate(contexts):
        for rank, hand in enumerate(hands(context, dcp, interleave)):
            for local, position in enumerate(hand):
                caches[rank, table[request, local // size], local % size] = torch.tensor([request, position])
    indices = torch.cat([draw(seed + i, n, topk, c) for i, (n, c) in enumerate(zip(rows, contexts, strict=True))])
    requests = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(rows))

    capacity = most_blocks(contexts, rows, topk, size, dcp)
    referenced = referenced_blocks(indices, requests, table, size, shard, capacity)
    chosen = {
        (int(r), p // (dcp * size)) for r, row in zip(requests, indices[:, 0].tolist(), strict=True) for p in row if p >= 0
    }
    assert referenced.count.tolist() == [len(chosen)]
    assert referenced.blocks.tolist() == [int(table[one]) for one in sorted(chosen)] + [0] * (capacity - len(chosen))
    assert {tuple(place) for place in (referenced.slots >= 0).nonzero().tolist()} == chosen

    gathered = caches[:, referenced.blocks.long()].reshape(-1, 2)
    rows_of = gathered_indices(indices, requests, referenced, size, shard)
    assert rows_of.dtype == torch.int32
    assert torch.equal(rows_of < 0, indices < 0)
    valid = indices >= 0
    wanted = torch.stack((requests[:, None, None].expand_as(indices)[valid], indices[valid].long()), -1)
    assert torch.equal(gathered[rows_of[valid].long()], wanted)


def test_room_for_exactly_the_referenced():
    indices = draw(3, 6, 8, 500)
    requests, table, shard = torch.zeros(6, dtype=torch.int64), torch.arange(1, 21, dtype=torch.int32)[None], Shard(0, 2, 1)
    roomy = referenced_blocks(indices, requests, table, 16, shard, 20)
    exact = referenced_blocks(indices, requests, table, 16, shard, int(roomy.count))
    assert torch.equal(exact.blocks, roomy.blocks[: int(roomy.count)])
    assert torch.equal(exact.slots, roomy.slots)


def test_a_batch_without_requests():
    none = referenced_blocks(torch.empty(0, 1, 4, dtype=torch.int32), torch.empty(0, dtype=torch.int64),
                             torch.empty(0, 3, dtype=torch.int32), 16, Shard(0, 2, 1), 0)  # fmt: skip
    assert none.count.tolist() == [0]
    assert none.blocks.shape == (0,)


def test_most_blocks_is_the_lesser_of_all_and_one_to_a_token():
    assert most_blocks([1000, 1000, 0], [0, 1, 3], 4, 16, 2) == 4
    assert most_blocks([1000], [100], 4, 16, 2) == 32


def test_the_rule_on_either_side_of_equal_bytes():
    # 128 heads: 410,112 bytes to a query, 2 * 128 * 1,152 to a block of two ranks.
    whole = 1_048_576 // 256
    assert gather_is_cheaper(whole, 8192, 128, 128, 2, 1152)
    assert not gather_is_cheaper(whole, 100, 128, 128, 2, 1152)
    assert gather_is_cheaper(139, 100, 128, 128, 2, 1152)
    assert not gather_is_cheaper(140, 100, 128, 128, 2, 1152)
    # Packed rows are lighter.
    assert gather_is_cheaper(140, 100, 128, 128, 2, 656)
