from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_ops.contract import EXACT, ContractError
from npu_ops.scatter_kv_cache import scatter_kv_cache

OPS = ("scatter_kv_cache",)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


@given(data=st.data(), block_size=st.sampled_from([1, 16, 48, 128]), blocks=st.integers(1, 5))
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_matches_a_loop_over_tokens(device: str, dtype: torch.dtype, data: st.DataObject, block_size: int, blocks: int) -> None:
    slots = data.draw(st.lists(st.integers(0, blocks * block_size - 1), unique=True, max_size=9))
    slots = data.draw(st.permutations(slots + [-1] * data.draw(st.integers(0, 3))))
    key, value = torch.randn(2, len(slots), 2, 8).to(dtype)
    caches = [torch.randn(blocks, block_size, 2, 8).to(dtype) for _ in range(2)]
    wanted = [cache.clone() for cache in caches]
    for row, slot in enumerate(slots):
        if slot != -1:
            for cache, rows in zip(wanted, (key, value), strict=True):
                cache[slot // block_size][slot % block_size] = rows[row]
    caches = [cache.to(device) for cache in caches]
    mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    scatter_kv_cache(key.to(device), value.to(device), *caches, mapping)
    for cache, right in zip(caches, wanted, strict=True):
        assert torch.equal(cache.cpu(), right)


def test_slots_past_2_to_31_elements(device: str) -> None:
    # 2^31 elements are slot 131072 of rows of 64 * 256. The memory is only touched where rows are written.
    row, last = (64, 256), 131072 + 15
    key_cache = torch.empty(8193, 16, *row, dtype=torch.bfloat16, device=device)
    value_cache = torch.empty(8193, 16, 64, 8, dtype=torch.bfloat16, device=device)
    slots = torch.tensor([last, 3, -1, 131072], device=device)
    key_cache.view(-1, *row)[3 : last - 131072 + 1] = 0  # where `last` would land, were 2^31 elements taken off
    key, value = torch.randn(4, *row).bfloat16().to(device), torch.randn(4, 64, 8).bfloat16().to(device)
    scatter_kv_cache(key, value, key_cache, value_cache, slots)
    flat = key_cache.view(-1, *row)
    assert flat[last].data_ptr() - flat.data_ptr() > 2 * 2**31
    assert torch.equal(flat[slots[[0, 1, 3]]], key[[0, 1, 3]])
    assert torch.equal(value_cache.view(-1, 64, 8)[slots[[0, 1, 3]]], value[[0, 1, 3]])
    assert not flat[last - 131072].any()


def test_bad_calls_say_what_to_do(device: str) -> None:
    rows, cache = torch.ones(3, 2, 64, device=device), torch.zeros(4, 16, 2, 64, device=device)
    slots = torch.arange(3, device=device)
    with pytest.raises(
        ContractError, match=r"an int64 slot_mapping \[3\] is required, got torch\.int32 \(3,\)\. Pass one slot"
    ):
        scatter_kv_cache(rows, rows, cache, cache.clone(), slots.int())
    with pytest.raises(ContractError, match=r"an int64 slot_mapping \[3\] is required, got torch\.int64 \(2,\)"):
        scatter_kv_cache(rows, rows, cache, cache.clone(), slots[:2])
    with pytest.raises(ContractError, match=r"contiguous caches is required, got strides .*Keep K and V in separate"):
        scatter_kv_cache(rows, rows, torch.zeros(4, 2, 16, 64, device=device).transpose(1, 2), cache, slots)
    with pytest.raises(
        ContractError, match=r"a key \[T, 2, 64\] of torch\.float32 is required, got \(3, 2, 64\) of torch\.float16"
    ):
        scatter_kv_cache(rows.half(), rows, cache, cache.clone(), slots)
    with pytest.raises(ContractError, match=r"a value \[T, 2, 64\] of torch\.float32 is required, got \(3, 1, 64\)"):
        scatter_kv_cache(rows, rows[:, :1], cache, cache.clone(), slots)
    with pytest.raises(ContractError, match=r"as many key rows as value rows is required, got 3 and 2"):
        scatter_kv_cache(rows, rows[:2], cache, cache.clone(), slots)
    with pytest.raises(ContractError, match=r"caches \[blocks, block_size, N_kv, D\] that agree in all but D is required"):
        scatter_kv_cache(rows, rows, cache, cache[:2], slots)
    with pytest.raises(
        ContractError, match=r"caches of one dtype, bf16, fp16 or fp32, is required, got torch\.int8 and torch\.int8"
    ):
        scatter_kv_cache(rows, rows, cache.to(torch.int8), cache.to(torch.int8), slots)
