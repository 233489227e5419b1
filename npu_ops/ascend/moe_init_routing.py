"""npu_ops.moe_init_routing on Ascend: torch_npu.npu_moe_init_routing_v2.

Written from its documents and not yet run on an NPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_npu
from torch import Tensor


def moe_init_routing(
    x: Tensor, expert_idx: Tensor, *, expert_num: int, active_expert_range: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """See npu_ops.moe_init_routing.moe_init_routing."""
    first, last = active_expert_range
    if expert_idx.numel() == 0:
        rows = torch.empty((0, x.shape[1]), dtype=x.dtype, device=x.device)
        row_idx = torch.empty(0, dtype=torch.int32, device=x.device)
        return rows, row_idx, torch.zeros(last - first, dtype=torch.int64, device=x.device)
    rows, row_idx, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x.contiguous(), expert_idx.contiguous(), active_num=expert_idx.numel(), expert_capacity=-1, expert_num=expert_num,
        drop_pad_mode=0, expert_tokens_num_type=1, expert_tokens_num_flag=True, quant_mode=-1,
        active_expert_range=[first, last], row_idx_type=0,
    )  # fmt: skip
    return rows, row_idx, counts
