"""ASCEND_MLA: multi-head latent attention (DeepSeek V2, V3 and R1, Kimi K2) on a paged latent cache.

A step's requests fall into two groups. Decodes and short extends run absorbed: the queries are taken into the latent
space, and all heads read the latent rows of the cache as one KV head. All others run in MHA form: causal attention over
their own new tokens, then the cached context, chunk by chunk through a workspace, up-projected to keys and values of each
head; the partial results merge by LSE as they come. mla_impl.py computes what this file plans.

A layer's memory is two regions: latent rows [blocks, block_size, 1, 512] first, then rope rows [blocks, block_size, 1, 64].
FIA wants each contiguous, and their widths differ, so no page can hold both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from mla_workspace.plan import plan_context
from npu_ops.fused_infer_attention import DTYPES, SPARSE_CAUSAL, SPARSE_NONE
from npu_ops.shards import local_length
from vllm_plugin.attention.dcp import host_to_device
from vllm_plugin.attention.fia import FiaCall
from vllm_plugin.attention.mla_context import ContextCall, ContextSettings, context_calls
from vllm_plugin.config import ParityConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_plugin.attention.mla_impl import AscendMlaImpl

# What CANN's FIA takes in its MLA form: these widths, these blocks, this many rows of a request.
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
BLOCK_SIZES = (16, 128)
ABSORBED_ROWS = 16


class AscendMlaBackend(AttentionBackend):
    """What ASCEND_MLA can serve, and its parts."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """The name in logs and for --attention-backend."""
        return "ASCEND_MLA"

    @staticmethod
    def get_impl_cls() -> type[AscendMlaImpl]:
        """One instance of it to a layer."""
        from vllm_plugin.attention.mla_impl import AscendMlaImpl

        return AscendMlaImpl

    @staticmethod
    def get_builder_cls() -> type[AscendMlaMetadataBuilder]:
        """One instance of it to a KV cache group."""
        return AscendMlaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """What FIA's MLA form takes on this platform; vLLM splits larger blocks into these."""
        return [size for size in BLOCK_SIZES if size in current_platform.kernel_block_sizes]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """A latent row and its rope part."""
        return [LATENT + ROPE]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """128, which Ascend's op advises; not vLLM's 16."""
        return 128

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layers outermost: only then is a layer's memory one run, to be cut into two regions."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)

    @classmethod
    def is_mla(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_dcp(cls) -> bool:
        """Decode context parallelism."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: Ascend's FIA and the CPU reference take the query lengths from the host."""
        return False

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """No: connectors copy single pages, and a page's rows lie in two regions."""
        return False

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Left to supports_combination, which can say what is supported."""
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, block_size: int | None, *rest: Any, **more: Any
    ) -> str | None:
        """The reason why this shape cannot be served, or None."""
        if head_size != LATENT + ROPE:
            return f"kv_lora_rank {LATENT} and qk_rope_head_dim {ROPE} are required, got {head_size} in all"
        if kv_cache_dtype not in (None, "auto") and kv_cache_dtype != str(dtype).removeprefix("torch."):
            return (
                f"--kv-cache-dtype must be auto or the model's own {dtype}, got {kv_cache_dtype}: "
                "quantised latent caches are not supported yet"
            )
        return None


@dataclass(frozen=True)
class AscendMlaMetadata:
    """What one KV cache group's layers need for one step. Requests in MHA form come after the absorbed ones.

    Under DCP no rank holds all keys of a request, so the causal mask of its new tokens fits none. There ``absorbed`` covers
    this rank's part of the cached context only, without a mask, and ``extend`` the new tokens of all requests.

    Attributes:
        tokens: rows of the batch that belong to requests; the rest is padding.
        slot_mapping: int64 [tokens]; padding, and under DCP what another rank keeps, is -1.
        absorbed: one FIA call in latent form over the paged cache, or None.
        extend: one causal FIA call of the other requests over their own new tokens, or None.
        context: the chunks of those requests' cached context, in order.
    """

    tokens: int
    slot_mapping: Tensor
    absorbed: FiaCall | None
    extend: FiaCall | None
    context: tuple[ContextCall, ...]


def absorbed_rows(latent: int = LATENT, rope: int = ROPE, nope: int = NOPE, value: int = VALUE) -> int:
    """The most new tokens of a request for which the absorbed form costs no more than the MHA form; 170 for DeepSeek.

    For each cached token and head, MHA form multiplies ``latent * (nope + value)`` times for the up-projection, and
    ``nope + rope + value`` times for each new token; absorbed form ``2 * latent + rope`` times for each new token and
    nothing else. The number of heads cancels, and so do the projections of the new tokens themselves.
    """
    return latent * (nope + value) // ((2 * latent + rope) - (nope + rope + value))


def pieces(rows: Sequence[int], keys: Sequence[int], most: int) -> Iterator[tuple[int, int, int]]:
    """(request, rows, keys) with at most ``most`` rows to a piece; each piece ends at the key of its last row."""
    for request, (count, total) in enumerate(zip(rows, keys, strict=True)):
        for begin in range(0, count, most):
            end = min(begin + most, count)
            yield request, end - begin, total - count + end


class AscendMlaMetadataBuilder(AttentionMetadataBuilder[AscendMlaMetadata]):
    """Turns vLLM's batch description into FIA's arguments, on the host, without waiting for the device."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        given = ParityConfig.of(vllm_config).mla_absorbed_rows
        self._absorbed_rows = absorbed_rows() if given is None else given
        self._init_reorder_batch_threshold(
            max(self._absorbed_rows, 1), supports_spec_as_decode=True, supports_dcp_with_varlen=True
        )
        self._block_size = kv_cache_spec.block_size
        self._context_settings = ContextSettings.of(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AscendMlaMetadata:
        """See the class; ``common_prefix_len`` and ``fast_build`` change nothing here."""
        batch = common_attn_metadata
        count = batch.num_reqs
        starts = batch.query_start_loc_cpu[: count + 1].tolist()
        assert batch.seq_lens_cpu_upper_bound is not None, "vLLM's runner fills the host copy of the lengths"
        # Exact: the upper bound differs from the length only under async speculative decoding.
        keys = batch.seq_lens_cpu_upper_bound[:count].tolist()
        rows = [end - start for start, end in pairwise(starts)]
        context = [total - new for total, new in zip(keys, rows, strict=True)]
        absorbed = self._count_absorbed(rows, context)
        shard = self._context_settings.shard
        first = 0 if shard.dcp > 1 else absorbed
        if shard.dcp > 1:
            keys = local_length(context, shard.rank, shard.dcp, shard.interleave)
        return AscendMlaMetadata(
            tokens=starts[-1],
            slot_mapping=batch.slot_mapping[: starts[-1]],
            absorbed=self._absorb(batch, rows[:absorbed], keys[:absorbed]) if absorbed else None,
            extend=self._extend(batch, starts, first) if first < count else None,
            context=self._context(batch, [start - starts[first] for start in starts], context, absorbed),
        )

    def _count_absorbed(self, rows: list[int], context: list[int]) -> int:
        """Requests at the front that run absorbed: vLLM sorts those with a context and few new tokens there."""
        for request, (new, cached) in enumerate(zip(rows, context, strict=True)):
            if cached == 0 or new > max(self._absorbed_rows, 1):
                return request
        return len(rows)

    def _absorb(self, batch: CommonAttentionMetadata, rows: list[int], keys: list[int]) -> FiaCall:
        table, sharded, tokens = batch.block_table_tensor, self._context_settings.shard.dcp > 1, sum(rows)
        if max(rows) > ABSORBED_ROWS:
            # FIA takes 16 rows of a request in this form: a longer extend runs as several, which see ever more keys.
            owners, rows, ends = (list(part) for part in zip(*pieces(rows, keys, ABSORBED_ROWS), strict=True))
            keys = [keys[owner] for owner in owners] if sharded else ends
            table = table.index_select(0, self._on_device(owners))
            starts = self._on_device([0, *accumulate(rows)])
            lens = self._on_device(keys)
        else:
            starts = batch.query_start_loc[: len(rows) + 1]
            lens = self._on_device(keys) if sharded else batch.seq_lens[: len(rows)]
        lengths = {
            "actual_seq_qlen": list(accumulate(rows)),
            "actual_seq_kvlen": keys,
            "query_start_loc": starts,
            "seq_lens": lens,
            "block_table": table[: len(rows)],
            "block_size": self._block_size,
            "sparse_mode": SPARSE_NONE if sharded else SPARSE_CAUSAL,
        }
        return FiaCall(slice(0, tokens), lengths)

    def _extend(self, batch: CommonAttentionMetadata, starts: list[int], first: int) -> FiaCall:
        origin = starts[first]
        ends = [start - origin for start in starts[first + 1 :]]
        location = batch.query_start_loc[first : len(starts)] - origin
        lengths = {
            "actual_seq_qlen": ends,
            "actual_seq_kvlen": ends,
            "query_start_loc": location,
            "seq_lens": location.diff(),
        }
        return FiaCall(slice(origin, starts[-1]), lengths)

    def _context(
        self, batch: CommonAttentionMetadata, starts: list[int], context: list[int], first: int
    ) -> tuple[ContextCall, ...]:
        if not any(context[first:]):
            return ()
        settings = self._context_settings
        plan = plan_context(context[first:], settings.workspace, settings.alignment, settings.plan)
        table = batch.block_table_tensor[first : batch.num_reqs]
        return tuple(context_calls(plan, starts[first:], table, settings.shard, self._on_device))

    def _on_device(self, values: list[int] | Tensor) -> Tensor:
        return host_to_device(values, self.device)
