"""RMS normalisation, alone and fused with the residual sum (Zhang and Sennrich, 2019, "Root Mean Square Layer Normalization").

Ascend ops: ``torch_npu.npu_rms_norm`` and ``torch_npu.npu_add_rms_norm``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.contract import ELEMENTWISE, OpCase, OpContract, register, require
from npu_ops.reference import rms_norm as reference


def rms_norm(input: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Divide each row by its root mean square and scale it: ``input / sqrt(mean(input**2) + epsilon) * gamma``.

    Args:
        input: [..., D], bf16, fp16 or fp32; any strides.
        gamma: [D], the dtype of ``input`` or fp32.
        epsilon: added to the mean square, before the root.

    Returns:
        [..., D], the dtype of ``input``; computed in fp32 and rounded once.

    Raises:
        ContractError: if ``gamma`` is not one row of ``input``.
    """
    _validate("rms_norm", input, gamma)
    return _rms_norm.op(input, gamma, epsilon=epsilon)  # type: ignore[no-any-return]


def add_rms_norm(input: Tensor, residual: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Add the residual stream, then normalise: ``(rms_norm(input + residual), input + residual)``.

    Args:
        input: [..., D], bf16, fp16 or fp32; any strides.
        residual: the shape and dtype of ``input``.
        gamma: [D], the dtype of ``input`` or fp32.
        epsilon: added to the mean square, before the root.

    Returns:
        The normalised rows and the new residual, both like ``input``. The sum is taken in fp32, and the rows are
        normalised from it before it is rounded.

    Raises:
        ContractError: if the shapes or dtypes do not fit.
    """
    _validate("add_rms_norm", input, gamma)
    same = residual.shape == input.shape and residual.dtype == input.dtype
    require(
        same,
        "add_rms_norm",
        f"a residual of shape {tuple(input.shape)} and {input.dtype}",
        f"{tuple(residual.shape)} and {residual.dtype}",
        "Pass the residual stream of the same layer.",
    )
    return _add_rms_norm.op(input, residual, gamma, epsilon=epsilon)  # type: ignore[no-any-return]


def _validate(op: str, input: Tensor, gamma: Tensor) -> None:
    require(input.dtype in ELEMENTWISE, op, "bf16, fp16 or fp32 input", input.dtype, "Cast the input.")
    require(
        gamma.shape == input.shape[-1:],
        op,
        f"gamma of shape {tuple(input.shape[-1:])}",
        tuple(gamma.shape),
        "Pass the layer's own weight.",
    )
    require(
        gamma.dtype in (input.dtype, torch.float32),
        op,
        f"gamma of {input.dtype} or torch.float32",
        gamma.dtype,
        "Cast the weight once, when it is loaded.",
    )


_SHAPES = {"empty": (0, 64), "one": (1, 1), "odd": (7, 80), "wide": (3, 5120), "heads": (5, 3, 96)}


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    generator = torch.Generator().manual_seed(seed)
    for name, shape in _SHAPES.items():
        x = torch.randn(shape, generator=generator).to(dtype).to(device)
        gamma = torch.randn(shape[-1:], generator=generator).to(dtype).to(device)
        yield OpCase(name, (x, gamma), {"epsilon": 1e-5})
    wide = torch.randn((6, 256), generator=generator).to(dtype).to(device)
    yield OpCase("strided", (wide[:, 64:192], torch.ones(128, device=device)), {"epsilon": 1e-6})
    yield OpCase("zeros", (torch.zeros_like(wide), torch.ones(256, dtype=dtype, device=device)), {"epsilon": 1e-6})
    yield OpCase("large", (wide * 100, torch.ones(256, dtype=dtype, device=device)), {"epsilon": 1e-6})


def _add_cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    generator = torch.Generator().manual_seed(seed + 1)
    for case in _cases(device, dtype, seed):
        x, gamma = case.args
        residual = torch.randn(x.shape, generator=generator).to(dtype).to(device)
        yield OpCase(case.name, (x, residual, gamma), case.kwargs)


def _fake(input: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)


_rms_norm = register(
    OpContract(
        name="rms_norm",
        stem="rms_norm",
        schema="(Tensor input, Tensor gamma, *, float epsilon=1e-6) -> Tensor",
        reference=reference.rms_norm,
        fake=_fake,
        cases=_cases,
        tolerance=ELEMENTWISE,
    )
)


def _add_fake(input: Tensor, residual: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    like = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    return like, torch.empty_like(like)


_add_rms_norm = register(
    OpContract(
        name="add_rms_norm",
        stem="rms_norm",
        schema="(Tensor input, Tensor residual, Tensor gamma, *, float epsilon=1e-6) -> (Tensor, Tensor)",
        reference=reference.add_rms_norm,
        fake=_add_fake,
        cases=_add_cases,
        tolerance=ELEMENTWISE,
    )
)
