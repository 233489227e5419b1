"""Values and rules of npu_dynamic_quant."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_ops.reference import dynamic_quant
from npu_ops.virtual_npu.rules import rule, unless
from npu_ops.virtual_npu.values import refuse, value

OP = "npu_dynamic_quant"
DOC = "torch_npu doc of npu_dynamic_quant"


@value("npu::npu_dynamic_quant")
def npu_dynamic_quant(input: Tensor, *, quant_mode: str = "pertoken", **others: Any) -> tuple[Tensor, Tensor]:
    """int8 rows of input [..., D] and their scales fp32 [...]."""
    dst_type = others.pop("dst_type", None)
    refuse(OP, **others)
    if quant_mode != "pertoken" or dst_type not in (None, torch.int8):
        raise NotImplementedError(f"{OP}: the virtual NPU quantises per token to int8, got {quant_mode!r} and {dst_type}")
    return dynamic_quant.dynamic_quant(input)


@rule("a contiguous fp16 or bf16 input of at least two dims", DOC, OP)
def _input(c: Any) -> object:
    right = c.input.dtype in (torch.float16, torch.bfloat16) and c.input.dim() >= 2 and c.input.is_contiguous()
    return unless(right, f"{c.input.dtype} {list(c.input.shape)}, strides {c.input.stride()}")
