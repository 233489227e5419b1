"""ASCEND_SFA: sparse flash attention (DeepSeek V3.2, GLM-MoE-DSA) on the paged latent cache of ASCEND_MLA.

An indexer (layers/indexer.py) picks the ``index_topk`` positions that each query row attends to, and the absorbed queries
read those latent rows alone. Prefill and decode take the same path, and a batch keeps its order. While every context of a
batch is within the top-k there is nothing to pick, and the step is one of ASCEND_MLA.

The indexer's keys are a KV cache layer of their own with the same block ids. Under decode context parallelism the latent
cache is sharded and the indexer's keys are not: a block, which stands for ``block_size * dcp`` tokens, has that many rows
there. In C8 form a latent row is 656 packed bytes (sfa/packed.py) in place of 1,152.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata

from npu_ops.shards import local_length
from sfa.packed import PackedRow
from sfa.remap import gather_is_cheaper, most_blocks
from sfa.replicated import replicated_table, slots_of
from vllm_plugin.attention.mla import LATENT, NOPE, ROPE, VALUE, AscendMlaBackend, AscendMlaMetadata, AscendMlaMetadataBuilder
from vllm_plugin.attention.sfa_gather import BlockGather
from vllm_plugin.config import ParityConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

    from vllm_plugin.attention.sfa_impl import AscendSfaImpl

PACKED = PackedRow(LATENT, ROPE)
# Unrotated query dims and value dims of a head: DeepSeek V3.2, GLM-5. Absorbed, neither is seen any more.
HEAD_WIDTHS = ((NOPE, VALUE), (192, 256))


def index_topk(vllm_config: VllmConfig) -> int:
    """Positions that a query row of this model attends to."""
    return int(vllm_config.model_config.hf_text_config.index_topk)


class AscendSfaBackend(AscendMlaBackend):
    """What ASCEND_SFA can serve, and its parts."""

    @staticmethod
    def get_name() -> str:
        """The name in logs and for --attention-backend."""
        return "ASCEND_SFA"

    @staticmethod
    def get_impl_cls() -> type[AscendSfaImpl]:
        """One instance of it to a layer."""
        from vllm_plugin.attention.sfa_impl import AscendSfaImpl

        return AscendSfaImpl

    @staticmethod
    def get_builder_cls() -> type[AscendSfaMetadataBuilder]:
        """One instance of it to a KV cache group."""
        return AscendSfaMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        """Yes."""
        return True


class AscendSfaC8Backend(AscendSfaBackend):
    """ASCEND_SFA on packed rows of 656 bytes; layers/mla.py names it for the layers whose cache is quantised."""

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """A page of bytes."""
        return replace(spec, head_size=PACKED.width, dtype=torch.int8)


@dataclass(frozen=True)
class AscendSfaMetadata:
    """What one KV cache group's layers need for one step.

    Attributes:
        tokens: rows of the batch that belong to requests; the rest is padding.
        slot_mapping: int64 [tokens]; padding, and under DCP what another rank keeps, is -1.
        block_table: int32 [B, blocks], of this rank's cache.
        query_lengths: int32 [B], cumulative, without a leading 0.
        key_lengths: int32 [B], of the whole requests.
        local_key_lengths: int32 [B], on this rank; the same without DCP.
        gather: under DCP, how the rows that this batch picks come here; None if the queries go to the rows instead.
        dense: the step as one of ASCEND_MLA, if every context is within the top-k.
    """

    tokens: int
    slot_mapping: Tensor
    block_table: Tensor
    query_lengths: Tensor
    key_lengths: Tensor
    local_key_lengths: Tensor
    gather: BlockGather | None
    dense: AscendMlaMetadata | None


class AscendSfaMetadataBuilder(AscendMlaMetadataBuilder):
    """Lengths are taken from the device; host lengths only choose between ways that give the same result."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._topk = index_topk(vllm_config)
        self._can_be_dense = can_be_dense(vllm_config)
        shard = self._context_settings.shard
        if shard.dcp > 1 and self._block_size % shard.interleave:
            raise ValueError(
                f"--cp-kv-cache-interleave-size: one that divides ASCEND_SFA's block size {self._block_size} is required, "
                f"got {shard.interleave}. Use {self._block_size}."
            )
        self._row_bytes = kv_cache_spec.head_size * kv_cache_spec.dtype.itemsize
        self._heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)

    def build(  # type: ignore[override]
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AscendSfaMetadata:
        """See the class; ``common_prefix_len`` and ``fast_build`` change nothing here."""
        batch = common_attn_metadata
        count, tokens = batch.num_reqs, batch.num_actual_tokens
        dense = self._can_be_dense and fits(batch, self._topk)
        shard = self._context_settings.shard
        lengths = batch.seq_lens[:count]
        local = local_length(lengths, shard.rank, shard.dcp, shard.interleave) if shard.dcp > 1 else lengths
        return AscendSfaMetadata(
            tokens=tokens,
            slot_mapping=batch.slot_mapping[:tokens],
            block_table=batch.block_table_tensor[:count],
            query_lengths=batch.query_start_loc[1 : count + 1],
            key_lengths=lengths,
            local_key_lengths=local,
            gather=self._gather(batch) if shard.dcp > 1 and not dense else None,
            dense=super().build(common_prefix_len, batch, fast_build) if dense else None,
        )

    def _gather(self, batch: CommonAttentionMetadata) -> BlockGather | None:
        """Where gathering is cheaper than sending queries, and no more rows come than ASCEND_MLA's workspace has."""
        assert batch.seq_lens_cpu_upper_bound is not None, "vLLM's runner fills the host copy of the lengths"
        settings, count, tokens = self._context_settings, batch.num_reqs, batch.num_actual_tokens
        dcp, starts = settings.shard.dcp, batch.query_start_loc_cpu[: count + 1]
        contexts, rows = batch.seq_lens_cpu_upper_bound[:count].tolist(), starts.diff().tolist()
        capacity = most_blocks(contexts, rows, self._topk, self._block_size, dcp)
        fits_memory = capacity * dcp * self._block_size <= settings.workspace
        if not fits_memory or not gather_is_cheaper(
            capacity, tokens, self._heads * dcp, self._block_size, dcp, self._row_bytes
        ):
            return None
        row = torch.arange(tokens, dtype=torch.int32, device=self.device)
        requests = torch.searchsorted(batch.query_start_loc[1 : count + 1].contiguous(), row, right=True)
        return BlockGather(requests, batch.block_table_tensor[:count], self._block_size, settings.shard, capacity)


def can_be_dense(vllm_config: VllmConfig) -> bool:
    """Whether steps can be ASCEND_MLA's, which has a form of FIA for DeepSeek's widths alone and reads no packed rows."""
    config = vllm_config.model_config.hf_text_config
    widths = (config.qk_nope_head_dim, config.v_head_dim)
    return widths == (NOPE, VALUE) and not ParityConfig.of(vllm_config).sparse_kv_c8


def fits(batch: CommonAttentionMetadata, topk: int) -> bool:
    """Whether every context is within the top-k, so that every row attends to all that it may see."""
    return bool(batch.max_seq_len <= topk)


class AscendIndexerBackend(AttentionBackend):
    """The indexer's key cache: one vector of 128 to a token. Written and read by layers/indexer.py."""

    @staticmethod
    def get_name() -> str:
        """The name in logs."""
        return "ASCEND_SFA_INDEXER"

    @staticmethod
    def get_builder_cls() -> type[AscendIndexerMetadataBuilder]:
        """One instance of it to a KV cache group."""
        return AscendIndexerMetadataBuilder

    @staticmethod
    def get_impl_cls() -> Any:
        """None: no attention is computed on it."""
        raise NotImplementedError("The indexer's cache has no attention of its own.")

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Those of the latent cache, whose block table it shares."""
        return AscendSfaBackend.get_supported_kernel_block_sizes(kv_cache_spec)

    supported_kv_cache_layouts = AscendMlaBackend.supported_kv_cache_layouts


@dataclass(frozen=True)
class AscendIndexerMetadata:
    """What one KV cache group's indexers need for one step.

    Attributes:
        tokens: rows of the batch that belong to requests.
        slot_mapping: int64 [tokens] in the indexer's cache, which holds all tokens on every rank.
        block_table: int32 [B, blocks], of blocks of ``block_size`` rows.
        query_lengths: int32 [B], cumulative, without a leading 0.
        key_lengths: int32 [B].
        max_key_length: no element of ``key_lengths`` is larger.
        scores: whether positions are picked; not in a step that is one of ASCEND_MLA.
    """

    tokens: int
    slot_mapping: Tensor
    block_table: Tensor
    query_lengths: Tensor
    key_lengths: Tensor
    max_key_length: int
    scores: bool


class AscendIndexerMetadataBuilder(AttentionMetadataBuilder[AscendIndexerMetadata]):
    """Under DCP, expands vLLM's block table, whose blocks stand for the tokens of all ranks."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._topk = index_topk(vllm_config)
        self._can_be_dense = can_be_dense(vllm_config)
        self._block_size = kv_cache_spec.block_size
        self._dcp = vllm_config.parallel_config.decode_context_parallel_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AscendIndexerMetadata:
        """See the class; ``common_prefix_len`` and ``fast_build`` change nothing here."""
        batch = common_attn_metadata
        count, tokens = batch.num_reqs, batch.num_actual_tokens
        slots, table = batch.slot_mapping[:tokens], batch.block_table_tensor[:count]
        if self._dcp > 1:
            table = replicated_table(table, self._dcp)
            starts = batch.query_start_loc[: count + 1]
            slots = slots_of(starts, batch.seq_lens[:count], table, self._block_size, tokens)
        return AscendIndexerMetadata(
            tokens=tokens,
            slot_mapping=slots,
            block_table=table,
            query_lengths=batch.query_start_loc[1 : count + 1],
            key_lengths=batch.seq_lens[:count],
            max_key_length=batch.max_seq_len,
            scores=not (self._can_be_dense and fits(batch, self._topk)),
        )
