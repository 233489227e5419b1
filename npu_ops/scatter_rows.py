"""Writing new rows of any type into a paged cache: the indexer's keys and their scales, packed rows of a sparse cache.

Ascend op: ``torch_npu.npu_scatter_nd_update_``, which takes the cache as rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.contract import EXACT, OpCase, OpContract, register, require
from npu_ops.reference import scatter_rows as reference

OP = "scatter_rows"
DTYPES = (*EXACT, torch.int8, torch.float8_e4m3fn)


def scatter_rows(rows: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    """Copy row ``t`` to slot ``s = slot_mapping[t]``: to ``cache[s // block_size, s % block_size, 0]``.

    Args:
        rows: [T, W] bf16, fp16, fp32, int8 or float8_e4m3fn; any strides.
        slot_mapping: int64 [T]. -1 marks a padding row, which is never written; all others are distinct and below
            blocks * block_size. Offsets are right past 2^31 elements.
        cache: [blocks, block_size, 1, W], the dtype of ``rows``; contiguous; written in place.

    Raises:
        ContractError: if a shape or dtype does not fit, or the cache is not contiguous. The slots themselves are device
            data and are not checked.
    """
    require(cache.dim() == 4 and cache.shape[2] == 1 and cache.is_contiguous(), OP,
            "a contiguous cache [blocks, block_size, 1, W]", f"{tuple(cache.shape)} with strides {cache.stride()}",
            "View the cache in blocks.")  # fmt: skip
    require(cache.dtype in DTYPES, OP, "a cache in bf16, fp16, fp32, int8 or float8_e4m3fn", cache.dtype,
            "View bytes as int8.")  # fmt: skip
    require(rows.dim() == 2 and rows.shape[1] == cache.shape[3] and rows.dtype == cache.dtype, OP,
            f"rows [T, {cache.shape[3]}] of {cache.dtype}", f"{tuple(rows.shape)} of {rows.dtype}",
            "Pass the rows in the dtype of the cache.")  # fmt: skip
    require(slot_mapping.shape == rows.shape[:1] and slot_mapping.dtype == torch.int64, OP,
            f"an int64 slot_mapping [{rows.shape[0]}]", f"{slot_mapping.dtype} {tuple(slot_mapping.shape)}",
            "Pass one slot to a token, -1 for padding.")  # fmt: skip
    _contract.op(rows, slot_mapping, cache)


# T, W, block size, and a dtype where it is not that of the model.
_SHAPES: dict[str, tuple[int, int, int, torch.dtype | None]] = {
    "none": (0, 128, 16, None),
    "one": (1, 128, 128, None),
    "prefill": (130, 128, 128, None),
    "scales": (37, 1, 16, torch.float16),
    "int8": (33, 128, 16, torch.int8),
    "odd": (37, 656, 48, torch.int8),
}


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """Slots in random order; every fifth row is padding, and holds NaN where its type has one."""
    generator = torch.Generator().manual_seed(seed)
    for name, (tokens, width, block_size, own) in _SHAPES.items():
        kind = own or dtype
        blocks = tokens // block_size + 2

        def numbers(*size: int, kind: torch.dtype = kind) -> Tensor:
            return torch.randint(-100, 100, size, generator=generator).float().to(kind)

        wide, cache = numbers(tokens, width + 16), numbers(blocks, block_size, 1, width)
        slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
        slots[4::5] = -1
        if kind.is_floating_point:
            wide[4::5] = math.nan
        rows = wide.to(device)[:, 16:] if tokens else numbers(0, width).to(device)  # opcheck cannot copy an empty view
        yield OpCase(name, (rows, slots.to(device), cache.to(device)))
        if name == "odd":
            yield OpCase("padding", (rows, torch.full_like(slots, -1).to(device), cache.to(device, copy=True)))


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor rows, Tensor slot_mapping, Tensor(a!) cache) -> ()",
        reference=reference.scatter_rows,
        fake=lambda rows, slot_mapping, cache: None,
        cases=_cases,
        tolerance=EXACT,
    )
)
