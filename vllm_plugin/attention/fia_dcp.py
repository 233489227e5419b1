"""ASCEND_FIA under decode context parallelism: each request in two parts that merge by LSE.

No rank holds all keys of a request, so the causal mask of its new tokens fits the keys of none. But all ranks have the new
tokens themselves. Every row therefore attends to them by its own heads, under a causal mask, and to what was cached before the
step with the heads of all ranks, each rank over its part and without a mask. Decodes and speculative rows are no special case:
a row sees all that was cached, and of the new tokens those up to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mla_workspace.context import RunningMerge
from npu_ops.fused_infer_attention import SPARSE_CAUSAL, SPARSE_NONE, fused_infer_attention
from npu_ops.shards import Shard, local_length
from vllm_plugin.attention.dcp import gather_heads, merge_over_ranks


@dataclass(frozen=True)
class ShardedStep:
    """The two FIA calls of a step.

    Attributes:
        new: length arguments over the new tokens' own keys, which are packed.
        context: length and table arguments over this rank's part of the cached keys; None if nothing is cached for anyone.
    """

    new: dict[str, Any]
    context: dict[str, Any] | None


def plan_step(
    starts: list[int],
    kvlens: list[int],
    query_start_loc: Tensor,
    block_table: Tensor,
    block_size: int,
    shard: Shard,
    on_device: Callable[[list[int]], Tensor],
) -> ShardedStep:
    """The calls for requests whose queries begin at ``starts``.

    Args:
        starts: B + 1 host ints.
        kvlens: B host ints, keys of each request on all ranks, new tokens included.
        query_start_loc: ``starts`` on the device.
        block_table: int32 [B, blocks] of this rank's cache.
        block_size: tokens of a block on one rank.
        shard: this rank's part.
        on_device: int32 on the device, without waiting for it.
    """
    ends = starts[1:]
    cached = [keys - (end - start) for keys, start, end in zip(kvlens, starts, ends, strict=False)]
    new = {"actual_seq_qlen": ends, "query_start_loc": query_start_loc}
    context = None
    if any(cached):  # on any rank: all must take part in the exchange
        local = local_length(cached, shard.rank, shard.dcp, shard.interleave)
        context = {
            **new,
            "actual_seq_kvlen": local,
            "seq_lens": on_device(local),
            "block_table": block_table,
            "block_size": block_size,
            "sparse_mode": SPARSE_NONE,
        }
    new |= {"actual_seq_kvlen": ends, "seq_lens": query_start_loc.diff(), "sparse_mode": SPARSE_CAUSAL}
    return ShardedStep(new, context)


def attend(
    step: ShardedStep,
    query: Tensor,
    new: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    softmax_scale: float,
    style: str,
) -> Tensor:
    """Attention of query [T, N, D] to the new keys and values [T, 1, D] and to the caches of all ranks; [T, N, D]."""
    # vLLM shards the cache only among ranks that hold one and the same KV head.
    shared: dict[str, Any] = {"num_key_value_heads": 1, "softmax_scale": softmax_scale, "return_softmax_lse": True}
    key, value = (x.contiguous() for x in new)
    out, lse = fused_infer_attention(query, key, value, num_query_heads=query.shape[1], **step.new, **shared)
    if step.context is None:
        return out
    merged = RunningMerge(out, lse)
    queries = gather_heads(query)
    partial, partial_lse = fused_infer_attention(
        queries, caches[0], caches[1], num_query_heads=queries.shape[1], **step.context, **shared
    )
    merged.add(slice(None), *merge_over_ranks(partial, partial_lse, style))
    return merged.out
