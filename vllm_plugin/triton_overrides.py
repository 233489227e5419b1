"""PyTorch versions of upstream's Triton kernels, for devices on which no Triton runs."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.triton_utils.dispatcher import register_kernels


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    block_table_stride: int,
    slot_mapping: Tensor,
    KV_CACHE_BLOCK_SIZE: int,  # noqa: N803 - upstream's argument names, matched by name
    TOTAL_CP_WORLD_SIZE: int = 1,  # noqa: N803
    TOTAL_CP_RANK: int = 0,  # noqa: N803
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,  # noqa: N803
    PAD_ID: int = -1,  # noqa: N803
    BLOCK_SIZE: int = 1024,  # noqa: N803
) -> None:
    """Slot of every token's key in the paged cache, ``PAD_ID`` where the token is padding or another rank's.

    With context parallelism a block table entry stands for ``KV_CACHE_BLOCK_SIZE * world`` consecutive positions, dealt
    to the ranks in runs of ``CP_KV_CACHE_INTERLEAVE_SIZE``. Stands in for
    ``vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel``.

    Args:
        num_tokens: tokens of this step.
        max_num_tokens: length of ``slot_mapping`` to fill; the rest is padding.
        query_start_loc: int32 [requests + 1], cumulative query lengths with a leading 0.
        positions: int64 [>= num_tokens].
        block_table: int32 [>= requests, blocks].
        block_table_stride: row length of ``block_table``; unused, the tensor knows its strides.
        slot_mapping: int64 [>= max_num_tokens], written.
        KV_CACHE_BLOCK_SIZE: tokens of a block on one rank.
        TOTAL_CP_WORLD_SIZE: ranks that share the cache.
        TOTAL_CP_RANK: this rank.
        CP_KV_CACHE_INTERLEAVE_SIZE: consecutive positions of one rank.
        PAD_ID: value of padding slots.
        BLOCK_SIZE: Triton's tile; unused.
    """
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID
    tokens = torch.arange(num_tokens, device=positions.device, dtype=query_start_loc.dtype)
    request = torch.searchsorted(query_start_loc[1:].contiguous(), tokens, right=True)
    # Tokens past the last request (a padded batch) have no row in the table; any row will do, they are never read back.
    request = request.clamp_(max=block_table.shape[0] - 1)
    position = positions[:num_tokens]
    virtual_block = KV_CACHE_BLOCK_SIZE * TOTAL_CP_WORLD_SIZE
    offset = position % virtual_block
    run = TOTAL_CP_WORLD_SIZE * CP_KV_CACHE_INTERLEAVE_SIZE
    local_offset = offset // run * CP_KV_CACHE_INTERLEAVE_SIZE + offset % CP_KV_CACHE_INTERLEAVE_SIZE
    block = block_table[request.long(), position // virtual_block].long()
    slots = block * KV_CACHE_BLOCK_SIZE + local_offset
    if TOTAL_CP_WORLD_SIZE > 1:
        mine = offset // CP_KV_CACHE_INTERLEAVE_SIZE % TOTAL_CP_WORLD_SIZE == TOTAL_CP_RANK
        slots = torch.where(mine, slots, PAD_ID)
    slot_mapping[:num_tokens] = slots


def register() -> None:
    """Give upstream's dispatcher our versions. Called by the model runner, before any kernel is launched."""
    register_kernels({"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": compute_slot_mapping})
