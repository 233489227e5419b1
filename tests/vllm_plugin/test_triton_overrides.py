"""The torch slot mapping against a loop over tokens."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_plugin.triton_overrides import compute_slot_mapping

lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), min_size=1, max_size=5)


@given(lengths, st.sampled_from([16, 48, 128]), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 16]), st.integers(0, 9))
def test_against_a_loop(batch, block_size, world, interleave, padding):
    starts = [0]
    for new, _ in batch:
        starts.append(starts[-1] + new)
    positions = [old + i for new, old in batch for i in range(new)]
    tokens = len(positions)
    table = torch.randperm(5000)[: len(batch) * 24].view(len(batch), 24).int()
    for rank in range(world):
        expected = []
        for request, (new, old) in enumerate(batch):
            for position in range(old, old + new):
                block, offset = divmod(position, block_size * world)
                if offset // interleave % world == rank:
                    local = offset // (world * interleave) * interleave + offset % interleave
                    expected.append(int(table[request, block]) * block_size + local)
                else:
                    expected.append(-1)
        slots = torch.full((tokens + padding,), 77, dtype=torch.int64)
        compute_slot_mapping(
            tokens,
            tokens + padding,
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(positions, dtype=torch.int64),
            table,
            table.stride(0),
            slots,
            KV_CACHE_BLOCK_SIZE=block_size,
            TOTAL_CP_WORLD_SIZE=world,
            TOTAL_CP_RANK=rank,
            CP_KV_CACHE_INTERLEAVE_SIZE=interleave,
        )
        assert slots.tolist() == expected + [-1] * padding


def test_slots_past_two_to_the_31():
    """Block 20,000,000 of 128 tokens lies past 2^31 slots."""
    slots = torch.zeros(1, dtype=torch.int64)
    table = torch.tensor([[20_000_000]], dtype=torch.int32)
    compute_slot_mapping(
        1, 1, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([5]), table, 1, slots, KV_CACHE_BLOCK_SIZE=128
    )
    assert slots.tolist() == [20_000_000 * 128 + 5]


def test_upstreams_arguments_are_matched_by_name():
    """The dispatcher passes by name only if the parameter lists are equal; a renamed one upstream must be seen here."""
    import inspect

    from vllm.v1.worker.block_table import ComputeSlotMappingKernel

    kernel = ComputeSlotMappingKernel.kernel
    function = getattr(kernel, "fn", None) or getattr(kernel, "func", kernel)
    upstream = [name.removesuffix("_ptr") for name in inspect.signature(function).parameters]
    assert upstream == list(inspect.signature(compute_slot_mapping).parameters)
