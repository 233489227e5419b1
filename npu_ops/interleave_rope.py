"""Rotary position embedding of MLA's rope part: pairs of neighbours rotated, results left as two halves.

Ascend op: ``torch_npu.npu_interleave_rope``. DeepSeek's weights pair neighbours (``rotary``'s mode "interleave"). CANN's op
leaves the first element of every pair in the first half and the second in the second half. Queries and keys are permuted
alike, so their products are those of the plain rotation; a key so stored must not meet a query rotated by another op.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.contract import ELEMENTWISE, OpCase, OpContract, register, require
from npu_ops.reference import interleave_rope as reference

OP = "interleave_rope"
# CANN rotates exactly so many dims.
ROPE = 64


def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs ``(x[2i], x[2i + 1])`` of every head by angle ``i`` of its token, into places ``i`` and ``32 + i``.

    Args:
        x: [T, N, 64] bf16, fp16 or fp32; any strides.
        cos: [T, 32], the dtype of ``x``; any strides. A factor on cos and sin (YaRN's magnitude) scales the result.
        sin: the shape and dtype of ``cos``; any strides.

    Returns:
        [T, N, 64] like ``x``; computed in fp32 and rounded once.

    Raises:
        ContractError: if a shape or dtype does not fit.
    """
    require(x.dim() == 3 and x.shape[2] == ROPE and x.dtype in ELEMENTWISE, OP, f"an x [T, N, {ROPE}] in bf16, fp16 or fp32",
            f"{tuple(x.shape)} in {x.dtype}", "Pass the rope part of each head.")  # fmt: skip
    validate_angles(OP, cos, sin, x.shape[0], x.dtype)
    return _contract.op(x, cos, sin)  # type: ignore[no-any-return]


def validate_angles(op: str, cos: Tensor, sin: Tensor, tokens: int, dtype: torch.dtype) -> None:
    """What MLA's ops require of cos and sin."""
    for name, part in (("cos", cos), ("sin", sin)):
        require(part.shape == (tokens, ROPE // 2) and part.dtype == dtype, op, f"a {name} [{tokens}, {ROPE // 2}] in {dtype}",
                f"{tuple(part.shape)} in {part.dtype}",
                "Take the rows of the tokens' positions, one column to each pair, and cast them once.")  # fmt: skip


def random_angles(tokens: int, dtype: torch.dtype, generator: torch.Generator, magnitude: float = 1.0) -> list[Tensor]:
    """cos and sin [T, 32] of positions that reach past 1,048,576, with YaRN's magnitude on both."""
    position = torch.randint(0, 2_000_000, (tokens, 1), generator=generator).double()
    angle = position * 10000.0 ** (-torch.arange(0, ROPE, 2).double() / ROPE)
    return [(part * magnitude).to(dtype) for part in (angle.cos(), angle.sin())]


# T, N.
_SHAPES = {"none": (0, 2), "no-heads": (3, 0), "one": (1, 1), "odd": (17, 3), "many-heads": (3, 128)}


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """Slices of wider heads, as MLA's queries are."""
    generator = torch.Generator().manual_seed(seed)
    for name, (tokens, heads) in _SHAPES.items():
        x = torch.randn(tokens, heads, 192, generator=generator).to(dtype).to(device)[..., 128:]
        if not x.numel():  # opcheck cannot copy an empty view
            x = x.clone(memory_format=torch.contiguous_format)
        angles = random_angles(tokens, dtype, generator, 1.0 if tokens != 17 else 1.3)
        yield OpCase(name, (x, *(part.to(device) for part in angles)))


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor x, Tensor cos, Tensor sin) -> Tensor",
        reference=reference.interleave_rope,
        fake=lambda x, cos, sin: torch.empty(x.shape, dtype=x.dtype, device=x.device),
        cases=_cases,
        tolerance=ELEMENTWISE,
    )
)
