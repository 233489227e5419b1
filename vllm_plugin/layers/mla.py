"""The MLA layer of DeepSeek models around ASCEND_MLA: projections, then norm, rope, cache and attention in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

if TYPE_CHECKING:
    from vllm_plugin.attention.mla_impl import AscendMlaImpl


class ParityMultiHeadLatentAttention(MultiHeadLatentAttentionWrapper):
    """vLLM's wrapper with its own forward; weights, cache and backend are set up by vLLM's classes.

    vLLM norms and rotates in the wrapper and writes the cache in its attention layer. Ascend's op does all three at once,
    so the attention layer is only asked for its backend and its cache.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.rotary_emb is None or self.rotary_emb.is_neox_style:
            raise ValueError("ASCEND_MLA: interleaved rotary embeddings are required. Choose another model.")
        if self.dcp_q_replicate:
            raise ValueError("ASCEND_MLA: replicated query projections are not supported. Unset VLLM_DCP_Q_REPLICATE.")
        if self.num_heads > 128:
            raise ValueError(f"ASCEND_MLA: at most 128 heads a rank, got {self.num_heads}. Raise --tensor-parallel-size.")

    def forward(self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None) -> Tensor:
        """Attention output [T, hidden] of hidden_states [T, hidden] at positions [T]."""
        query, kv = self._project(hidden_states)
        if llama_4_scaling is not None:
            query = query * llama_4_scaling
        cos, sin = self._angles(positions, query.dtype)
        layer = self.mla_attn
        impl: AscendMlaImpl = layer.impl
        metadata = get_forward_context().attn_metadata
        out = impl.forward(
            query,
            kv,
            self.kv_a_layernorm.weight,
            self.kv_a_layernorm.variance_epsilon,
            cos,
            sin,
            layer.kv_cache,
            metadata[layer.layer_name] if isinstance(metadata, dict) else metadata,
        ).flatten(1)
        if self.g_proj is not None:
            out = out * self.g_proj(hidden_states)[0].sigmoid()
        return self.o_proj(out)[0]  # type: ignore[no-any-return]

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, N, 192] and latent rows [T, 576], neither rotated, the latter not normalised."""
        if self.q_lora_rank is None:
            query = self.q_proj(hidden_states)[0]
            kv = self.kv_a_proj_with_mqa(hidden_states)[0]
        else:
            both = self.fused_qkv_a_proj(hidden_states)[0]
            compressed, kv = both.split([self.q_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim], dim=-1)
            query = self.q_b_proj(self.q_a_layernorm(compressed))[0]
        return query.view(-1, self.num_heads, self.qk_head_dim), kv

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 32] of the tokens' positions, YaRN's magnitude included."""
        table = self.rotary_emb.cos_sin_cache.index_select(0, positions.flatten())
        cos, sin = table.to(dtype).chunk(2, dim=-1)
        return cos, sin


def register() -> None:
    """Put it in place of vLLM's class."""
    MultiHeadLatentAttentionWrapper.register_oot(ParityMultiHeadLatentAttention, name="MultiHeadLatentAttentionWrapper")
