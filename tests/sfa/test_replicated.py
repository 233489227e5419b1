from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sfa.replicated import replicated_table, slots_of


@settings(derandomize=True, deadline=None, max_examples=100, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 200)), min_size=1, max_size=5),
    st.sampled_from([2, 3, 8]),
    st.integers(0, 7),
)
def test_slots_are_where_the_table_says(batch, dcp, padding):
    block_size = 16
    new = torch.tensor([rows for rows, _ in batch])
    lengths = new + torch.tensor([cached for _, cached in batch])
    starts = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int()
    # Blocks of all requests in a mixed order; each stands for block_size * dcp tokens.
    columns = int((lengths.max() + block_size * dcp - 1) // (block_size * dcp)) or 1
    table = torch.randperm(len(batch) * columns, generator=torch.Generator().manual_seed(1)).view(len(batch), columns).int()
    expanded = replicated_table(table, dcp)
    slots = slots_of(starts, lengths.int(), expanded, block_size, int(starts[-1]) + padding)
    whole = block_size * dcp
    expected = [
        int(table[request, position // whole]) * whole + position % whole
        for request, (rows, cached) in enumerate(batch)
        for position in range(cached, cached + rows)
    ]
    assert slots.dtype == torch.int64
    assert slots.tolist() == expected + [-1] * padding


def test_slots_past_2_to_the_31():
    table = torch.tensor([[2**24]], dtype=torch.int32)
    slots = slots_of(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([128], dtype=torch.int32), table, 128, 1)
    assert slots.tolist() == [2**31 + 127]
