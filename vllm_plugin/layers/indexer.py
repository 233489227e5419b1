"""The lightning indexer of sparse models, in place of vLLM's, which is made of kernels for NVIDIA and AMD.

vLLM's ``Indexer`` owns the weights. Its forward quantises by Triton kernels and is not run; its ``SparseAttnIndexer`` is
replaced by ours, and so is the cache of its keys: rows of the model's dtype, or in C8 form int8 with one fp16 scale each.
The keys of C8 are rotated by a Hadamard matrix first, which spreads outliers over all dims and leaves dot products alone.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SparseCacheRole
from vllm.v1.worker.workspace import current_workspace_manager

from npu_ops.dynamic_quant import dynamic_quant
from npu_ops.hadamard_rotation import hadamard_rotation
from npu_ops.lightning_indexer import lightning_indexer
from npu_ops.quant_lightning_indexer import quant_lightning_indexer
from npu_ops.rotary import rotary
from npu_ops.scatter_rows import scatter_rows
from sfa.quantised import c8_layers, read_description
from vllm_plugin.attention.sfa import AscendIndexerBackend, AscendIndexerMetadata
from vllm_plugin.config import ParityConfig

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionBackend

DIM = 128
SCALE_BYTES = 2
BLOCK_SIZE = 128
# The indexer's ops work on at least so many scores of a row.
MIN_SCORES = 8192


class IndexerCache(nn.Module, AttentionLayerBase):
    """Keys of one layer's indexer: [blocks, block_size, 1, 128], and in C8 form scales [blocks, block_size, 1] after them.

    Under DCP every rank holds the keys of all tokens, so a block has ``dcp`` times the rows of a latent block.
    """

    def __init__(self, prefix: str, quantised: bool) -> None:
        super().__init__()
        self.prefix, self.quantised = prefix, quantised
        self.kv_cache = torch.tensor([])
        config = get_current_vllm_config()
        self._dcp = config.parallel_config.decode_context_parallel_size
        # vLLM's registry of layers with a cache: ours in place of the one that vLLM's Indexer has made.
        config.compilation_config.static_forward_context[prefix] = self

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """vLLM's allocation [blocks, 1, block_size, row]."""
        self.kv_cache = kv_cache.squeeze(1)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """One row to a token, of this rank's tokens as vLLM counts them."""
        width, dtype = (DIM + SCALE_BYTES, torch.int8) if self.quantised else (DIM, vllm_config.model_config.dtype)
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=width * self._dcp,
            dtype=dtype,
            cache_role=SparseCacheRole.INDEXER,
        )

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The one that plans its steps."""
        return AscendIndexerBackend

    def regions(self) -> tuple[Tensor, Tensor]:
        """Keys [blocks, block_size, 1, 128] and scales [blocks, block_size, 1, 1], the latter empty if not quantised."""
        blocks, block_size, _ = self.kv_cache.shape
        shape, flat = (blocks * self._dcp, block_size, 1), self.kv_cache.view(-1)
        cut = blocks * self._dcp * block_size * DIM
        keys, scales = flat[:cut].view(*shape, DIM), flat[cut:]
        return keys, scales.view(torch.float16).view(*shape, 1) if self.quantised else scales


class ParitySparseAttnIndexer(SparseAttnIndexer):
    """Writes the new keys and fills the model's buffer [tokens, top-k] with the positions that each row attends to."""

    def __init__(self, k_cache: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(k_cache, *args, **kwargs)
        config = get_current_vllm_config()
        parity = ParityConfig.of(config)
        layer = extract_layer_index(k_cache.prefix)
        self.k_cache = IndexerCache(k_cache.prefix, parity.indexer_c8 and layer in indexer_c8_layers(config))
        assert self.topk_indices_buffer is not None, "the model makes one for all of its layers"
        self._picked: Tensor = self.topk_indices_buffer
        self._logits_bytes = parity.indexer_logits_bytes
        self._longest = config.model_config.max_model_len
        least = 4 * max(self._longest, MIN_SCORES)
        if self._logits_bytes < least:
            raise ValueError(
                f"--additional-config: indexer_logits_bytes of at least {least}, the fp32 scores of one row, are required for "
                f"max_model_len {self._longest}, got {self._logits_bytes}. Raise indexer_logits_bytes."
            )

    def forward_oot(self, hidden_states: Tensor, q_quant: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """The buffer, filled for the rows of the batch if there is anything to pick.

        Args:
            hidden_states: not used; vLLM passes it.
            q_quant: queries [T, heads, 128], rotated by position; quantised here where the cache is.
            k: keys [T, 128], likewise.
            weights: [T, heads], scales included.
        """
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            self._reserve(q_quant, weights)
            return self._picked
        plan: AscendIndexerMetadata = metadata[self.k_cache.prefix] if isinstance(metadata, dict) else metadata
        tokens = plan.tokens
        keys, scales = self.k_cache.regions()
        self._write(k[:tokens, None], plan.slot_mapping, keys, scales)
        if plan.scores:
            self._pick(q_quant[:tokens], weights[:tokens], keys, scales, plan)
        return self._picked

    def _write(self, key: Tensor, slots: Tensor, keys: Tensor, scales: Tensor) -> None:
        if self.k_cache.quantised:
            key, scale = dynamic_quant(hadamard_rotation(key))
            scatter_rows(scale.half(), slots, scales)
        scatter_rows(key.flatten(1), slots, keys)

    def _pick(self, query: Tensor, weights: Tensor, keys: Tensor, scales: Tensor, plan: AscendIndexerMetadata) -> None:
        options: dict[str, Any] = {
            "actual_seq_lengths_query": plan.query_lengths,
            "actual_seq_lengths_key": plan.key_lengths,
            "block_table": plan.block_table,
            "sparse_count": self.topk_tokens,
            "max_seq_len": plan.max_key_length,
            "logits_bytes": self._logits_bytes,
        }
        if self.k_cache.quantised:
            query, scale = dynamic_quant(hadamard_rotation(query))
            indices = quant_lightning_indexer(query, keys, weights.half(), scale.half(), scales.squeeze(-1), **options)
        else:
            indices = lightning_indexer(query, keys, weights, **options)
        self._picked[: plan.tokens] = indices.squeeze(1)

    def _reserve(self, query: Tensor, weights: Tensor) -> None:
        """In vLLM's profiling run: score once, with all rows of the batch, against the longest context there can be.

        The cache is one block, and every block of the context is that block: what scoring takes is left out of the KV cache.
        """

        def run() -> bool:
            blocks = -(-self._longest // BLOCK_SIZE)
            table = torch.zeros(1, blocks, dtype=torch.int32, device=query.device)
            one = torch.ones(1, dtype=torch.int32, device=query.device)
            dtype = torch.int8 if self.k_cache.quantised else query.dtype
            keys = torch.zeros(1, BLOCK_SIZE, 1, DIM, dtype=dtype, device=query.device)
            scales = torch.zeros(1, BLOCK_SIZE, 1, 1, dtype=torch.float16, device=query.device)
            plan = AscendIndexerMetadata(
                tokens=query.shape[0],
                slot_mapping=one.long(),
                block_table=table,
                query_lengths=one * query.shape[0],
                key_lengths=one,
                max_key_length=self._longest,
                scores=True,
            )
            self._pick(query, weights, keys, scales, plan)
            return True

        current_workspace_manager().get_persistent_resource("ASCEND_SFA indexer reserved", run)


def indexer_inputs(
    indexer: Any, hidden_states: Tensor, compressed: Tensor, positions: Tensor, rope: Any, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, heads, 128], keys [T, 128] and weights [T, heads] of vLLM's Indexer, which owns the parameters.

    Args:
        indexer: vLLM's.
        hidden_states: [T, hidden].
        compressed: [T, q_lora_rank], the query's latent row after its norm.
        positions: [T].
        rope: vLLM's rotary embedding, for its table.
        interleaved: whether the rotated pairs are neighbours (GLM), or element i and i + 32 (DeepSeek V3.2).
    """
    query = indexer.wq_b(compressed)[0].view(-1, indexer.n_head, indexer.head_dim)
    key, weights = indexer.wk_weights_proj(hidden_states)[0].split([indexer.head_dim, indexer.n_head], dim=-1)
    cos, sin = rope.cos_sin_cache.index_select(0, positions.flatten()).to(query.dtype).chunk(2, dim=-1)
    mode = "interleave" if interleaved else "half"
    query = rotary(query, cos, sin, rotary_mode=mode)
    key = rotary(indexer.k_norm(key)[:, None], cos, sin, rotary_mode=mode)
    return query, key.squeeze(1), weights * (indexer.softmax_scale * indexer.n_head_scale)


def indexer_c8_layers(vllm_config: VllmConfig) -> Container[int]:
    """Layers whose indexer may be quantised: those that a quantised checkpoint names, or all if it says nothing."""
    named = c8_layers(read_description(Path(vllm_config.model_config.model)))
    return range(vllm_config.model_config.hf_text_config.num_hidden_layers) if named is None else named


def register() -> None:
    """Put it in place of vLLM's class."""
    SparseAttnIndexer.register_oot(ParitySparseAttnIndexer, name="SparseAttnIndexer")
