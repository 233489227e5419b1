"""npu_ops.gather_kv_cache on Ascend: torch_npu.npu_gather_pa_kv_cache.

Written from its schema and CANN's description of the kernel; not yet run on an NPU.
"""

from __future__ import annotations

import torch_npu
from torch import Tensor


def gather_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
) -> None:
    """See npu_ops.gather_kv_cache.gather_kv_cache."""
    if key.shape[0] == 0 or seq_lens.shape[0] == 0:
        return
    torch_npu.npu_gather_pa_kv_cache(
        key_cache,
        value_cache,
        block_table[: seq_lens.shape[0]].contiguous(),
        seq_lens,
        key,
        value,
        seq_offset=seq_offset,
        is_seq_lens_cumsum=False,
    )
