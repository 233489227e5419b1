"""npu_ops.scatter_kv_cache on Ascend: torch_npu.npu_scatter_pa_kv_cache.

Written from its documents; not yet run on an NPU.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor


def scatter_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See npu_ops.scatter_kv_cache.scatter_kv_cache.

    CANN's document wants slots in [0, blocks * block_size), so a padding row may not go in as -1; and dropping it would
    make the number of rows wait for the device. A padding row repeats the first real row instead: two equal rows to
    one slot leave the same bytes whichever comes last. Without any real row it writes slot 0 back as it is.
    """
    if slot_mapping.shape[0] == 0:
        return
    real = slot_mapping >= 0
    first = real.int().argmax(0, keepdim=True)  # 0 if none is real
    slot = slot_mapping.index_select(0, first).clamp(min=0)
    torch_npu.npu_scatter_pa_kv_cache(
        _repeat_first(key, key_cache, real, first),
        _repeat_first(value, value_cache, real, first),
        key_cache,
        value_cache,
        torch.where(real, slot_mapping, slot),
        cache_mode="Norm",
    )


def _repeat_first(rows: Tensor, cache: Tensor, real: Tensor, first: Tensor) -> Tensor:
    """``rows`` with padding replaced by the first real row, or by the cache's own row 0 where no row is real."""
    own = cache.view(-1, *cache.shape[2:])[:1]
    row = torch.where(real.index_select(0, first)[:, None, None], rows.index_select(0, first), own)
    return torch.where(real[:, None, None], rows, row)
