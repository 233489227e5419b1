from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_ops.contract import EXACT, ContractError
from npu_ops.gather_kv_cache import gather_kv_cache
from npu_ops.scatter_kv_cache import scatter_kv_cache

OPS = ("gather_kv_cache",)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


requests = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=6)


@given(requests=requests, block_size=st.sampled_from([1, 16, 48, 128]), spare=st.integers(0, 3))
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_matches_a_loop_over_tokens(
    device: str, dtype: torch.dtype, requests: list[tuple[int, int]], block_size: int, spare: int
) -> None:
    columns = max(-(-sum(request) // block_size) for request in requests) + 1
    table = torch.randperm(len(requests) * columns).view(len(requests), columns).int()
    caches = [torch.randn(table.numel(), block_size, 2, 8).to(dtype) for _ in range(2)]
    total = sum(length for _, length in requests)
    wanted = [torch.full((total + spare, 2, 8), -1.0, dtype=dtype) for _ in range(2)]
    row = 0
    for blocks, (offset, length) in zip(table.tolist(), requests, strict=True):
        for position in range(offset, offset + length):
            for cache, rows in zip(caches, wanted, strict=True):
                rows[row] = cache[blocks[position // block_size], position % block_size]
            row += 1
    results = [torch.full_like(rows, -1.0, device=device) for rows in wanted]
    offsets, lens = (torch.tensor(part, dtype=torch.int32, device=device) for part in zip(*requests, strict=True))
    gather_kv_cache(*(cache.to(device) for cache in caches), table.to(device), lens, *results, seq_offset=offsets)
    for result, right in zip(results, wanted, strict=True):
        assert torch.equal(result.cpu(), right)


def test_gather_returns_what_scatter_wrote(device: str) -> None:
    caches = [torch.zeros(8, 16, 2, 64, dtype=torch.float16, device=device) for _ in range(2)]
    rows = torch.randn(2, 50, 2, 64, device=device).half()
    table = torch.tensor([[6, 2, 1], [3, 7, 0]], dtype=torch.int32, device=device)
    token = torch.tensor([*range(30), *range(20)], device=device)
    owner = torch.tensor([0] * 30 + [1] * 20, device=device)
    scatter_kv_cache(*rows, *caches, table[owner, token // 16] * 16 + token % 16)
    out = torch.empty_like(rows)
    gather_kv_cache(*caches, table, torch.tensor([30, 20], dtype=torch.int32, device=device), *out)
    assert torch.equal(out, rows)


def test_blocks_past_2_to_31_elements(device: str) -> None:
    row = (64, 256)  # 16 rows of it to a block: 2^31 elements are block 8192
    key_cache = torch.empty(8193, 16, *row, dtype=torch.bfloat16, device=device)
    value_cache = torch.empty(8193, 16, 64, 8, dtype=torch.bfloat16, device=device)
    for cache in (key_cache, value_cache):
        cache[8192] = torch.randn(cache.shape[1:]).bfloat16()
        cache[0] = 0
    table = torch.tensor([[0, 8192]], dtype=torch.int32, device=device)
    key, value = (torch.empty(18, *cache.shape[2:], dtype=cache.dtype, device=device) for cache in (key_cache, value_cache))
    lens, offset = (torch.tensor([number], dtype=torch.int32, device=device) for number in (18, 14))
    gather_kv_cache(key_cache, value_cache, table, lens, key, value, seq_offset=offset)
    assert torch.equal(key[2:], key_cache[8192])
    assert torch.equal(value[2:], value_cache[8192])
    assert not key[:2].any()


def test_block_table_rows_past_2_to_31_entries(device: str) -> None:
    # Row 2048 of a table that is 1,048,576 wide begins at entry 2^31; only its first columns are looked at.
    table = torch.empty(2049, 1_048_576, dtype=torch.int32, device=device)[:, :1]
    table.zero_()
    table[2048] = 5
    cache = torch.arange(6.0, device=device)[:, None, None, None].expand(6, 16, 1, 8).contiguous()
    lens = torch.ones(2049, dtype=torch.int32, device=device)
    key, value = torch.empty(2, 2049, 1, 8, device=device)
    gather_kv_cache(cache, cache.clone(), table, lens, key, value)
    assert torch.equal(key[:, 0, 0].cpu(), torch.tensor([0.0] * 2048 + [5.0]))
    assert torch.equal(key, value)


def test_bad_calls_say_what_to_do(device: str) -> None:
    cache, rows = torch.zeros(4, 16, 2, 64, device=device), torch.zeros(8, 2, 64, device=device)
    table = torch.zeros(2, 2, dtype=torch.int32, device=device)
    lens = torch.tensor([4, 4], dtype=torch.int32, device=device)
    good = (cache, cache.clone(), table, lens, rows, rows.clone())

    def bad(index: int, value: torch.Tensor, offset: torch.Tensor | None = None) -> None:
        args = list(good)
        args[index] = value
        gather_kv_cache(*args, seq_offset=offset)

    with pytest.raises(ContractError, match=r"an int32 block_table of at least 2 rows.*got torch\.int64 \(2, 2\)"):
        bad(2, table.long())
    with pytest.raises(ContractError, match=r"an int32 block_table of at least 2 rows.*got torch\.int32 \(1, 2\)"):
        bad(2, table[:1])
    with pytest.raises(
        ContractError, match=r"int32 seq_lens \[B\] is required, got torch\.int64 \(2,\)\. Pass the device copy"
    ):
        bad(3, lens.long())
    with pytest.raises(
        ContractError, match=r"an int32 seq_offset \[2\] is required, got torch\.int32 \(1,\)\. Pass one offset"
    ):
        bad(3, lens, lens[:1])
    with pytest.raises(ContractError, match=r"a contiguous key \[R, 2, 64\] of torch\.float32 is required, got \(8, 2, 64\)"):
        bad(4, torch.zeros(2, 8, 64, device=device).transpose(0, 1))
    with pytest.raises(ContractError, match=r"as many key rows as value rows is required, got 8 and 7"):
        bad(5, rows[:7])
    with pytest.raises(ContractError, match=r"contiguous caches is required, got strides"):
        bad(0, torch.zeros(4, 2, 16, 64, device=device).transpose(1, 2))
