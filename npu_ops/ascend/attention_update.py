"""npu_ops.attention_update on Ascend: torch_npu.npu_attention_update.

Written from its documents and not yet run on an NPU. They name lists of 1 to 16 flat fp32 LSEs [M] and outputs [M, D],
and say nothing of infinities: ``-inf - -inf`` inside would be NaN. So empty rows go in as zeros of a very low, finite
LSE, and come out as 0 and -inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch_npu
from torch import Tensor

# CANN merges at most 16 partials in one call.
MAX_PARTS = 16
# exp(EMPTY - lse) is 0 for every LSE that a kernel can return, and sums of some EMPTY weights do not move it.
EMPTY = -1e30


def attention_update(lse: Sequence[Tensor], local_out: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See npu_ops.attention_update.attention_update."""
    first = local_out[0]
    empty = [part.isinf() for part in lse]
    lses = [part.masked_fill(skip, EMPTY).flatten() for part, skip in zip(lse, empty, strict=True)]
    # Masked, not multiplied: an empty row may hold NaN.
    outs = [part.float().masked_fill(skip[..., None], 0.0).flatten(0, 1) for part, skip in zip(local_out, empty, strict=True)]
    while len(outs) > MAX_PARTS:
        out, total = torch_npu.npu_attention_update(lses[:MAX_PARTS], outs[:MAX_PARTS], update_type=1)
        lses, outs = [total, *lses[MAX_PARTS:]], [out, *outs[MAX_PARTS:]]
    out, total = torch_npu.npu_attention_update(lses, outs, update_type=1)
    total = torch.where(total < EMPTY / 2, -math.inf, total)
    return out.view(first.shape).to(first.dtype), total.view(first.shape[:2])
