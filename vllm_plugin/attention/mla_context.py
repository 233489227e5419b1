"""The cached context of ASCEND_MLA's prefills: mla_workspace's plans in vLLM's terms, and one workspace for all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed import get_dcp_group
from vllm.v1.worker.workspace import current_workspace_manager

from mla_workspace.context import ChunkGather, Workspace, chunk_gathers
from mla_workspace.plan import ContextPlan, Mode, plan_context
from mla_workspace.size import cdiv, context_alignment, require_workspace, workspace_tokens
from npu_ops.shards import Shard
from vllm_plugin.attention.dcp import shard_of
from vllm_plugin.attention.fia import FiaCall
from vllm_plugin.config import ParityConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class ContextCall:
    """Attention over one chunk of context.

    Attributes:
        tokens: which of the rows in MHA form see the chunk.
        gather: how the chunk gets into the workspace.
        lengths: the length arguments of fused_infer_attention over the packed chunk.
    """

    tokens: slice
    gather: ChunkGather
    lengths: dict[str, Any]


@dataclass(frozen=True)
class ContextSettings:
    """How contexts are cut: tokens of the workspace, what starts are multiples of, the plan, this rank's shard."""

    workspace: int
    alignment: int
    plan: Mode
    shard: Shard

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> ContextSettings:
        """The settings of an engine, on this rank.

        Raises:
            ValueError: if ``mla_workspace_tokens`` does not fit the block size, the number of requests or the plan.
        """
        config, shard = ParityConfig.of(vllm_config), shard_of(vllm_config)
        alignment = context_alignment(vllm_config.cache_config.block_size, shard.dcp, shard.interleave)
        requests = vllm_config.scheduler_config.max_num_seqs
        tokens = config.mla_workspace_tokens
        if tokens is None:
            # A sparse model takes this way for contexts within its top-k only.
            longest = vllm_config.model_config.max_model_len
            longest = min(longest, getattr(vllm_config.model_config.hf_text_config, "index_topk", longest))
            tokens = workspace_tokens(longest, requests, alignment)
        else:
            require_workspace(tokens, requests, alignment, config.mla_context_plan)
        return cls(tokens, alignment, config.mla_context_plan, shard)


def context_calls(
    plan: ContextPlan, starts: list[int], block_table: Tensor, shard: Shard, on_device: Callable[[Tensor], Tensor]
) -> Iterator[ContextCall]:
    """One call to each chunk.

    Args:
        plan: over the prefills.
        starts: where each prefill's queries begin among the rows in MHA form, and where the last ends.
        block_table: int32 [prefills, blocks] on the device.
        shard: this rank's part of the cache.
        on_device: copies an int32 tensor of the host without waiting; called twice for the whole plan.
    """
    bounds = [(chunk.requests.start, chunk.requests.stop) for chunk in plan.chunks]
    locations = [[starts[row] - starts[first] for row in range(first, last + 1)] for first, last in bounds]
    parts = [part for location, chunk in zip(locations, plan.chunks, strict=True) for part in (location, chunk.lengths)]
    copied = on_device(torch.tensor([value for part in parts for value in part], dtype=torch.int32))
    device = torch.split(copied, [len(part) for part in parts])
    gathers = chunk_gathers(plan, block_table, on_device, shard)
    for index, (chunk, gather, (first, last)) in enumerate(zip(plan.chunks, gathers, bounds, strict=True)):
        lengths = {
            "actual_seq_qlen": locations[index][1:],
            "actual_seq_kvlen": list(accumulate(chunk.lengths)),
            "query_start_loc": device[2 * index],
            "seq_lens": device[2 * index + 1],
        }
        yield ContextCall(slice(starts[first], starts[last]), gather, lengths)


def dummy_step(
    tokens: int, settings: ContextSettings, block_size: int, device: torch.device
) -> tuple[FiaCall, tuple[ContextCall, ...], FiaCall]:
    """The largest step there can be, over a cache of one block: (new tokens, context, absorbed) as in AscendMlaMetadata.

    One request has ``tokens`` new tokens and a context that fills the workspace; and there are ``tokens`` absorbed rows, in
    requests of ``block_size`` rows and keys.
    """

    def on_device(host: Tensor) -> Tensor:
        return host.to(device, torch.int32)

    def call(ends: list[int], **more: Any) -> FiaCall:
        starts = on_device(torch.tensor([0, *ends]))
        lengths = {"actual_seq_qlen": ends, "query_start_loc": starts, "seq_lens": starts.diff(), **more}
        return FiaCall(slice(0, tokens), lengths)

    table = torch.zeros(1, cdiv(settings.workspace, block_size), dtype=torch.int32, device=device)
    plan = plan_context([settings.workspace], settings.workspace, settings.alignment)
    context = tuple(context_calls(plan, [0, tokens], table, settings.shard, on_device))
    ends = [*range(block_size, tokens, block_size), tokens]
    keys = [end - start for start, end in pairwise([0, *ends])]
    paged = {"actual_seq_kvlen": keys, "block_table": table[:, :1].expand(len(ends), 1).contiguous(), "block_size": block_size}
    return call([tokens], actual_seq_kvlen=[tokens]), context, call(ends, **paged)


def shared_workspace(settings: ContextSettings, like: Tensor) -> Workspace:
    """The process's one workspace, of the dtype and on the device of ``like``; allocated by the profiling run."""

    def allocate() -> Workspace:
        dcp = settings.shard.dcp
        return Workspace(settings.workspace, like.dtype, like.device, dcp, _all_gather if dcp > 1 else None)

    workspace: Workspace = current_workspace_manager().get_persistent_resource("ASCEND_MLA workspace", allocate)
    return workspace


def _all_gather(rows: Tensor) -> Tensor:
    return get_dcp_group().all_gather(rows, dim=0)  # type: ignore[no-any-return]
