"""The MLA layer of DeepSeek models around ASCEND_MLA: projections, then norm, rope, cache and attention in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

from sfa.settings import SparseSettings
from vllm_plugin.attention.sfa import AscendSfaC8Backend
from vllm_plugin.config import ParityConfig
from vllm_plugin.layers.indexer import indexer_inputs

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
        if self.is_sparse:
            config = get_current_vllm_config()
            self._interleaved = SparseSettings.of(config.model_config.hf_text_config).interleaved_rope
            if ParityConfig.of(config).sparse_kv_c8:
                self.mla_attn.attn_backend = AscendSfaC8Backend

    def forward(self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None) -> Tensor:
        """Attention output [T, hidden] of hidden_states [T, hidden] at positions [T]."""
        query, kv, compressed = self._project(hidden_states)
        if self.indexer is not None and not self.skip_topk:
            inputs = indexer_inputs(
                self.indexer, hidden_states, compressed, positions, self.indexer_rope_emb, self._interleaved
            )
            self.indexer.indexer_op(hidden_states, *inputs)
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

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, N, 192], latent rows [T, 576], neither rotated, the latter not normalised, and what queries came from."""
        compressed = hidden_states
        if self.q_lora_rank is None:
            query = self.q_proj(hidden_states)[0]
            kv = self.kv_a_proj_with_mqa(hidden_states)[0]
        else:
            both = self.fused_qkv_a_proj(hidden_states)[0]
            compressed, kv = both.split([self.q_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim], dim=-1)
            compressed = self.q_a_layernorm(compressed)
            query = self.q_b_proj(compressed)[0]
        return query.view(-1, self.num_heads, self.qk_head_dim), kv, compressed

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 32] of the tokens' positions, YaRN's magnitude included."""
        table = self.rotary_emb.cos_sin_cache.index_select(0, positions.flatten())
        cos, sin = table.to(dtype).chunk(2, dim=-1)
        return cos, sin


def register() -> None:
    """Put it in place of vLLM's class."""
    MultiHeadLatentAttentionWrapper.register_oot(ParityMultiHeadLatentAttention, name="MultiHeadLatentAttentionWrapper")
