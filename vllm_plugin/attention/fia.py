"""ASCEND_FIA: decoder attention of GQA, MQA and MHA models through npu_ops.fused_infer_attention.

A mixed batch runs as two FIA calls, decodes and prefills, because FIA picks one tiling for each launch: in a single call
the decodes would run with the prefill's. The builder sorts decodes to the front, so each call is a slice of the batch.

FIA wants K and V as contiguous tensors of their own with one block table for both, while vLLM keeps one page to a block.
Each page is used as [K half | V half]; the key tensor is the layer's memory seen as a run of half pages, the value tensor
the same run from one half page later, and block ids count half pages. Pages stay whole for connectors and offloading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from npu_ops.fused_infer_attention import (
    DTYPES,
    HEAD_DIMS,
    SPARSE_BAND,
    SPARSE_CAUSAL,
    fused_infer_attention,
)
from npu_ops.scatter_kv_cache import scatter_kv_cache
from vllm_plugin.attention.dcp import host_to_device, shard_of
from vllm_plugin.attention.fia_dcp import ShardedStep, attend, plan_step
from vllm_plugin.config import ParityConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# `fia_split: auto`. On an H200 two calls were as fast or faster from these sizes on, up to five times, and slower below them
# (benchmarks/results/h200_fia_split.json). Not measured on an NPU.
SPLIT_MIN_DECODE_KEYS = 8192
SPLIT_MIN_PREFILL_TOKENS = 1024


class AscendFiaBackend(AttentionBackend):
    """What ASCEND_FIA can serve, and its parts."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """The name in logs and for --attention-backend."""
        return "ASCEND_FIA"

    @staticmethod
    def get_impl_cls() -> type[AscendFiaImpl]:
        """One instance of it to a layer."""
        return AscendFiaImpl

    @staticmethod
    def get_builder_cls() -> type[AscendFiaMetadataBuilder]:
        """One instance of it to a KV cache group."""
        return AscendFiaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """What the platform's FIA takes; vLLM splits larger blocks into these."""
        return list(current_platform.kernel_block_sizes)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """FIA's head dims."""
        return list(HEAD_DIMS)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """128, which Ascend's op advises; not vLLM's 16."""
        return 128

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layers outermost: only then are a layer's pages one run of memory."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)

    @classmethod
    def supports_dcp(cls) -> bool:
        """Decode context parallelism."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: Ascend's FIA and the CPU reference take the query lengths from the host."""
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        """Learnable sinks (gpt-oss)."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Sliding windows, as FIA's band mode."""
        return True

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Left to supports_combination, which can say what is supported."""
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, block_size: int | None, *rest: Any, **more: Any
    ) -> str | None:
        """The reason why this shape cannot be served, or None."""
        if head_size not in HEAD_DIMS:
            return f"a head dim of {HEAD_DIMS} is required, got {head_size}"
        if kv_cache_dtype not in (None, "auto") and kv_cache_dtype != str(dtype).removeprefix("torch."):
            return f"--kv-cache-dtype must be auto or the model's own {dtype}, got {kv_cache_dtype}"
        return None


@dataclass(frozen=True)
class FiaCall:
    """One FIA launch over a run of requests, lengths rebased to it.

    Attributes:
        tokens: rows of the batch that the call reads and writes.
        lengths: the length and table arguments of fused_infer_attention.
    """

    tokens: slice
    lengths: dict[str, Any]


@dataclass(frozen=True)
class AscendFiaMetadata:
    """What one KV cache group's layers need for one step.

    Attributes:
        calls: one FIA call, or two for a split batch; under DCP none.
        sharded: under DCP the step's calls, else None.
        tokens: rows of the batch that belong to requests; the rest is padding.
        slot_mapping: int64 [tokens], slots in half pages; padding is -1.
        num_decodes: requests that decode; they come first.
        num_prefills: all other requests.
    """

    calls: tuple[FiaCall, ...]
    slot_mapping: Tensor
    num_decodes: int
    num_prefills: int
    tokens: int
    sharded: ShardedStep | None = None


def splitting_pays(mode: str, decode_keys: int, prefill_tokens: int) -> bool:
    """Whether decodes and prefills run as two calls.

    ``auto``: when the decodes read at least 8,192 keys and the prefills bring at least 1,024 tokens.
    """
    if mode == "never" or decode_keys == 0 or prefill_tokens == 0:
        return False
    return mode == "always" or (decode_keys >= SPLIT_MIN_DECODE_KEYS and prefill_tokens >= SPLIT_MIN_PREFILL_TOKENS)


class AscendFiaMetadataBuilder(AttentionMetadataBuilder[AscendFiaMetadata]):
    """Turns vLLM's batch description into FIA's arguments, on the host, without waiting for the device."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True, supports_dcp_with_varlen=True)
        self._shard = shard_of(vllm_config)
        self._split = ParityConfig.of(vllm_config).fia_split
        self._block_size = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AscendFiaMetadata:
        """See the class; ``common_prefix_len`` and ``fast_build`` change nothing here."""
        batch = common_attn_metadata
        # A one-token tail of a prompt is a prefill: it must not pass as a decode, whatever its length.
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(
            batch,
            decode_threshold=self.reorder_batch_threshold or 1,
            treat_short_extends_as_decodes=batch.is_prefilling is None,
        )
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
        assert batch.seq_lens_cpu_upper_bound is not None, "vLLM's runner fills the host copy of the lengths"
        # Exact: the upper bound differs from the length only under async speculative decoding.
        kvlens = batch.seq_lens_cpu_upper_bound[: batch.num_reqs].tolist()
        halves = self._halves_to_a_page()
        table = batch.block_table_tensor * halves
        slots, tokens = self._half_page_slots(batch.slot_mapping, halves), starts[batch.num_reqs]
        if self._shard.dcp > 1:
            step = plan_step(
                starts, kvlens, batch.query_start_loc, table[: batch.num_reqs], self._block_size, self._shard, self._on_device
            )
            return AscendFiaMetadata((), slots, decodes, prefills, tokens, step)
        ranges = [(0, batch.num_reqs)]
        if splitting_pays(self._split, sum(kvlens[:decodes]), starts[batch.num_reqs] - decode_tokens):
            ranges = [(0, decodes), (decodes, batch.num_reqs)]
        calls = tuple(self._call(batch, table, starts, kvlens, first, last) for first, last in ranges)
        return AscendFiaMetadata(calls, slots, decodes, prefills, tokens)

    def _call(
        self, batch: CommonAttentionMetadata, table: Tensor, starts: list[int], kvlens: list[int], first: int, last: int
    ) -> FiaCall:
        origin = starts[first]
        lengths = {
            "actual_seq_qlen": [start - origin for start in starts[first + 1 : last + 1]],
            "actual_seq_kvlen": kvlens[first:last],
            "query_start_loc": batch.query_start_loc[first : last + 1] - origin,
            "seq_lens": batch.seq_lens[first:last],
            "block_table": table[first:last],
            "block_size": self._block_size,
        }
        return FiaCall(slice(origin, starts[last]), lengths)

    def _on_device(self, values: list[int]) -> Tensor:
        return host_to_device(values, self.device)

    def _halves_to_a_page(self) -> int:
        """Half pages from one block to the next in the layers' memory; 2 unless pages are padded."""
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        cache = next(iter(layers.values())).kv_cache
        return half_pages(cache) if cache.dim() == 4 else 2

    def _half_page_slots(self, slots: Tensor, halves: int) -> Tensor:
        # Block b, offset o: b * size + o becomes b * halves * size + o.
        moved = slots + (slots // self._block_size) * ((halves - 1) * self._block_size)
        return torch.where(slots < 0, slots, moved)


def half_pages(cache: Tensor) -> int:
    """Half pages from one block of a layer's cache [blocks, heads, block_size, 2 * D] to the next.

    Raises:
        ValueError: if blocks do not lie at whole half pages, which a padded page of odd size would cause.
    """
    half = cache[0].numel() // 2
    if cache.stride(0) % half:
        raise ValueError(
            f"ASCEND_FIA: blocks must lie at multiples of {half} elements, got {cache.stride(0)}. "
            "Give all layers of the model one head size, or turn KV cache padding off."
        )
    return cache.stride(0) // half


def split_page_halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value tensors [half pages, block_size, heads, D] over a layer's cache [blocks, heads, block_size, 2 * D].

    Both are contiguous and overlap in memory; page b holds its keys in key[b * halves], its values in value[b * halves].
    """
    blocks, heads, block_size, content = cache.shape
    shape = ((blocks - 1) * half_pages(cache) + 1, block_size, heads, content // 2)
    strides = (block_size * heads * shape[3], heads * shape[3], shape[3], 1)
    half = cache[0].numel() // 2
    start = cache.storage_offset()
    return cache.as_strided(shape, strides, start), cache.as_strided(shape, strides, start + half)


class AscendFiaImpl(AttentionImpl[AscendFiaMetadata]):
    """One layer's attention: write the new keys and values, then one or two FIA calls."""

    can_return_lse_for_decode = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        for feature, given in (("ALiBi", alibi_slopes), ("a logits soft cap", logits_soft_cap)):
            if given:
                raise ValueError(f"ASCEND_FIA: {feature} is not supported, and this model has it. Choose another model.")
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_kv_heads = num_kv_heads or num_heads
        self.scale = float(scale)
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self._shares_kv = kv_sharing_target_layer_name is not None
        self._style = "ag_rs"
        if self.dcp_world_size > 1:
            refused: dict[str, object] = {
                "a sliding window": sliding_window,
                "learnable sinks": sinks,
                "shared KV": kv_sharing_target_layer_name,
            }
            for feature, value in refused.items():
                if value is not None:
                    raise ValueError(
                        f"ASCEND_FIA: {feature} cannot be served with a sharded KV cache, and this model has it. "
                        "Leave out --decode-context-parallel-size."
                    )
            self._style = get_current_vllm_config().parallel_config.dcp_comm_backend
        self._options: dict[str, Any] = {
            "num_query_heads": num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "softmax_scale": self.scale,
            "sparse_mode": SPARSE_CAUSAL,
            "learnable_sink": sinks,
        }
        if sliding_window is not None:
            # vLLM counts the token itself as part of the window, FIA counts the tokens before it.
            self._options |= {"sparse_mode": SPARSE_BAND, "pre_tokens": sliding_window - 1, "next_tokens": 0}

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: AscendFiaMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend ``query`` [T, N, D] to the paged cache, after adding ``key`` and ``value`` [T, N_kv, D] to it.

        Fills and returns ``output``. Rows past the batch's tokens, and profiling runs without metadata, give 0.
        """
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("ASCEND_FIA: fused output quantisation is not supported. Turn the fusion pass off.")
        output = output.view(query.shape)
        if attn_metadata is None:
            return output.zero_()
        key_cache, value_cache = split_page_halves(kv_cache)
        slots = attn_metadata.slot_mapping
        if key is not None and value is not None and not self._shares_kv:
            scatter_kv_cache(key[: slots.shape[0]], value[: slots.shape[0]], key_cache, value_cache, slots)
        if attn_metadata.sharded and key is not None and value is not None:
            rows = slice(0, attn_metadata.tokens)
            caches = key_cache, value_cache
            output[rows] = attend(attn_metadata.sharded, query[rows], (key[rows], value[rows]), caches, self.scale, self._style)
        for call in attn_metadata.calls:
            out, _ = fused_infer_attention(query[call.tokens], key_cache, value_cache, **call.lengths, **self._options)
            output[call.tokens] = out
        output[attn_metadata.tokens :].zero_()
        return output
