"""npu_ops.rms_norm on Ascend: torch_npu.npu_rms_norm and npu_add_rms_norm."""

from __future__ import annotations

import torch_npu
from torch import Tensor


def rms_norm(input: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """See npu_ops.rms_norm.rms_norm."""
    normed, _ = torch_npu.npu_rms_norm(input, gamma, epsilon)
    return normed  # type: ignore[no-any-return]


def add_rms_norm(input: Tensor, residual: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """See npu_ops.rms_norm.add_rms_norm."""
    normed, _, total = torch_npu.npu_add_rms_norm(input, residual, gamma, epsilon)
    return normed, total
