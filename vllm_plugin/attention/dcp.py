"""Decode context parallelism (DCP): ranks that share a KV cache attend with all of their heads and merge by LSE.

Each rank holds the tokens of its turn (npu_ops.shards) and all ranks of the group need all of them. So queries are
gathered over the heads, every rank attends to its own keys, and the partial results go back to the ranks whose heads they
are, merged by their LSE (Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax"). A rank without keys
brings output 0 and LSE -inf, which counts for nothing.

vLLM's ``--dcp-comm-backend`` chooses how the results travel. ``ag_rs`` gathers the LSEs, weighs each rank's output by its share
and sums the outputs by a reduce-scatter over heads. ``a2a`` sends each rank the outputs and LSEs of its heads, which it merges.
vLLM's own helpers for both are Triton kernels, which neither a CPU nor an NPU runs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed import get_dcp_group
from vllm.platforms import current_platform

from npu_ops.attention_update import attention_update
from npu_ops.shards import Shard

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def shard_of(vllm_config: VllmConfig) -> Shard:
    """This rank's part of the KV cache."""
    parallel = vllm_config.parallel_config
    ranks = parallel.decode_context_parallel_size
    rank = get_dcp_group().rank_in_group if ranks > 1 else 0
    return Shard(rank, ranks, parallel.cp_kv_cache_interleave_size)


def host_to_device(values: list[int] | Tensor, device: torch.device) -> Tensor:
    """int32 on the device, without waiting for it."""
    host = torch.as_tensor(values, dtype=torch.int32)
    if current_platform.is_pin_memory_available():
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def gather_heads(query: Tensor) -> Tensor:
    """Queries of all ranks' heads [T, N * dcp, D], in the order of the ranks, of this rank's [T, N, D]."""
    return get_dcp_group().all_gather(query.contiguous(), dim=1)  # type: ignore[no-any-return]


def merge_over_ranks(out: Tensor, lse: Tensor, style: str) -> tuple[Tensor, Tensor]:
    """This rank's heads of the whole attention, from partial results of all ranks.

    Args:
        out: [T, N * dcp, D], attention of all heads over this rank's keys.
        lse: [T, N * dcp] fp32, natural log; -inf for rows without keys here, where ``out`` is 0.
        style: "ag_rs" or "a2a".

    Returns:
        [T, N, D] fp32 and its LSE [T, N]; 0 and -inf for rows without keys on any rank.

    Raises:
        ValueError: for another style.
    """
    if style == "ag_rs":
        return _reduce_scatter(out, lse)
    if style == "a2a":
        return _all_to_all(out, lse)
    raise ValueError(f"--dcp-comm-backend: ag_rs or a2a is required, got {style}.")


def _reduce_scatter(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    group = get_dcp_group()
    ranks, heads = group.world_size, out.shape[1] // group.world_size
    lses = group.all_gather(lse[None].contiguous(), dim=0)  # [dcp, T, N * dcp]
    total = torch.logsumexp(lses, 0)
    # Of nothing, no share: -inf less -inf would be NaN.
    share = torch.exp(lse - total).masked_fill(lse == -math.inf, 0.0)
    weighted = (out.float() * share[..., None]).transpose(0, 1).contiguous()  # heads first, to be scattered
    mine = weighted.new_empty(heads, *weighted.shape[1:])
    dist.reduce_scatter_tensor(mine, weighted, group=group.device_group)
    own = slice(group.rank_in_group * heads, (group.rank_in_group + 1) * heads)
    assert ranks * heads == out.shape[1]
    return mine.transpose(0, 1), total[:, own]


def _all_to_all(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    group = get_dcp_group()
    ranks, (tokens, heads, width) = group.world_size, out.shape
    # One exchange for both: the LSE travels as one more column, in fp32.
    sent = torch.cat((out.float(), lse[..., None]), -1).view(tokens, ranks, heads // ranks, width + 1)
    sent = sent.transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.device_group)
    parts = [part.tensor_split((width,), -1) for part in received.unbind(0)]
    return attention_update([lse.squeeze(-1).contiguous() for _, lse in parts], [out.contiguous() for out, _ in parts])
