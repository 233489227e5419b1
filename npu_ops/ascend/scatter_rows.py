"""npu_ops.scatter_rows on Ascend: torch_npu.npu_scatter_nd_update_ on the cache as rows.

Written from its documents; not yet run on an NPU. It takes no index out of range, so padding rows go where npu_ops.ascend's
scatter_kv_cache sends them; and no 8-bit floats, which are bytes to it.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor


def scatter_rows(rows: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    """See npu_ops.scatter_rows.scatter_rows."""
    if slot_mapping.shape[0] == 0:
        return
    if rows.dtype == torch.float8_e4m3fn:
        rows, cache = rows.view(torch.int8), cache.view(torch.int8)
    flat = cache.view(-1, cache.shape[-1])
    real = slot_mapping >= 0
    first = real.int().argmax(0, keepdim=True)  # 0 if none is real
    # Padding repeats the first real row: equal rows to one slot leave the same bytes. Without any, slot 0 is written back.
    row = torch.where(real.index_select(0, first)[:, None], rows.index_select(0, first), flat[:1])
    slots = torch.where(real, slot_mapping, slot_mapping.index_select(0, first).clamp(min=0))
    torch_npu.npu_scatter_nd_update_(flat, slots[:, None], torch.where(real[:, None], rows, row))
