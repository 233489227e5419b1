"""npu_ops.moe_gating_top_k on Ascend: torch_npu.npu_moe_gating_top_k, written from its documents and not yet run on an NPU.

Logits go in as fp32, as CANN returns the weights in their dtype. It divides by the sum of a row after a sigmoid and only then;
for the other two combinations the scores are asked for (``out_flag``) and weighed here.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor


def moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """See npu_ops.moe_gating_top_k.moe_gating_top_k."""
    if x.shape[0] == 0:
        weights = torch.empty((0, k), dtype=torch.float32, device=x.device)
        return weights, torch.empty((0, k), dtype=torch.int32, device=x.device)
    does_it = renorm == norm_type
    weights, ids, scores = torch_npu.npu_moe_gating_top_k(
        x.float(), k, bias=None if bias is None else bias.float(), k_group=k_group, group_count=group_count,
        group_select_mode=group_select_mode, renorm=0, norm_type=norm_type, out_flag=not does_it,
        routed_scaling_factor=routed_scaling_factor, eps=eps,
    )  # fmt: skip
    if not does_it:
        weights = scores.gather(1, ids.long())
        if renorm:
            weights = weights / (weights.sum(-1, keepdim=True) + eps)
        weights = weights * routed_scaling_factor
    return weights, ids
