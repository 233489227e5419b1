"""Bringing the experts' results back to their tokens, weighted and summed. Ascend op: ``torch_npu.npu_moe_token_unpermute``."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.contract import ELEMENTWISE, OpCase, OpContract, register, require
from npu_ops.reference import moe_token_unpermute as reference

OP = "moe_token_unpermute"
MAX_K = 512  # CANN's limit


def moe_token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor) -> Tensor:
    """``out[t] = sum over k of probs[t, k] * permuted_tokens[sorted_indices[t * K + k]]``.

    Args:
        permuted_tokens: [T * K, H] bf16, fp16 or fp32; any strides. Rows that no index names are not read: they may be NaN.
        sorted_indices: int32 [T * K], the row indices of moe_init_routing; -1 contributes nothing, all others are distinct.
        probs: fp32 [T, K], any strides; those of -1 may hold any number.

    Returns:
        [T, H], the dtype of ``permuted_tokens``: summed in fp32 in the order of k and rounded once; 0 where nothing
        contributes.

    Raises:
        ContractError: if a shape or dtype does not fit. The indices are device data and are not checked.
    """
    require(probs.dim() == 2 and probs.dtype == torch.float32 and 1 <= probs.shape[1] <= MAX_K, OP,
            f"fp32 probs [T, K] with a K of 1 to {MAX_K}", f"{probs.dtype} {tuple(probs.shape)}",
            "Pass the weights of moe_gating_top_k.")  # fmt: skip
    rows = permuted_tokens
    require(rows.dim() == 2 and rows.shape[0] == probs.numel() and rows.dtype in ELEMENTWISE, OP,
            f"rows [{probs.numel()}, H] in bf16, fp16 or fp32", f"{rows.dtype} {tuple(rows.shape)}",
            "Pass a row for each choice of each token, those of other ranks included.")  # fmt: skip
    require(sorted_indices.shape == (probs.numel(),) and sorted_indices.dtype == torch.int32, OP,
            f"int32 sorted_indices [{probs.numel()}]", f"{sorted_indices.dtype} {tuple(sorted_indices.shape)}",
            "Pass the row indices of moe_init_routing for the same tokens.")  # fmt: skip
    return _contract.op(permuted_tokens, sorted_indices, probs)  # type: ignore[no-any-return]


# T, K, H, and the share of choices whose expert is active.
_SHAPES = {
    "none": (0, 4, 32, 1.0),
    "one": (1, 1, 1, 1.0),
    "odd": (13, 3, 77, 1.0),
    "wide": (5, 8, 7168, 1.0),
    "rank": (40, 8, 96, 0.25),
    "few": (9, 2, 64, 0.1),
    "inactive": (6, 4, 48, 0.0),
}


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """Rows that no index names hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    for name, (tokens, k, width, share) in _SHAPES.items():
        choices = tokens * k
        active = torch.rand(choices, generator=generator) < share
        indices = torch.full((choices,), -1, dtype=torch.int32)
        indices[active] = torch.randperm(int(active.sum()), generator=generator).int()
        rows = torch.randn(choices, width, generator=generator)
        rows[int(active.sum()) :] = math.nan
        probs = torch.rand(tokens, k, generator=generator)
        yield OpCase(name, (rows.to(dtype).to(device), indices.to(device), probs.to(device)))


def _fake(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor) -> Tensor:
    shape = (probs.shape[0], permuted_tokens.shape[1])
    return torch.empty(shape, dtype=permuted_tokens.dtype, device=permuted_tokens.device)


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor permuted_tokens, Tensor sorted_indices, Tensor probs) -> Tensor",
        reference=reference.moe_token_unpermute,
        fake=_fake,
        cases=_cases,
        tolerance=ELEMENTWISE,
    )
)
