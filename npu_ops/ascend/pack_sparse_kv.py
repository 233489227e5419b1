"""npu_ops.pack_sparse_kv on Ascend: torch_npu.npu_dynamic_block_quant, from its documents, not yet run on an NPU.

Its tiles of 1 x 128 take 16 bits: fp32 runs the reference.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from npu_ops import virtual_npu
from npu_ops.reference import pack_sparse_kv as reference


def pack_sparse_kv(latent: Tensor, rope: Tensor) -> Tensor:
    """See npu_ops.pack_sparse_kv.pack_sparse_kv."""
    if latent.dtype == torch.float32:
        return virtual_npu.in_one_piece(reference.pack_sparse_kv, latent, rope)
    if not latent.numel():  # CANN takes no empty tensor
        return reference.join(latent.to(torch.int8), rope, latent.new_empty((0, 4), dtype=torch.float32))
    quantised, scales = torch_npu.npu_dynamic_block_quant(
        latent, min_scale=reference.SMALLEST_SCALE, dst_type=1, row_block_size=1, col_block_size=reference.TILE
    )
    return reference.join(quantised, rope, scales)
