"""One sparse layer's attention: what ASCEND_SFA's metadata (sfa.py) plans, this computes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.worker.workspace import current_workspace_manager

from npu_ops.fused_infer_attention import SPARSE_CAUSAL, SPARSE_NONE
from npu_ops.interleave_rope import interleave_rope
from npu_ops.kv_quant_sparse_flash_attention import kv_quant_sparse_flash_attention
from npu_ops.kv_rmsnorm_rope_cache import kv_rmsnorm_rope_cache
from npu_ops.pack_sparse_kv import pack_sparse_kv
from npu_ops.rms_norm import rms_norm
from npu_ops.scatter_rows import scatter_rows
from npu_ops.sparse_flash_attention import sparse_flash_attention
from npu_ops.transpose_batchmatmul import transpose_batchmatmul
from sfa.remap import local_indices
from vllm_plugin.attention.dcp import gather_heads, merge_over_ranks
from vllm_plugin.attention.mla import LATENT, ROPE
from vllm_plugin.attention.mla_impl import AscendMlaImpl, split_regions
from vllm_plugin.attention.sfa import HEAD_WIDTHS, PACKED, AscendSfaMetadata, index_topk


class AscendSfaImpl(AscendMlaImpl):
    """Absorbed attention of one layer to the rows that its indexer picks; layers/mla.py calls ``forward``."""

    name = "ASCEND_SFA"
    head_widths: ClassVar[tuple[tuple[int, int], ...]] = HEAD_WIDTHS

    def __init__(self, *args: Any, indexer: Any = None, topk_indices_buffer: Tensor | None = None, **others: Any) -> None:
        super().__init__(*args, indexer=indexer, **others)
        if topk_indices_buffer is None:
            raise ValueError("ASCEND_SFA: the model passes no buffer for the indexer's picks. Choose another model.")
        self._picked = topk_indices_buffer
        self._topk = index_topk(get_current_vllm_config())

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        kv: Tensor,
        gamma: Tensor,
        epsilon: float,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        metadata: AscendSfaMetadata | None,
    ) -> Tensor:
        """See AscendMlaImpl.forward; ``kv_cache`` may hold packed rows int8 [blocks, block_size, 656] instead."""
        if metadata is None:
            self._reserve_sparse(query)
            return super().forward(query, kv, gamma, epsilon, cos, sin, kv_cache, None)
        if metadata.dense is not None:
            return super().forward(query, kv, gamma, epsilon, cos, sin, kv_cache, metadata.dense)
        output = query.new_empty((*query.shape[:2], self.value))
        tokens = metadata.tokens
        query, kv, cos, sin = query[:tokens], kv[:tokens], cos[:tokens], sin[:tokens]
        caches: tuple[Tensor, ...]
        if kv_cache.dtype == torch.int8:
            caches = (self._write_packed(kv, gamma, epsilon, cos, sin, kv_cache, metadata.slot_mapping),)
        else:
            latent_cache, rope_cache = caches = split_regions(kv_cache)
            kv_rmsnorm_rope_cache(kv, gamma, cos, sin, metadata.slot_mapping, rope_cache, latent_cache, epsilon=epsilon)
        query_rope = interleave_rope(query[..., self.nope :], cos, sin)
        absorbed = transpose_batchmatmul(query[..., : self.nope], self._key_weight)
        indices = self._picked[:tokens].view(tokens, 1, -1)
        mixed = self._attend_sparse(absorbed, query_rope, caches, indices, metadata)
        output[:tokens] = transpose_batchmatmul(mixed, self._value_weight)
        output[tokens:].zero_()
        return output

    def _write_packed(
        self, kv: Tensor, gamma: Tensor, epsilon: float, cos: Tensor, sin: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> Tensor:
        latent = rms_norm(kv[:, :LATENT].contiguous(), gamma, epsilon=epsilon)
        rope = interleave_rope(kv[:, None, LATENT:], cos, sin)
        cache = kv_cache.view(*kv_cache.shape[:2], 1, PACKED.width)
        scatter_rows(pack_sparse_kv(latent, rope.squeeze(1)), slots, cache)
        return cache

    def _attend_sparse(
        self, absorbed: Tensor, query_rope: Tensor, caches: tuple[Tensor, ...], indices: Tensor, metadata: AscendSfaMetadata
    ) -> Tensor:
        """Latent rows [t, N, 512] of this rank's heads."""
        lengths = {"actual_seq_lengths_query": metadata.query_lengths}
        if not self._sharded:
            lengths |= {"block_table": metadata.block_table, "actual_seq_lengths_kv": metadata.key_lengths}
            return self._sparse(absorbed, query_rope, caches, indices, lengths, SPARSE_CAUSAL)[0]
        # The causal limit is in the picks: every one of them was visible to its row.
        if metadata.gather is not None:
            indices, caches, gathered = metadata.gather.bring(indices, caches)
            return self._sparse(absorbed, query_rope, caches, indices, lengths | gathered, SPARSE_NONE)[0]
        lengths |= {"block_table": metadata.block_table, "actual_seq_lengths_kv": metadata.local_key_lengths}
        shard = self._context_settings.shard
        absorbed, query_rope = gather_heads(torch.cat((absorbed, query_rope), -1)).tensor_split((LATENT,), -1)
        indices = local_indices(indices, shard)
        out, lse = self._sparse(absorbed, query_rope, caches, indices, lengths, SPARSE_NONE)
        return merge_over_ranks(out, lse, self._style)[0].to(absorbed.dtype)

    def _sparse(
        self,
        absorbed: Tensor,
        query_rope: Tensor,
        caches: tuple[Tensor, ...],
        indices: Tensor,
        lengths: dict[str, Tensor],
        sparse_mode: int,
    ) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {
            **lengths,
            "scale_value": self.scale,
            "sparse_mode": sparse_mode,
            "return_softmax_lse": sparse_mode == SPARSE_NONE,
        }
        if len(caches) == 1:
            query = torch.cat((absorbed, query_rope), -1)
            return kv_quant_sparse_flash_attention(query, caches[0], indices, **options)
        latent, rope = caches
        return sparse_flash_attention(
            absorbed.contiguous(), latent, indices, query_rope=query_rope.contiguous(), key_rope=rope, **options
        )

    def _reserve_sparse(self, query: Tensor) -> None:
        """In vLLM's profiling run: one sparse step with all rows of the batch, as it would run."""

        def run() -> bool:
            tokens, device = query.shape[0], query.device
            caches = tuple(query.new_zeros(1, 128, 1, width) for width in (LATENT, ROPE))
            query_rope = interleave_rope(query[..., self.nope :], *(query.new_zeros(tokens, ROPE // 2) for _ in range(2)))
            absorbed = transpose_batchmatmul(query[..., : self.nope], self._key_weight)
            one = torch.ones(1, dtype=torch.int32, device=device)
            metadata = AscendSfaMetadata(
                tokens=tokens,
                slot_mapping=one.long(),
                block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
                query_lengths=one * tokens,
                key_lengths=one,
                local_key_lengths=one,
                gather=None,
                dense=None,
            )
            indices = self._picked[:tokens].view(tokens, 1, -1).fill_(-1)
            transpose_batchmatmul(self._attend_sparse(absorbed, query_rope, caches, indices, metadata), self._value_weight)
            return True

        current_workspace_manager().get_persistent_resource("ASCEND_SFA reserved", run)
