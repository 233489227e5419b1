"""Semantics of npu_ops.swiglu in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def swiglu(input: Tensor) -> Tensor:
    """See npu_ops.swiglu.swiglu."""
    gate, up = input.float().chunk(2, -1)
    return (gate / (1 + (-gate).exp()) * up).to(input.dtype)
