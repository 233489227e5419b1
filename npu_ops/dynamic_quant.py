"""Symmetric int8 quantisation of vectors, each by its own largest element.

Ascend op: ``torch_npu.npu_dynamic_quant``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.contract import EXACT, OpCase, OpContract, register, require
from npu_ops.reference import dynamic_quant as reference

OP = "dynamic_quant"


def dynamic_quant(input: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each row by ``scale = max|row| / 127`` and round to the nearest integer, ties to even; a row of zeros stays zero.

    Args:
        input: [..., D] bf16, fp16 or fp32, D at least 1; any strides. Finite.

    Returns:
        int8 [..., D], and the scales fp32 [...], 0 for a row of zeros.

    Raises:
        ContractError: if the dtype is not one of these, or a row has no element.
    """
    require(input.dtype in EXACT, OP, "bf16, fp16 or fp32 input", input.dtype, "Cast the input.")
    require(input.dim() > 0 and input.shape[-1] > 0, OP, "rows [..., D] with D at least 1", tuple(input.shape),
            "Quantise only what has elements.")  # fmt: skip
    return _contract.op(input)  # type: ignore[no-any-return]


_SHAPES = {"none": (0, 128), "one": (1, 1), "flat": (32,), "odd": (7, 77), "heads": (5, 4, 128), "wide": (3, 5120)}


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """Rows of very different sizes, zeros among them; and halves, which are rounded to even."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in _SHAPES.items():
        size = 10.0 ** torch.randint(-3, 4, (*shape[:-1], 1), generator=generator)
        yield OpCase(name, ((torch.randn(shape, generator=generator) * size).to(dtype).to(device),))
    wide = torch.randn(6, 256, generator=generator).to(dtype).to(device)
    yield OpCase("strided", (wide[:, 64:192],))
    rows = torch.tensor([[127.0, 0.5, 1.5, -2.5, -0.5], [0.0] * 5, [-254.0, 1.0, 3.0, 5.0, -1.0]])
    yield OpCase("ties-and-zeros", (rows.to(dtype).to(device),))


def _fake(input: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(input.shape, dtype=torch.int8, device=input.device),
        torch.empty(input.shape[:-1], dtype=torch.float32, device=input.device),
    )


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor input) -> (Tensor, Tensor)",
        reference=reference.dynamic_quant,
        fake=_fake,
        cases=_cases,
        tolerance=EXACT,
    )
)
