"""Packing rows of the paged cache: the keys and values of every request, one after another.

Ascend op: ``torch_npu.npu_gather_pa_kv_cache``, whose ``block_tables`` is ``block_table`` here as in all our ops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.contract import EXACT, OpCase, OpContract, register, require
from npu_ops.reference import gather_kv_cache as reference
from npu_ops.scatter_kv_cache import validate_caches

OP = "gather_kv_cache"


def gather_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
) -> None:
    """Copy the tokens ``seq_offset[b] .. seq_offset[b] + seq_lens[b] - 1`` of each request ``b`` into packed tensors.

    Args:
        key_cache: [blocks, block_size, N_kv, D] bf16, fp16 or fp32; contiguous.
        value_cache: [blocks, block_size, N_kv, D_v], the dtype of ``key_cache``; contiguous.
        block_table: int32 [>= B, >= blocks of the last token read]; rows may be strided.
        seq_lens: int32 [B], tokens to copy of each request; 0 is fine.
        key: [R, N_kv, D] with R >= sum(seq_lens), the dtype of ``key_cache``; contiguous; written in place. Rows past
            the sum are left as they are.
        value: [R, N_kv, D_v], likewise.
        seq_offset: int32 [B], the first token to copy of each request; 0 if None.

    Raises:
        ContractError: if a shape or dtype does not fit, or a cache or result is not contiguous. Lengths, offsets and
            block ids are device data and are not checked.
    """
    validate_caches(OP, key_cache, value_cache)
    for rows, cache, name in ((key, key_cache, "key"), (value, value_cache, "value")):
        right = rows.dim() == 3 and rows.shape[1:] == cache.shape[2:] and rows.dtype == cache.dtype
        require(right and rows.is_contiguous(), OP,
                f"a contiguous {name} [R, {cache.shape[2]}, {cache.shape[3]}] of {cache.dtype}",
                f"{tuple(rows.shape)} of {rows.dtype} with strides {rows.stride()}",
                "Allocate the packed rows like those of the cache.")  # fmt: skip
    require(key.shape[0] == value.shape[0], OP, "as many key rows as value rows",
            f"{key.shape[0]} and {value.shape[0]}", "Allocate both for the same tokens.")  # fmt: skip
    count = seq_lens.shape[0] if seq_lens.dim() == 1 else -1
    require(count >= 0 and seq_lens.dtype == torch.int32, OP, "int32 seq_lens [B]",
            f"{seq_lens.dtype} {tuple(seq_lens.shape)}", "Pass the device copy of the lengths.")  # fmt: skip
    right = block_table.dtype == torch.int32 and block_table.dim() == 2 and block_table.shape[0] >= count
    require(right and (block_table.shape[1] < 2 or block_table.stride(1) == 1), OP,
            f"an int32 block_table of at least {count} rows, each contiguous,",
            f"{block_table.dtype} {tuple(block_table.shape)} with strides {block_table.stride()}",
            "Pass the block table of the same requests.")  # fmt: skip
    if seq_offset is not None:
        require(seq_offset.dtype == torch.int32 and seq_offset.shape == (count,), OP, f"an int32 seq_offset [{count}]",
                f"{seq_offset.dtype} {tuple(seq_offset.shape)}", "Pass one offset to a request, or None.")  # fmt: skip
    _contract.op(key_cache, value_cache, block_table, seq_lens, key, value, seq_offset=seq_offset)


# (offset, tokens) of each request, then N_kv, D, D_v, block size, and spare rows of the result.
_SHAPES = {
    "none": ([(0, 0), (5, 0)], 2, 64, 64, 16, 0),
    "one": ([(0, 1)], 1, 80, 80, 16, 0),
    "edges": ([(0, 16), (0, 17), (15, 1), (15, 2), (16, 16)], 2, 96, 96, 16, 0),
    "holes": ([(0, 0), (3, 130), (0, 0), (127, 2), (0, 0)], 1, 128, 128, 128, 3),
    "latent": ([(0, 65), (10, 48), (64, 64)], 1, 512, 64, 64, 1),
}


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """Shuffled blocks; cache rows that belong to no request hold NaN, and spare columns of the table name block 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, (requests, heads, dim, value_dim, block_size, spare) in _SHAPES.items():
        counts = [math.ceil((offset + length) / block_size) for offset, length in requests]
        ids = torch.split((torch.randperm(sum(counts), generator=generator) + 1).to(torch.int32), counts)
        table = torch.zeros(len(requests), max(counts) + 2, dtype=torch.int32)
        for row, blocks in zip(table, ids, strict=True):
            row[: len(blocks)] = blocks
        caches, results = [], []
        for width in (dim, value_dim):
            cache = torch.randn(sum(counts) + 1, block_size, heads, width, generator=generator).to(dtype)
            cache[0] = math.nan
            caches.append(cache.to(device))
            rows = sum(length for _, length in requests) + spare
            results.append(torch.full((rows, heads, width), -1.0, dtype=dtype, device=device))
        offsets, lens = (torch.tensor(part, dtype=torch.int32, device=device) for part in zip(*requests, strict=True))
        yield OpCase(name, (*caches, table.to(device), lens, *results), {"seq_offset": offsets})
        if name == "edges":
            fresh = (torch.full_like(result, -1.0) for result in results)
            yield OpCase("no-offset", (*caches, table.to(device), lens, *fresh))


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor(a!) key,"
        " Tensor(b!) value, *, Tensor? seq_offset=None) -> ()",
        reference=reference.gather_kv_cache,
        fake=lambda key_cache, value_cache, block_table, seq_lens, key, value, *, seq_offset=None: None,
        cases=_cases,
        tolerance=EXACT,
    )
)
