"""Ownership under decode context parallelism, against dealing tokens out one by one and against vLLM."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_ops.shards import global_order, local_length, local_position, owner, rows_per_rank

TABLE = [
    (1, 8, 1, [1, 0, 0, 0, 0, 0, 0, 0]),
    (129, 2, 128, [128, 1]),
    (257, 2, 128, [129, 128]),
    (1000, 4, 16, [256, 256, 248, 240]),
    (128, 4, 128, [128, 0, 0, 0]),
    (130000, 4, 128, [32512, 32512, 32512, 32464]),
    (0, 2, 1, [0, 0]),
]
ranks = st.integers(1, 8)
interleaves = st.sampled_from([1, 2, 3, 16, 128])


def deal(length: int, dcp: int, interleave: int) -> list[list[int]]:
    """Positions on each rank, dealt like cards: ``interleave`` at a time to one rank after another."""
    hands: list[list[int]] = [[] for _ in range(dcp)]
    turn = 0
    for position in range(length):
        hands[turn].append(position)
        if position % interleave == interleave - 1:
            turn = (turn + 1) % dcp
    return hands


@pytest.mark.parametrize(("length", "dcp", "interleave", "lengths"), TABLE)
def test_local_lengths_of_the_table(length, dcp, interleave, lengths):
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    assert [local_length(length, rank, dcp, interleave) for rank in range(dcp)] == lengths
    upstream = get_dcp_local_seq_lens(torch.tensor([length]), dcp, None, interleave)
    assert local_length(torch.tensor([length])[:, None], torch.arange(dcp), dcp, interleave).tolist() == upstream.tolist()


@given(st.lists(st.integers(0, 600), max_size=5), ranks, interleaves)
def test_ints_lists_and_tensors_agree_with_dealing(lengths, dcp, interleave):
    hands = [deal(length, dcp, interleave) for length in lengths]
    for rank in range(dcp):
        wanted = [len(hand[rank]) for hand in hands]
        assert [local_length(length, rank, dcp, interleave) for length in lengths] == wanted
        assert local_length(lengths, rank, dcp, interleave) == wanted
        assert local_length(tuple(lengths), rank, dcp, interleave) == wanted
        tensor = local_length(torch.tensor(lengths, dtype=torch.int32), rank, dcp, interleave)
        assert tensor.dtype == torch.int32
        assert tensor.tolist() == wanted
    assert rows_per_rank(lengths, dcp, interleave) == sum(max(map(len, hand)) for hand in hands)


@given(st.integers(1, 900), ranks, interleaves)
def test_positions_lie_where_they_are_dealt(length, dcp, interleave):
    place = {p: (rank, index) for rank, hand in enumerate(deal(length, dcp, interleave)) for index, p in enumerate(hand)}
    positions = torch.arange(length)
    of_tensor = zip(
        owner(positions, dcp, interleave).tolist(), local_position(positions, dcp, interleave).tolist(), strict=True
    )
    assert list(of_tensor) == [place[position] for position in range(length)]
    assert (owner(length - 1, dcp, interleave), local_position(length - 1, dcp, interleave)) == place[length - 1]


def test_positions_past_2_to_31():
    far = 598 * 3_600_000
    assert owner(torch.tensor([far]), 8, 1).tolist() == [far % 8]
    assert local_position(torch.tensor([far]), 8, 1).tolist() == [far // 8]
    assert local_length(torch.tensor([far]), 0, 8, 1).tolist() == [far // 8]


@given(st.lists(st.integers(0, 300), max_size=5), ranks, interleaves)
def test_global_order_restores_what_was_dealt(lengths, dcp, interleave):
    hands = [deal(length, dcp, interleave) for length in lengths]
    rows: list[tuple[int, int] | None] = []
    for rank in range(dcp):
        own = [(request, position) for request, hand in enumerate(hands) for position in hand[rank]]
        rows += own + [None] * (rows_per_rank(lengths, dcp, interleave) - len(own))
    order = global_order(lengths, dcp, interleave)
    assert order.dtype == torch.int32
    assert [rows[row] for row in order.tolist()] == [(r, p) for r, length in enumerate(lengths) for p in range(length)]


def test_global_order_of_one_rank_is_the_identity():
    assert global_order([3, 0, 5], 1, 1).tolist() == list(range(8))
