"""npu_ops.gather_kv_cache on Ascend: torch_npu.npu_gather_pa_kv_cache where it does, else the Triton kernel gather_pages.

CANN's kernel for A2 and A3 moves fp16 and bf16 in pieces of 32 bytes with int32 offsets, and drops the part of an offset that
does not fill a block. Offsets are device data, so nobody can look at them without waiting: with offsets it is not used. Where
no kernel can be compiled, on the virtual NPU or without triton-ascend, plain PyTorch copies; that waits for the device once.

Nothing here has run on an NPU yet.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
import torch_npu
from torch import Tensor

from npu_ops import virtual_npu
from npu_ops.reference import gather_kv_cache as reference

# Of CANN's kernel: offsets in int32, pieces of 32 bytes, a row in its buffer.
MAX_ELEMENTS, PIECE, MAX_ROW = 2**31 - 1, 32, 148 * 1024


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
    if 0 in (key.shape[0], seq_lens.shape[0], block_table.shape[1]):
        return
    if seq_offset is None and _takes(key_cache) and _takes(value_cache):
        table = block_table[: seq_lens.shape[0]].contiguous()
        torch_npu.npu_gather_pa_kv_cache(
            key_cache, value_cache, table, seq_lens.contiguous(), key, value, seq_offset=None, is_seq_lens_cumsum=False
        )
    elif _compiles():
        from npu_ops.ascend.kernels import gather_pages

        gather_pages(key_cache, value_cache, block_table, seq_lens, key, value, seq_offset)
    else:
        virtual_npu.in_one_piece(
            reference.gather_kv_cache, key_cache, value_cache, block_table, seq_lens, key, value, seq_offset=seq_offset
        )


def _takes(cache: Tensor) -> bool:
    """Whether CANN's kernel can copy rows of this cache."""
    row = cache.shape[2] * cache.shape[3] * cache.element_size()
    narrow = cache.dtype in (torch.float16, torch.bfloat16)
    return narrow and row % PIECE == 0 and row <= MAX_ROW and cache.numel() <= MAX_ELEMENTS


@functools.cache
def _compiles() -> bool:
    """Whether Triton can build kernels for this NPU: ``triton`` is triton-ascend, and CANN's own compiler is there."""
    if importlib.util.find_spec("triton") is None or "ASCEND_HOME_PATH" not in os.environ or virtual_npu.is_enabled():
        return False
    from triton.backends import backends

    return "ascend" in backends
