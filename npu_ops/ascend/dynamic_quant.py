"""npu_ops.dynamic_quant on Ascend: torch_npu.npu_dynamic_quant, written from its documents and not yet run on an NPU."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from npu_ops import virtual_npu
from npu_ops.reference import dynamic_quant as reference


def dynamic_quant(input: Tensor) -> tuple[Tensor, Tensor]:
    """See npu_ops.dynamic_quant.dynamic_quant.

    CANN takes 16-bit types of at least two dims only; what a row of zeros gives its document does not say, so it is set here.
    """
    if input.dtype == torch.float32 or input.numel() == 0 or input.dim() < 2:
        return virtual_npu.in_one_piece(reference.dynamic_quant, input)
    quantised, scale = torch_npu.npu_dynamic_quant(input.contiguous())
    empty = scale == 0
    return quantised.masked_fill(empty[..., None], 0), scale
