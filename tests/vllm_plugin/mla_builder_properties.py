"""Properties of AscendMlaMetadataBuilder.build, run as a program by test_mla_builder.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import CacheConfig, DeviceConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from mla_workspace.size import context_alignment
from npu_ops.shards import Shard
from vllm_plugin.attention.mla import ABSORBED_ROWS, AscendMlaMetadata, AscendMlaMetadataBuilder, absorbed_rows, pieces

BLOCK_SIZE, BLOCKS = 16, 24
DEVICE = torch.device(current_platform.device_type)


def builder_of(plan: str, rows: int | None, workspace: int) -> AscendMlaMetadataBuilder:
    """A builder with blocks of 16 and a small workspace, so that a few hundred tokens cross every boundary."""
    config = VllmConfig(
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(max_model_len=2048, is_encoder_decoder=False, max_num_seqs=6),
        device_config=DeviceConfig(device=current_platform.device_type),
        additional_config={"mla_context_plan": plan, "mla_absorbed_rows": rows, "mla_workspace_tokens": workspace},
    )
    spec = MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=576, dtype=torch.float32)
    return AscendMlaMetadataBuilder(spec, ["layers.0"], config, DEVICE)


BUILDERS = {
    (plan, rows, workspace): builder_of(plan, rows, workspace)
    for plan in ("proportional", "equal")
    for rows in (None, 0, 1, 20)
    for workspace in (96, 160)
}


def build(
    batch: list[tuple[int, int, bool]], builder: AscendMlaMetadataBuilder, padding: int
) -> tuple[AscendMlaMetadata, list[tuple[int, int, bool]]]:
    """Metadata of requests (new tokens, cached tokens, still prefilling), sorted as vLLM's runner sorts them."""
    threshold = builder.reorder_batch_threshold

    def region(request: tuple[int, int, bool]) -> int:
        new, cached, prefilling = request
        if not cached:
            return 3
        return 2 if new > threshold else int(prefilling)

    batch = sorted(batch, key=region)
    new = torch.tensor([request[0] for request in batch])
    lengths = new + torch.tensor([request[1] for request in batch])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)]).int()
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=lengths.int().to(DEVICE),
        seq_lens_cpu_upper_bound=lengths.int(),
        num_reqs=len(batch),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(new.max()),
        max_seq_len=int(lengths.max()),
        # Block ids that name their request and their place in it.
        block_table_tensor=(torch.arange(len(batch) * BLOCKS, dtype=torch.int32).view(len(batch), BLOCKS)).to(DEVICE),
        slot_mapping=torch.tensor([0] * int(starts[-1]) + [-1] * padding, dtype=torch.int64, device=DEVICE),
        is_prefilling=torch.tensor([request[2] for request in batch]),
    )
    return builder.build(0, common), batch


def positions(first: int, last: int, shard: Shard) -> list[int]:
    """Positions in the request of a rank's own rows ``first`` to ``last``."""
    turn = shard.dcp * shard.interleave
    return [
        row // shard.interleave * turn + shard.rank * shard.interleave + row % shard.interleave for row in range(first, last)
    ]


def absorbed_sees(metadata: AscendMlaMetadata, shard: Shard, seen: list[Counter[int]]) -> None:
    """Add the keys that each row of the absorbed call sees on this rank."""
    assert metadata.absorbed is not None
    lengths = metadata.absorbed.lengths
    assert lengths["query_start_loc"].tolist() == [0, *lengths["actual_seq_qlen"]]
    assert lengths["seq_lens"].tolist() == list(lengths["actual_seq_kvlen"])
    assert metadata.absorbed.tokens == slice(0, lengths["actual_seq_qlen"][-1])
    assert len(lengths["block_table"]) == len(lengths["actual_seq_kvlen"])
    assert lengths["sparse_mode"] == (3 if shard.dcp == 1 else 0)
    for (first, last), keys in zip(pairwise([0, *lengths["actual_seq_qlen"]]), lengths["actual_seq_kvlen"], strict=True):
        assert last - first <= ABSORBED_ROWS
        for row in range(first, last):
            hidden = last - 1 - row if shard.dcp == 1 else 0
            seen[row].update(positions(0, keys - hidden, shard))


def new_tokens_see(metadata: AscendMlaMetadata, batch: list[tuple[int, int, bool]], seen: list[Counter[int]]) -> None:
    """Add the new tokens that each row in MHA form sees."""
    assert metadata.extend is not None
    lengths, origin = metadata.extend.lengths, metadata.extend.tokens.start
    assert lengths["actual_seq_qlen"] == lengths["actual_seq_kvlen"]
    assert lengths["query_start_loc"].tolist() == [0, *lengths["actual_seq_qlen"]]
    bounds = list(pairwise([0, *lengths["actual_seq_qlen"]]))
    assert lengths["seq_lens"].tolist() == [last - first for first, last in bounds]
    for (first, last), (_, cached, _) in zip(bounds, batch[len(batch) - len(bounds) :], strict=True):
        for row in range(first, last):
            seen[origin + row].update(range(cached, cached + row - first + 1))


def chunks_show(metadata: AscendMlaMetadata, shard: Shard, ends: list[int], seen: list[Counter[int]]) -> None:
    """Add what each row sees of the chunks of context that this rank gathers."""
    origin = metadata.extend.tokens.start if metadata.extend else 0
    for chunk in metadata.context:
        rows, lens = chunk.lengths["actual_seq_qlen"], chunk.lengths["seq_lens"].tolist()
        assert chunk.lengths["query_start_loc"].tolist() == [0, *rows]
        assert chunk.lengths["actual_seq_kvlen"] == torch.tensor(lens).cumsum(0).tolist()
        assert chunk.gather.rows == sum(lens)
        table = chunk.gather.block_table[:, 0].tolist()
        own = zip(chunk.gather.seq_offset.tolist(), chunk.gather.seq_lens.tolist(), strict=True)
        for (first, last), (start, length), block in zip(pairwise([0, *rows]), own, table, strict=True):
            # The rows of a part belong to the request whose blocks are gathered for it.
            request = block // BLOCKS
            begin = origin + chunk.tokens.start
            assert (begin + first, begin + last) == (ends[request], ends[request + 1])
            for row in range(first, last):
                seen[origin + chunk.tokens.start + row].update(positions(start, start + length, shard))


decode = st.tuples(st.integers(1, 4), st.integers(1, 300), st.just(False))
extend = st.tuples(st.integers(1, 60), st.integers(0, 300), st.just(True))
batches = st.lists(st.one_of(decode, extend), min_size=1, max_size=6)


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(batches, st.sampled_from(sorted(BUILDERS, key=str)), st.sampled_from([(1, 1), (2, 1), (2, 16), (4, 8)]))
def check(batch: list[tuple[int, int, bool]], which: tuple[str, int | None, int], sharding: tuple[int, int]) -> None:
    """Over all ranks each row sees every key up to its own position, each once; few new tokens run absorbed, others do not."""
    builder = BUILDERS[which]
    usual = builder._context_settings
    tokens = sum(new for new, _, _ in batch)
    seen: list[Counter[int]] = [Counter() for _ in range(tokens)]
    for rank in range(sharding[0]):
        shard = Shard(rank, *sharding)
        alignment = context_alignment(BLOCK_SIZE, *sharding)
        if which[0] == "equal" and usual.workspace < alignment * len(batch):
            return  # refused at start
        builder._context_settings = replace(usual, shard=shard, alignment=alignment)
        metadata, ordered = build(batch, builder, padding=rank)
        builder._context_settings = usual
        assert metadata.tokens == tokens == len(metadata.slot_mapping)
        ends = [0, *accumulate(new for new, _, _ in ordered)]
        if metadata.absorbed:
            absorbed_sees(metadata, shard, seen)
        if metadata.extend and rank == 0:  # every rank has all new tokens at hand
            new_tokens_see(metadata, ordered, seen)
        chunks_show(metadata, shard, ends, seen)
        most = max(absorbed_rows() if which[1] is None else which[1], 1)
        absorbed = sum(new for new, cached, _ in batch if cached and new <= most)
        assert (metadata.absorbed.tokens.stop if metadata.absorbed else 0) == absorbed
    row = 0
    for new, cached, _ in ordered:
        for index in range(new):
            assert seen[row] == Counter(range(cached + index + 1)), (row, which)
            row += 1


def check_the_rule() -> None:
    """170 new tokens are the last that cost no more absorbed, counted by hand; pieces see ever more keys."""
    assert absorbed_rows() == 170
    for rows, cheaper in ((170, True), (171, False)):
        mha = 512 * (128 + 128) + rows * (128 + 64 + 128)
        assert (rows * (512 + 64 + 512) <= mha) is cheaper
    assert list(pieces([1, 33], [5, 100], 16)) == [(0, 1, 5), (1, 16, 83), (1, 16, 99), (1, 1, 100)]


if __name__ == "__main__":
    check_the_rule()
    check()
    print("properties hold")
