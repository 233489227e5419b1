"""Gated activation SwiGLU (Shazeer, 2020, "GLU Variants Improve Transformer"), without the projections around it.

Ascend op: ``torch_npu.npu_swiglu``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.contract import ELEMENTWISE, OpCase, OpContract, register, require
from npu_ops.reference import swiglu as reference

OP = "swiglu"


def swiglu(input: Tensor) -> Tensor:
    """Multiply the second half of each row by ``silu(first half)``, where ``silu(x) = x / (1 + exp(-x))``.

    Args:
        input: [..., 2H] bf16, fp16 or fp32; any strides.

    Returns:
        [..., H], the dtype of ``input``; computed in fp32 and rounded once.

    Raises:
        ContractError: if the last dim is odd or the dtype is not one of these.
    """
    require(input.dtype in ELEMENTWISE, OP, "bf16, fp16 or fp32 input", input.dtype, "Cast the input.")
    require(input.dim() > 0 and input.shape[-1] % 2 == 0, OP, "an input [..., 2H]", tuple(input.shape),
            "Join gate and up projection in one row, the gate first.")  # fmt: skip
    return _contract.op(input)  # type: ignore[no-any-return]


_SHAPES = {"none": (0, 64), "one": (1, 2), "flat": (32,), "odd": (7, 154), "wide": (3, 10240), "experts": (2, 3, 192)}


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    generator = torch.Generator().manual_seed(seed)
    for name, shape in _SHAPES.items():
        yield OpCase(name, (torch.randn(shape, generator=generator).to(dtype).to(device),))
    wide = torch.randn((6, 256), generator=generator).to(dtype).to(device)
    yield OpCase("strided", (wide[:, 64:192],))
    # exp(-x) overflows fp32 here: silu(-200) is 0, silu(200) is 200.
    yield OpCase("saturated", (torch.tensor([[-200.0, 200.0, 0.0, 1.0, 1.0, 1.0]], dtype=dtype, device=device),))


def _fake(input: Tensor) -> Tensor:
    return torch.empty((*input.shape[:-1], input.shape[-1] // 2), dtype=input.dtype, device=input.device)


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor input) -> Tensor",
        reference=reference.swiglu,
        fake=_fake,
        cases=_cases,
        tolerance=ELEMENTWISE,
    )
)
