"""Rotary position embedding (Su et al., 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding").

Ascend op: ``torch_npu.npu_rotary_mul``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.contract import ELEMENTWISE, OpCase, OpContract, register, require
from npu_ops.reference import rotary as reference

OP = "rotary"
MODES = ("half", "interleave")
# CANN rotates fewer than 896 dims.
MAX_DIM = 894


def rotary(input: Tensor, cos: Tensor, sin: Tensor, *, rotary_mode: str = "half") -> Tensor:
    """Rotate the first R dims of every head by its token's angles; the other D - R dims pass through.

    Pair ``i`` becomes ``(x cos_i - y sin_i, y cos_i + x sin_i)``. With ``rotary_mode`` "half" (GPT-NeoX) the pair is
    dims ``i`` and ``i + R/2``, with "interleave" (GPT-J) dims ``2i`` and ``2i + 1``.

    Args:
        input: [T, N, D] bf16, fp16 or fp32; any strides.
        cos: [T, R/2] with 0 < R <= D and R < 896, the dtype of ``input`` or fp32; any strides.
        sin: the shape and dtype of ``cos``; any strides.
        rotary_mode: "half" or "interleave".

    Returns:
        [T, N, D], the dtype of ``input``; computed in fp32 and rounded once.

    Raises:
        ContractError: if a shape or dtype does not fit, or the mode is unknown.
    """
    require(input.dim() == 3 and input.dtype in ELEMENTWISE, OP, "an input [T, N, D] in bf16, fp16 or fp32",
            f"{tuple(input.shape)} in {input.dtype}", "Pack the tokens, and view the heads apart.")  # fmt: skip
    limit = min(input.shape[2], MAX_DIM)
    require(cos.dim() == 2 and cos.shape[0] == input.shape[0] and 0 < 2 * cos.shape[1] <= limit, OP,
            f"a cos [{input.shape[0]}, R/2] with R at most {limit}", tuple(cos.shape),
            "Take the rows of the tokens' positions, one column to each rotated pair.")  # fmt: skip
    require(cos.shape == sin.shape and cos.dtype == sin.dtype and cos.dtype in (input.dtype, torch.float32), OP,
            f"cos and sin of one shape in {input.dtype} or torch.float32",
            f"{tuple(cos.shape)} in {cos.dtype} and {tuple(sin.shape)} in {sin.dtype}",
            "Take both from the same cached table.")  # fmt: skip
    require(rotary_mode in MODES, OP, f"a rotary_mode of {MODES}", repr(rotary_mode),
            'Use "half" for GPT-NeoX style, "interleave" for GPT-J style.')  # fmt: skip
    return _contract.op(input, cos, sin, rotary_mode=rotary_mode)  # type: ignore[no-any-return]


# T, N, D, R.
_SHAPES = {
    "none": (0, 2, 64, 64),
    "one": (1, 1, 64, 64),
    "full": (17, 4, 128, 128),
    "partial": (5, 3, 192, 64),
    "odd": (9, 2, 81, 50),
}


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """Both modes with angles in fp32 and in the input's dtype; positions reach past 1,048,576."""
    generator = torch.Generator().manual_seed(seed)
    for name, (tokens, heads, dim, rotated) in _SHAPES.items():
        # A slice of a wider row, as MLA's rotated part of the query is.
        x = torch.randn(tokens, heads, dim + 16, generator=generator).to(dtype).to(device)[..., 16:]
        position = torch.randint(0, 2_000_000, (tokens, 1), generator=generator).double()
        angle = position * 10000.0 ** (-torch.arange(0, rotated, 2).double() / rotated)
        for mode in MODES:
            for kind in sorted({torch.float32, dtype}, key=str):
                cos, sin = (part.to(kind).to(device) for part in (angle.cos(), angle.sin()))
                yield OpCase(f"{name}-{mode}-{str(kind)[6:]}", (x, cos, sin), {"rotary_mode": mode})


def _fake(input: Tensor, cos: Tensor, sin: Tensor, *, rotary_mode: str = "half") -> Tensor:
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema='(Tensor input, Tensor cos, Tensor sin, *, str rotary_mode="half") -> Tensor',
        reference=reference.rotary,
        fake=_fake,
        cases=_cases,
        tolerance=ELEMENTWISE,
    )
)
