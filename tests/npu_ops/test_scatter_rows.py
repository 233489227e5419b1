from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_ops.contract import ContractError
from npu_ops.scatter_rows import DTYPES, scatter_rows

OPS = ("scatter_rows",)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


@given(data=st.data(), block_size=st.sampled_from([1, 16, 48]), blocks=st.integers(1, 4), width=st.sampled_from([1, 7, 128]))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_a_loop_over_tokens(
    device: str, dtype: torch.dtype, data: st.DataObject, block_size: int, blocks: int, width: int
) -> None:
    slots = data.draw(st.lists(st.integers(0, blocks * block_size - 1), unique=True, max_size=9))
    slots = data.draw(st.permutations(slots + [-1] * data.draw(st.integers(0, 3))))
    size = torch.tensor([], dtype=dtype).element_size()

    def raw(*shape: int) -> torch.Tensor:
        """Any bytes: NaNs of every kind are copied as they are."""
        return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)

    rows, cache = raw(len(slots), width), raw(blocks, block_size, 1, width)
    wanted = cache.clone()
    for row, slot in zip(rows, slots, strict=True):
        if slot != -1:
            wanted[slot // block_size][slot % block_size][0] = row
    cache = cache.view(dtype).to(device)
    scatter_rows(rows.view(dtype).to(device), torch.tensor(slots, dtype=torch.int64, device=device), cache)
    assert torch.equal(cache.cpu().view(torch.uint8), wanted)


def test_slots_past_2_to_31_elements(device: str) -> None:
    # 2^31 bytes are slot 2^24 of rows of 128. The memory is only touched where rows are written.
    far, cache = 2**24, torch.empty(2**20 + 1, 16, 1, 128, dtype=torch.int8, device=device)
    flat = cache.view(-1, 128)
    flat[:16] = 0  # where the far rows would land, were 2^31 elements taken off
    slots = torch.tensor([far + 15, 3, -1, far], device=device)
    rows = torch.randint(1, 100, (4, 128), dtype=torch.int8).to(device)
    scatter_rows(rows, slots, cache)
    assert torch.equal(flat[slots[[0, 1, 3]]], rows[[0, 1, 3]])
    assert not flat[[0, 15]].any()


def test_bad_calls_say_what_to_do(device: str) -> None:
    rows, cache = torch.ones(3, 64, device=device), torch.zeros(4, 16, 1, 64, device=device)
    slots = torch.arange(3, device=device)
    with pytest.raises(ContractError, match=r"an int64 slot_mapping \[3\] is required, got torch\.int32 \(3,\)\. Pass one"):
        scatter_rows(rows, slots.int(), cache)
    with pytest.raises(
        ContractError, match=r"a contiguous cache \[blocks, block_size, 1, W\] is required, got \(16, 4, 1, 64\)"
    ):
        scatter_rows(rows, slots, cache.transpose(0, 1))
    with pytest.raises(ContractError, match=r"rows \[T, 64\] of torch\.float32 is required, got \(3, 64\) of torch\.float16"):
        scatter_rows(rows.half(), slots, cache)
    with pytest.raises(ContractError, match=r"float8_e4m3fn is required, got torch\.uint8\. View bytes as int8"):
        scatter_rows(rows.byte(), slots, cache.byte())
