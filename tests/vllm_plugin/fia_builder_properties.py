"""Properties of AscendFiaMetadataBuilder.build, run as a program by test_fia_builder.py."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import CacheConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_plugin.attention.fia import AscendFiaMetadata, AscendFiaMetadataBuilder, splitting_pays

BLOCK_SIZE = 16
DEVICE = torch.device(current_platform.device_type)


def builder_of(mode: str, halves: int) -> AscendFiaMetadataBuilder:
    """A builder over one real layer, its cache bound with ``halves`` half pages from block to block."""
    config = VllmConfig(cache_config=CacheConfig(), parallel_config=ParallelConfig(), additional_config={"fia_split": mode})
    with set_current_vllm_config(config):
        layer = Attention(4, 64, 0.125, num_kv_heads=2, cache_config=config.cache_config, prefix="layers.0")
    shape, half = (3, 2, BLOCK_SIZE, 128), BLOCK_SIZE * 2 * 64
    memory = torch.zeros(shape[0] * halves * half, device=DEVICE)
    layer.kv_cache = memory.as_strided(shape, (halves * half, BLOCK_SIZE * 128, 128, 1))
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.float32)
    return AscendFiaMetadataBuilder(spec, ["layers.0"], config, DEVICE)


BUILDERS = {(mode, halves): builder_of(mode, halves) for mode in ("auto", "always", "never") for halves in (2, 3)}


def build(
    batch: list[tuple[int, int, bool]], builder: AscendFiaMetadataBuilder, padding: int
) -> tuple[AscendFiaMetadata, CommonAttentionMetadata]:
    """Metadata of requests (new tokens, cached tokens, still prefilling), sorted as vLLM's runner sorts them."""
    batch = sorted(batch, key=lambda request: (request[2], request[0] > 1))
    new = torch.tensor([request[0] for request in batch])
    lengths = new + torch.tensor([request[1] for request in batch])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)]).int()
    tokens = int(starts[-1])
    table = torch.arange(len(batch) * 8, dtype=torch.int32).view(len(batch), 8)
    slots = [
        int(table[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
        for row, (count, old, _) in enumerate(batch)
        for position in range(old, old + count)
    ]
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=lengths.int().to(DEVICE),
        seq_lens_cpu_upper_bound=lengths.int(),
        num_reqs=len(batch),
        num_actual_tokens=tokens,
        max_query_len=int(new.max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table.to(DEVICE),
        slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64, device=DEVICE),
        is_prefilling=torch.tensor([request[2] for request in batch]),
    )
    return builder.build(0, common), common


decode = st.tuples(st.just(1), st.integers(1, 100), st.just(False))
prefill = st.tuples(st.integers(1, 40), st.integers(0, 60), st.just(True))
batches = st.lists(st.one_of(decode, prefill), min_size=1, max_size=6)


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(batches, st.sampled_from(sorted(BUILDERS)), st.integers(0, 3))
def check(batch: list[tuple[int, int, bool]], which: tuple[str, int], padding: int) -> None:
    """Every request in one call, in order, with its own lengths; ids in half pages; a one-token prefill is a prefill."""
    mode, halves = which
    metadata, common = build(batch, BUILDERS[which], padding)
    decodes = sum(not prefilling for _, _, prefilling in batch)
    assert (metadata.num_decodes, metadata.num_prefills) == (decodes, len(batch) - decodes)
    starts = common.query_start_loc_cpu.tolist()
    assert [call.tokens.start for call in metadata.calls] == [0] + [call.tokens.stop for call in metadata.calls[:-1]]
    assert metadata.calls[-1].tokens.stop == starts[-1]
    keys = sum(1 + old for _, old, prefilling in batch if not prefilling)
    prefill_tokens = sum(new for new, _, prefilling in batch if prefilling)
    assert len(metadata.calls) == (2 if splitting_pays(mode, keys, prefill_tokens) else 1)
    request = 0
    for call in metadata.calls:
        lengths = call.lengths
        count = len(lengths["actual_seq_qlen"])
        rows = slice(request, request + count)
        assert [q + call.tokens.start for q in lengths["actual_seq_qlen"]] == starts[request + 1 : request + count + 1]
        assert lengths["query_start_loc"].tolist() == [0, *lengths["actual_seq_qlen"]]
        assert lengths["seq_lens"].tolist() == lengths["actual_seq_kvlen"] == common.seq_lens[rows].tolist()
        assert lengths["block_table"].tolist() == (common.block_table_tensor[rows] * halves).tolist()
        request += count
    assert request == len(batch)
    slots = [
        slot if slot < 0 else slot // BLOCK_SIZE * halves * BLOCK_SIZE + slot % BLOCK_SIZE
        for slot in common.slot_mapping.tolist()
    ]
    assert metadata.slot_mapping.tolist() == slots


if __name__ == "__main__":
    check()
    print("properties hold")
