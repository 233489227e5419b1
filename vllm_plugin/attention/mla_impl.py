"""One MLA layer's attention: what ASCEND_MLA's metadata (mla.py) plans, this computes."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import split_kv_b_proj
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.worker.workspace import current_workspace_manager

from mla_workspace.context import RunningMerge
from npu_ops.fused_infer_attention import SPARSE_CAUSAL, SPARSE_NONE, fused_infer_attention
from npu_ops.interleave_rope import interleave_rope
from npu_ops.kv_rmsnorm_rope_cache import kv_rmsnorm_rope_cache
from npu_ops.transpose_batchmatmul import transpose_batchmatmul
from vllm_plugin.attention.dcp import gather_heads, merge_over_ranks
from vllm_plugin.attention.fia import FiaCall
from vllm_plugin.attention.mla import ABSORBED_ROWS, LATENT, NOPE, ROPE, VALUE, AscendMlaMetadata
from vllm_plugin.attention.mla_context import ContextCall, ContextSettings, dummy_step, shared_workspace

UPSTREAM_FORWARD = "ASCEND_MLA serves models through MultiHeadLatentAttentionWrapper, and this one calls MLAAttention itself."


def split_regions(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Latent [blocks, block_size, 1, 512] and rope [blocks, block_size, 1, 64] regions of a layer's cache.

    Raises:
        ValueError: if the layer's memory is not one run, which padded pages would cause.
    """
    if not cache.is_contiguous():
        raise ValueError(f"ASCEND_MLA: a layer's cache must be one run of memory, got strides {cache.stride()}.")
    blocks, block_size, _ = cache.shape
    flat = cache.view(-1)
    cut = blocks * block_size * LATENT
    return flat[:cut].view(blocks, block_size, 1, LATENT), flat[cut:].view(blocks, block_size, 1, ROPE)


class _Parts(NamedTuple):
    """New latent [t, 512] and rope [t, 64] rows, and the caches that hold the earlier ones."""

    latent: Tensor
    rope: Tensor
    latent_cache: Tensor
    rope_cache: Tensor


class AscendMlaPrefill(MLAPrefillBackend):
    """A name for vLLM's layer, which wants a prefill backend; AscendMlaImpl prefills by itself."""

    @staticmethod
    def get_name() -> str:
        """The name in logs."""
        return "ASCEND_MLA"

    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Not reached."""
        raise NotImplementedError(UPSTREAM_FORWARD)

    def run_prefill_context_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Not reached."""
        raise NotImplementedError(UPSTREAM_FORWARD)


class AscendMlaImpl(MLAAttentionImpl[AscendMlaMetadata]):
    """Absorbed and MHA-form attention of one layer; layers/mla.py calls ``forward``."""

    name = "ASCEND_MLA"
    # What a head may have of unrotated query dims and of value dims.
    head_widths: ClassVar[tuple[tuple[int, int], ...]] = ((NOPE, VALUE),)
    supports_pcp = False
    can_return_lse_for_decode = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: torch.nn.Module,
        **others: Any,
    ) -> None:
        latent, heads = (kv_lora_rank, qk_rope_head_dim), (qk_nope_head_dim, v_head_dim)
        if latent != (LATENT, ROPE) or heads not in self.head_widths:
            either = " or ".join(f"qk_nope_head_dim {nope} and v_head_dim {value}" for nope, value in self.head_widths)
            raise ValueError(
                f"{self.name}: kv_lora_rank 512, qk_rope_head_dim 64, {either} are required, which Ascend's ops take, "
                f"got {(*latent, *heads)}. Choose another model."
            )
        wanted = {"sliding_window": sliding_window, "kv_sharing_target_layer_name": kv_sharing_target_layer_name}
        for name, value in wanted.items():
            if value is not None:
                raise ValueError(f"{self.name}: {name} is not supported, got {value}. Choose another model.")
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"{self.name}: decoder attention is required, got {attn_type}. Choose another model.")
        self.num_heads = num_heads
        self.head_size = head_size
        self.nope, self.value = heads
        self.scale = float(scale)
        self.num_kv_heads = 1
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_b_proj = kv_b_proj
        config = get_current_vllm_config()
        self._context_settings = ContextSettings.of(config)
        self._style = config.parallel_config.dcp_comm_backend
        self._sharded = self._context_settings.shard.dcp > 1

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Split kv_b_proj's weight into that of keys and that of values, each a matrix to a head and contiguous.

        Keys need [N, 128, 512] in both forms. Values need [N, 512, 128] in absorbed form and the transpose in MHA form.
        """
        keys, values = split_kv_b_proj(self.kv_b_proj, act_dtype, LATENT, self.num_heads, self.nope, self.value)
        self._key_weight = keys.permute(1, 2, 0).contiguous()
        self._value_weight = values.permute(1, 0, 2).contiguous()
        self._value_rows = values.permute(1, 2, 0).contiguous()

    def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
        """Not reached: vLLM's own forward of an MLA layer, which ours replaces."""
        raise NotImplementedError(UPSTREAM_FORWARD)

    def forward(
        self,
        query: Tensor,
        kv: Tensor,
        gamma: Tensor,
        epsilon: float,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        metadata: AscendMlaMetadata | None,
    ) -> Tensor:
        """Attention of the new tokens, after their latent rows are added to the cache.

        Args:
            query: [T, N, 192], the last 64 of each head not yet rotated.
            kv: [T, 576], the latent row not yet normalised, the last 64 not yet rotated; rows may be strided.
            gamma: [512], weight of the latent row's RMSNorm.
            epsilon: of that norm.
            cos: [T, 32] by the tokens' positions.
            sin: likewise.
            kv_cache: the layer's cache [blocks, block_size, 576].
            metadata: None in vLLM's profiling run, which reserves what a step can need.

        Returns:
            [T, N, 128]; 0 in rows past the batch's tokens.
        """
        output = query.new_empty((*query.shape[:2], self.value))
        if metadata is None:
            self._reserve(query)
            return output.zero_()
        tokens = metadata.tokens
        latent_cache, rope_cache = split_regions(kv_cache)
        query, kv, cos, sin = query[:tokens], kv[:tokens], cos[:tokens], sin[:tokens]
        rope, latent = kv_rmsnorm_rope_cache(
            kv, gamma, cos, sin, metadata.slot_mapping, rope_cache, latent_cache, epsilon=epsilon
        )
        query_rope = interleave_rope(query[..., self.nope :], cos, sin)
        absorbed, extend = metadata.absorbed, metadata.extend
        if extend:
            rows = extend.tokens
            full = torch.cat((query[rows][..., : self.nope], query_rope[rows]), -1)
            parts = _Parts(latent[rows], rope[rows], latent_cache, rope_cache)
            output[rows] = self._extend(full, parts, extend, metadata.context, absorbed if self._sharded else None)
        if absorbed and not self._sharded:
            rows = absorbed.tokens
            mixed, _ = self._latent_attention(
                query[rows][..., : self.nope], query_rope[rows], latent_cache, rope_cache, absorbed, return_softmax_lse=False
            )
            output[rows] = transpose_batchmatmul(mixed, self._value_weight)
        output[tokens:].zero_()
        return output

    def _latent_attention(
        self, nope: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, call: FiaCall, return_softmax_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """Latent rows [t, N, 512] and their LSE [t, N]: queries taken into the latent space, all heads on one KV head.

        Under DCP each rank attends with the heads of all ranks to its own part of the context; the parts merge by LSE.
        """
        absorbed = transpose_batchmatmul(nope, self._key_weight)
        if self._sharded:
            absorbed, query_rope = gather_heads(torch.cat((absorbed, query_rope), -1)).tensor_split((LATENT,), -1)
        out, lse = fused_infer_attention(
            absorbed,
            latent,
            latent,
            query_rope=query_rope,
            key_rope=rope,
            num_query_heads=absorbed.shape[1],
            num_key_value_heads=1,
            softmax_scale=self.scale,
            return_softmax_lse=self._sharded or return_softmax_lse,
            **call.lengths,
        )
        return merge_over_ranks(out, lse, self._style) if self._sharded else (out, lse)

    def _extend(
        self,
        query: Tensor,
        parts: _Parts,
        call: FiaCall,
        context: tuple[ContextCall, ...],
        absorbed: FiaCall | None,
    ) -> Tensor:
        """[t, N, 128] of requests in MHA form: new tokens first, then each part of their context, merged as it comes."""
        has_context = bool(context) or absorbed is not None
        out, lse = self._attend(query, parts.latent, parts.rope, call.lengths, SPARSE_CAUSAL, has_context)
        if not has_context:
            return out
        merged = RunningMerge(out, lse)
        if absorbed:
            rows = absorbed.tokens
            mine = query[rows]
            caches = parts.latent_cache, parts.rope_cache
            mixed, lse = self._latent_attention(mine[..., : self.nope], mine[..., self.nope :], *caches, absorbed, True)
            values = transpose_batchmatmul(mixed.to(query.dtype), self._value_weight)
            merged.add(rows, values, lse)
        for chunk in context:
            workspace = shared_workspace(self._context_settings, query)
            latent_rows, rope_rows = workspace.gather(parts.latent_cache, parts.rope_cache, chunk.gather)
            rows = chunk.tokens
            merged.add(rows, *self._attend(query[rows], latent_rows, rope_rows, chunk.lengths, SPARSE_NONE, True))
        return merged.out

    def _reserve(self, query: Tensor) -> None:
        """In vLLM's profiling run: take, once, the most that a step can need, so that it is left out of the KV cache.

        Nothing is estimated. One request's new tokens fill the batch, its context fills the workspace, and they run as
        they would in a step; then as many tokens run absorbed. All layers use the same memory, one after the other.
        """

        def run() -> bool:
            tokens = query.shape[0]
            extend, context, absorbed = dummy_step(tokens, self._context_settings, ABSORBED_ROWS, query.device)
            rows = [query.new_zeros(tokens, width) for width in (LATENT, ROPE)]
            caches = [query.new_zeros(1, ABSORBED_ROWS, 1, width) for width in (LATENT, ROPE)]
            query_rope = query[..., self.nope :].contiguous()  # lives as long as in forward
            full = torch.cat((query[..., : self.nope], query_rope), -1)
            self._extend(full, _Parts(rows[0], rows[1], caches[0], caches[1]), extend, context, None)
            del full
            self._latent_attention(query[..., : self.nope], query_rope, caches[0], caches[1], absorbed, self._sharded)
            return True

        current_workspace_manager().get_persistent_resource("ASCEND_MLA reserved", run)

    def _attend(
        self, query: Tensor, latent: Tensor, rope: Tensor, lengths: dict[str, Any], sparse_mode: int, return_softmax_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """MHA form over packed latent rows [k, 512] and rope rows [k, 64], up-projected to each head's keys and values."""
        latent, rope = latent.view(-1, LATENT), rope.view(-1, 1, ROPE)
        nope = torch.nn.functional.linear(latent, self._key_weight.flatten(0, 1)).view(-1, self.num_heads, self.nope)
        key = torch.cat((nope, rope.expand(-1, self.num_heads, -1)), -1)
        del nope  # before the values are made: this is the largest moment of a step
        value = torch.nn.functional.linear(latent, self._value_rows.flatten(0, 1)).view(-1, self.num_heads, self.value)
        return fused_infer_attention(
            query,
            key,
            value,
            num_query_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            softmax_scale=self.scale,
            sparse_mode=sparse_mode,
            return_softmax_lse=return_softmax_lse,
            **lengths,
        )
