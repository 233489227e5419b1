"""Top-k indices under decode context parallelism (DCP).

Indexer keys are replicated, so all ranks choose the same tokens by their positions in the request; the latent rows are sharded
(``npu_ops.shards``). Attention then takes one of two ways:

- Queries travel: every rank attends with all heads to the chosen rows that it holds (``local_indices``), and the partial
  results merge by LSE. This is how decodes run.
- Rows travel: the blocks that any query has chosen are gathered from all ranks (``referenced_blocks``), and each rank attends
  with its own heads to complete rows (``gathered_indices``), with nothing to merge. ``gather_is_cheaper`` decides for prefills.

Nothing here waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from npu_ops.shards import Shard, local_position, owner


def local_indices(indices: Tensor, shard: Shard) -> Tensor:
    """Which of the chosen tokens this rank holds, as positions among its own tokens of the request.

    Args:
        indices: int32 [T, 1, K], positions in the request, -1 for none.
        shard: this rank's part of the cache.

    Returns:
        int32 [T, 1, K]: the rank's tokens in the order given, -1 after them. ``indices`` itself if one rank holds all.
    """
    if shard.dcp == 1:
        return indices
    sharding = (shard.dcp, shard.interleave)
    own = (indices >= 0) & (owner(indices, *sharding) == shard.rank)
    local = torch.where(own, local_position(indices, *sharding), -1)
    # Own tokens go to the front and all others behind them, each in order: every place is written once.
    held = own.cumsum(-1, dtype=torch.int32)
    others = held[..., -1:] + (~own).cumsum(-1, dtype=torch.int32)
    places = torch.where(own, held, others) - 1
    return torch.empty_like(local).scatter_(-1, places.long(), local)


@dataclass(frozen=True)
class ReferencedBlocks:
    """The cache blocks that a step's queries have chosen tokens of; the same on every rank, as a token's block id is.

    Attributes:
        blocks: int32 [capacity], ids in the cache, by request and position; after the last one block 0, which nobody reads.
        slots: int32 [B, width], where in ``blocks`` each entry of the block table is, -1 if nobody chose a token of it.
        count: int32 [1], how many there are.
    """

    blocks: Tensor
    slots: Tensor
    count: Tensor


def referenced_blocks(
    indices: Tensor, requests: Tensor, block_table: Tensor, block_size: int, shard: Shard, capacity: int
) -> ReferencedBlocks:
    """Mark the blocks that are referenced and number them in order: the compact table.

    Args:
        indices: int32 [T, 1, K], positions in the request, -1 for none.
        requests: integer [T], the request of each row.
        block_table: int32 [B, width]; entry ``j`` stands for ``dcp * block_size`` positions, ``block_size`` on each rank.
        block_size: rows of a block, a multiple of ``shard.interleave``.
        shard: dcp and interleave; the rank does not matter.
        capacity: blocks that there is room for, at least as many as are referenced; ``most_blocks`` is enough.
    """
    width = block_table.shape[1]
    # One column more takes the entries without a token.
    column = torch.where(indices >= 0, indices // (shard.dcp * block_size), width).flatten(1).long()
    marks = torch.zeros(len(block_table), width + 1, dtype=torch.int32, device=indices.device)
    marks.view(-1).index_fill_(0, (requests.long()[:, None] * (width + 1) + column).flatten(), 1)
    marked = marks[:, :width].reshape(-1)
    numbers = marked.cumsum(0, dtype=torch.int32)
    slots = torch.where(marked > 0, numbers - 1, -1)
    blocks = torch.zeros(capacity + 1, dtype=torch.int32, device=indices.device)
    blocks.scatter_(0, torch.where(marked > 0, slots, capacity).long(), block_table.reshape(-1).int())
    count = numbers[-1:] if len(numbers) else torch.zeros(1, dtype=torch.int32, device=indices.device)
    return ReferencedBlocks(blocks[:capacity], slots.view_as(block_table), count)


def gathered_indices(indices: Tensor, requests: Tensor, referenced: ReferencedBlocks, block_size: int, shard: Shard) -> Tensor:
    """Rows of the gathered blocks at which the chosen tokens lie.

    Each rank brings ``referenced.blocks`` of its cache, and the ranks' parts stand one after another: a cache of
    ``dcp * capacity`` blocks that all requests share, with the block table 0, 1, 2, ... for every one of them.

    Args:
        indices: int32 [T, 1, K], positions in the request, -1 for none.
        requests: integer [T], the request of each row.
        referenced: of the same indices.
        block_size: rows of a block.
        shard: dcp and interleave; the rank does not matter.

    Returns:
        int32 [T, 1, K], -1 where ``indices`` is. The rows are in no order of positions: attend with ``sparse_mode`` 0, as the
        indexer has left out what is not causal.
    """
    sharding = (shard.dcp, shard.interleave)
    position = indices.clamp(min=0)
    local = local_position(position, *sharding)
    slot = referenced.slots[requests.long()[:, None, None], (local // block_size).long()]
    rows = (owner(position, *sharding) * len(referenced.blocks) + slot) * block_size + local % block_size
    return torch.where(indices >= 0, rows, -1).int()


def most_blocks(contexts: Sequence[int], rows: Sequence[int], topk: int, block_size: int, dcp: int) -> int:
    """How many blocks can be referenced at most: a request's own, or one to each of its chosen tokens.

    Args:
        contexts: tokens of each request, new ones included.
        rows: queries of each.
        topk: tokens that a query attends to.
        block_size: rows of a block.
        dcp: ranks that share the cache; a block stands for ``dcp * block_size`` positions.
    """
    return sum(min(-(-context // (dcp * block_size)), queries * topk) for context, queries in zip(contexts, rows, strict=True))


def gather_is_cheaper(
    blocks: int, queries: int, heads: int, block_size: int, dcp: int, row_bytes: int, latent: int = 512, rope: int = 64
) -> bool:
    """Whether a prefill gathers the referenced blocks rather than sending its queries to all ranks.

    The rule compares bytes in the exchanges' whole results, of which every rank receives ``(dcp - 1) / dcp`` in both ways:

    - rows travel: ``blocks * dcp * block_size * row_bytes``;
    - queries travel: for each query and head of all ranks ``(latent + rope) * 2`` bytes of query in 16 bits, and
      ``(latent + 1) * 4`` of result and LSE in fp32.

    At 128 heads a query costs 410,112 bytes, as much as 356 latent rows in bf16 or 625 packed ones (C8). A chunk of 8,192
    queries so gathers even if all of a context of 1,048,576 is referenced, and a tail of 100 queries over it does not. Memory
    bounds the gather too: the caller has room for a number of blocks, and sends the queries if there are more.

    Args:
        blocks: to be gathered from each rank: those referenced if the host knows, else ``most_blocks``.
        queries: of the step.
        heads: of all ranks.
        block_size: rows of a block.
        dcp: ranks that share the cache.
        row_bytes: of one token in the cache, 1,152 in 16 bits and 656 packed.
        latent: width of a latent row, and of a result.
        rope: width of its rope part.
    """
    gathered = blocks * dcp * block_size * row_bytes
    sent = queries * heads * ((latent + rope) * 2 + (latent + 1) * 4)
    return gathered < sent
