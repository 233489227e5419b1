"""Where plans meet tensors: gathering a chunk of context into the workspace, and merging attention over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_workspace.plan import ContextPlan
from mla_workspace.size import LATENT, ROPE
from npu_ops.attention_update import attention_update
from npu_ops.gather_kv_cache import gather_kv_cache
from npu_ops.shards import Shard, global_order, local_length, rows_per_rank


@dataclass(frozen=True)
class ChunkGather:
    """What it takes to gather one chunk; the same for all layers of a step.

    Attributes:
        rows: rows of the chunk, all ranks' together.
        block_table: int32 [B, blocks], of the chunk's requests.
        seq_lens: int32 [B] on the device, rows that this rank holds of each.
        seq_offset: int32 [B] on the device, the first of them among this rank's rows of the request.
        rank_rows: rows that each rank brings to the all-gather, padding included.
        order: int32 [rows] on the device, which of the all-gathered rows comes where; None if this rank holds all.
    """

    rows: int
    block_table: Tensor
    seq_lens: Tensor
    seq_offset: Tensor
    rank_rows: int
    order: Tensor | None


def chunk_gathers(
    plan: ContextPlan, block_table: Tensor, on_device: Callable[[Tensor], Tensor], shard: Shard | None = None
) -> list[ChunkGather]:
    """One ChunkGather to each chunk of a plan.

    Args:
        plan: over the requests of ``block_table``.
        block_table: int32 [requests, blocks] on the device.
        on_device: copies an int32 tensor of the host to the device, without waiting for it if the memory is pinned; called
            at most once.
        shard: this rank's part of the cache; all of it if None.
    """
    shard = shard or Shard()
    sharding = (shard.dcp, shard.interleave)
    parts: list[Tensor] = []
    for chunk in plan.chunks:
        own = (local_length(tokens, shard.rank, *sharding) for tokens in (chunk.lengths, chunk.starts))
        order = global_order(chunk.lengths, *sharding) if shard.dcp > 1 else torch.empty(0, dtype=torch.int32)
        parts += [*(torch.tensor(tokens, dtype=torch.int32) for tokens in own), order]
    if not parts:
        return []
    copied = torch.split(on_device(torch.cat(parts)), [len(part) for part in parts])
    return [
        ChunkGather(
            rows=chunk.rows,
            block_table=block_table[chunk.requests.start : chunk.requests.stop],
            seq_lens=lens,
            seq_offset=offset,
            rank_rows=rows_per_rank(chunk.lengths, *sharding),
            order=order if shard.dcp > 1 else None,
        )
        for chunk, lens, offset, order in zip(plan.chunks, copied[::3], copied[1::3], copied[2::3], strict=True)
    ]


class Workspace:
    """Memory for one chunk of context, allocated once and filled anew by every gather.

    It holds ``tokens`` rows in the order of the requests and their positions. Under DCP ``tokens / dcp`` more take the rows of
    this rank until they are exchanged. A unit of the alignment is whole rounds over the ranks, so of a chunk that fits in whole
    units no rank holds more than ``tokens / dcp`` rows, and what all bring, padded to the most, is ``tokens`` at most.
    """

    def __init__(
        self,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        dcp: int = 1,
        all_gather: Callable[[Tensor], Tensor] | None = None,
        widths: tuple[int, int] = (LATENT, ROPE),
    ) -> None:
        """Allocate.

        Args:
            tokens: the largest chunk; under DCP a multiple of ``dcp``.
            dtype: of the caches.
            device: of the caches.
            dcp: ranks that share the KV cache.
            all_gather: concatenates the ranks' tensors [rows, width], in their order, along dim 0; needed if ``dcp`` > 1.
            widths: of a latent row and its rope row.
        """
        if (dcp > 1) != (all_gather is not None):
            raise ValueError(f"Workspace: all_gather is required if dcp > 1, and only then, got {all_gather} for dcp {dcp}.")
        self.tokens = tokens
        self._all_gather = all_gather
        rows = tokens + (tokens // dcp if dcp > 1 else 0)
        self._latent, self._rope = (torch.empty(rows, 1, width, dtype=dtype, device=device) for width in widths)

    def gather(self, latent_cache: Tensor, rope_cache: Tensor, chunk: ChunkGather) -> tuple[Tensor, Tensor]:
        """Fill the workspace with a chunk, in the order of its requests and their positions.

        Args:
            latent_cache: [blocks, block_size, 1, 512], contiguous.
            rope_cache: [blocks, block_size, 1, 64], contiguous.
            chunk: see there.

        Returns:
            Views [rows, 1, 512] and [rows, 1, 64], valid until the next call.

        Raises:
            ValueError: if the chunk is larger than the workspace.
        """
        if chunk.rows > self.tokens:
            raise ValueError(
                f"Workspace: a chunk of at most {self.tokens} rows is required, got {chunk.rows}. Plan for this workspace."
            )
        rows = slice(0, chunk.rows)
        own = rows if chunk.order is None else slice(self.tokens, self.tokens + chunk.rank_rows)
        latent, rope = self._latent[own], self._rope[own]
        gather_kv_cache(latent_cache, rope_cache, chunk.block_table, chunk.seq_lens, latent, rope, seq_offset=chunk.seq_offset)
        if chunk.order is None or self._all_gather is None:
            return latent, rope
        # One exchange for both; rows past this rank's own are padding, which `order` leaves out.
        everyones = self._all_gather(torch.cat((latent, rope), -1).flatten(1))
        parts = torch.split(everyones.unsqueeze(1), [latent.shape[-1], rope.shape[-1]], -1)
        latent, rope = self._latent[rows], self._rope[rows]
        for part, into in zip(parts, (latent, rope), strict=True):
            torch.index_select(part, 0, chunk.order, out=into)
        return latent, rope


class RunningMerge:
    """Attention over disjoint parts of the keys, merged as they come: memory does not grow with their number.

    Attributes:
        out: [T, N, D] fp32; kept in fp32, as each rounding to 16 bits in between would show.
        lse: [T, N] fp32.
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        """Begin with one partial result [T, N, D] and its LSE [T, N]; both belong to the merge from then on."""
        self.out, self.lse = out.float(), lse

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge in a partial result [t, N, D] of the query rows ``rows``, with its LSE [t, N].

        A row without keys has an LSE of -inf or +inf, on either side, and is left out. Without keys on both sides the
        result is 0, its LSE -inf.
        """
        self.out[rows], self.lse[rows] = attention_update([self.lse[rows], lse], [self.out[rows], out])
