"""npu_ops.grouped_matmul on Ascend: torch_npu.npu_grouped_matmul, written from its documents and not yet run on an NPU.

CANN updates no row past the sum of the group list, as here. A list of sizes must not have length 1; there the only size is the
cumulative sum as well.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor


def grouped_matmul(x: Tensor, weight: Tensor, group_list: Tensor) -> Tensor:
    """See npu_ops.grouped_matmul.grouped_matmul."""
    if x.shape[0] == 0:
        return torch.empty((0, weight.shape[2]), dtype=x.dtype, device=x.device)
    (out,) = torch_npu.npu_grouped_matmul(
        [x.contiguous()], [weight], group_list=group_list.contiguous(), split_item=2, group_type=0,
        group_list_type=int(weight.shape[0] > 1),
    )  # fmt: skip
    return out  # type: ignore[no-any-return]
