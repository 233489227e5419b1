"""ASCEND_SFA under decode context parallelism: bring the latent rows here, or send the queries there (sfa/remap.py).

Of a batch with many query rows it is cheaper to gather the blocks that its picks refer to from all ranks and attend to them
with this rank's heads; of decodes it is cheaper to gather the queries, attend with all heads to this rank's rows, and merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.distributed import get_dcp_group

from npu_ops.shards import Shard
from sfa.remap import gathered_indices, referenced_blocks


@dataclass(frozen=True)
class BlockGather:
    """How the rows that a batch attends to come here.

    Attributes:
        requests: int64 [tokens], the request of each row.
        block_table: int32 [B, blocks], of this rank's cache.
        block_size: rows to a block.
        shard: this rank's part.
        capacity: blocks that each rank brings; no batch refers to more.
    """

    requests: Tensor
    block_table: Tensor
    block_size: int
    shard: Shard
    capacity: int

    def bring(self, indices: Tensor, caches: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...], dict[str, Tensor]]:
        """Picks, caches and lengths in terms of the gathered rows, which all requests share as if each had all of them.

        Args:
            indices: int32 [tokens, 1, K], positions in the request.
            caches: this rank's [blocks, block_size, 1, W].

        Returns:
            int32 [tokens, 1, K]; caches [dcp * capacity, block_size, 1, W]; block table and key lengths.
        """
        referenced = referenced_blocks(indices, self.requests, self.block_table, self.block_size, self.shard, self.capacity)
        rows = gathered_indices(indices, self.requests, referenced, self.block_size, self.shard)
        group, requests = get_dcp_group(), len(self.block_table)
        gathered = tuple(group.all_gather(cache.index_select(0, referenced.blocks), dim=0) for cache in caches)
        blocks = torch.arange(self.shard.dcp * self.capacity, dtype=torch.int32, device=indices.device)
        lengths = {
            "block_table": blocks.expand(requests, -1).contiguous(),
            "actual_seq_lengths_kv": torch.full_like(self.block_table[:, 0], len(blocks) * self.block_size).contiguous(),
        }
        return rows, gathered, lengths
