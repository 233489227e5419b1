"""Writing the new tokens' keys and values into the paged cache.

Ascend op: ``torch_npu.npu_scatter_pa_kv_cache`` with cache mode Norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.contract import EXACT, OpCase, OpContract, register, require
from npu_ops.reference import scatter_kv_cache as reference

OP = "scatter_kv_cache"


def scatter_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Copy row ``t`` of key and value to slot ``s = slot_mapping[t]``: to ``cache[s // block_size, s % block_size]``.

    Args:
        key: [T, N_kv, D] bf16, fp16 or fp32; any strides.
        value: [T, N_kv, D_v], the dtype of ``key``; any strides.
        key_cache: [blocks, block_size, N_kv, D], the dtype of ``key``; contiguous; written in place.
        value_cache: [blocks, block_size, N_kv, D_v], the dtype of ``key``; contiguous; written in place.
        slot_mapping: int64 [T]. -1 marks a padding row, which is never written; all others are distinct and below
            blocks * block_size. Offsets are right past 2^31 elements.

    Raises:
        ContractError: if a shape or dtype does not fit, or a cache is not contiguous. The slots themselves are device
            data and are not checked.
    """
    validate_caches(OP, key_cache, value_cache)
    for rows, cache, name in ((key, key_cache, "key"), (value, value_cache, "value")):
        require(rows.dim() == 3 and rows.shape[1:] == cache.shape[2:] and rows.dtype == cache.dtype, OP,
                f"a {name} [T, {cache.shape[2]}, {cache.shape[3]}] of {cache.dtype}",
                f"{tuple(rows.shape)} of {rows.dtype}",
                "Pass the rows of this rank's KV heads in the dtype of the cache.")  # fmt: skip
    require(key.shape[0] == value.shape[0], OP, "as many key rows as value rows",
            f"{key.shape[0]} and {value.shape[0]}", "Pass key and value of the same tokens.")  # fmt: skip
    require(slot_mapping.shape == key.shape[:1] and slot_mapping.dtype == torch.int64, OP,
            f"an int64 slot_mapping [{key.shape[0]}]", f"{slot_mapping.dtype} {tuple(slot_mapping.shape)}",
            "Pass one slot to a token, -1 for padding.")  # fmt: skip
    _contract.op(key, value, key_cache, value_cache, slot_mapping)


def validate_caches(op: str, key_cache: Tensor, value_cache: Tensor) -> None:
    """What every op over a pair of paged caches requires of them."""
    require(key_cache.dim() == 4 and value_cache.dim() == 4 and key_cache.shape[:3] == value_cache.shape[:3], op,
            "caches [blocks, block_size, N_kv, D] that agree in all but D",
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}", "View both caches in blocks.")  # fmt: skip
    require(key_cache.dtype in EXACT and value_cache.dtype == key_cache.dtype, op,
            "caches of one dtype, bf16, fp16 or fp32,", f"{key_cache.dtype} and {value_cache.dtype}",
            "Allocate both caches alike.")  # fmt: skip
    require(key_cache.is_contiguous() and value_cache.is_contiguous(), op, "contiguous caches",
            f"strides {key_cache.stride()} and {value_cache.stride()}",
            "Keep K and V in separate contiguous tensors.")  # fmt: skip


# T, N_kv, D, D_v, block size.
_SHAPES = {
    "none": (0, 2, 64, 64, 16),
    "one": (1, 1, 80, 80, 16),
    "prefill": (130, 2, 128, 128, 128),
    "odd": (37, 3, 96, 96, 48),
    "latent": (19, 1, 512, 64, 64),  # MLA: the compressed part and the rotated part of a key have different widths
}


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """Slots in random order; every fifth row is padding and holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    for name, (tokens, heads, dim, value_dim, block_size) in _SHAPES.items():
        blocks = tokens // block_size + 2

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        caches = [normal(blocks, block_size, heads, width).to(device) for width in (dim, value_dim)]
        # One wide projection, as models compute it: key and value are strided views.
        both = normal(tokens, heads, dim + value_dim)
        slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
        slots[4::5], both[4::5] = -1, math.nan
        rows = list(both.to(device).tensor_split((dim,), -1))
        if not tokens:  # opcheck cannot copy an empty view
            rows = [part.clone(memory_format=torch.contiguous_format) for part in rows]
        yield OpCase(name, (*rows, *caches, slots.to(device)))
        if name == "odd":
            padding = torch.full((tokens,), -1, device=device)
            yield OpCase("padding", (*rows, *(cache.clone() for cache in caches), padding))


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping) -> ()",
        reference=reference.scatter_kv_cache,
        fake=lambda key, value, key_cache, value_cache, slot_mapping: None,
        cases=_cases,
        tolerance=EXACT,
    )
)
