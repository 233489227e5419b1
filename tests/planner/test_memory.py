"""Bytes of caches, blocks, workspace and activations: the numbers that are often quoted, right and wrong, and each formula."""

from __future__ import annotations

import pytest

from mla_workspace import size
from planner.figure import PlanError
from planner.memory import (
    activations,
    blocks,
    caches,
    kv_bytes,
    kv_tokens,
    left_for_kv,
    named,
    request_bytes,
    requests_that_fit,
    workspace,
)
from planner.parallel import Parallel

GIB, MIB = 2**30, 2**20
MILLION, FULL = 1_000_000, 1_048_576
MODELS = (
    "llama3_70b",
    "llama3_405b",
    "qwen3_235b",
    "deepseek_v3",
    "deepseek_v32",
    "glm5",
    "deepseek_v4_pro",
    "deepseek_v4_flash",
)


def value(figures, name):
    return named(figures, name).value


def test_a_latent_row_is_1152_bytes(shape):
    row = named(kv_bytes(shape("deepseek_v3")), "latent rows: row")
    assert (row.value, row.unit, row.formula) == (1152, "B", "2 B x (512 + 64)")


def test_a_million_tokens_are_7813_blocks():
    count, table = blocks(MILLION, 128)
    assert (count.value, count.formula) == (7813, "ceil(1,000,000 / 128)")
    assert table.value == 4 * 7813
    assert value(blocks(MILLION, 128, max_num_seqs=3), "block table") == 3 * 4 * 7813
    assert blocks(MILLION) == blocks(MILLION, 128, 1)
    assert value(blocks(MILLION, 128, parallel=Parallel(tp=8, dcp=8)), "blocks") == 977


@pytest.mark.parametrize("tp", [1, 8, 16])
def test_a_million_tokens_take_1_152_gb_of_each_layer_on_every_rank(shape, tp):
    figures = kv_bytes(shape("deepseek_v3"), parallel=Parallel(tp=tp), tokens=MILLION)
    layer = named(figures, "latent rows: one layer")
    assert layer.value == 1.152e9
    # 1.15 GB for the whole model forgets the layers.
    assert "this layer alone, the rank has 61" in layer.source
    assert value(figures, "KV of the rank") == 61 * 1.152e9
    assert round(value(figures, "KV of the rank") / 1e9, 1) == 70.3


def test_the_workspace_of_131072_tokens(shape):
    figures = workspace(shape("deepseek_v3"), max_model_len=131072, max_num_seqs=8)
    assert value(figures, "workspace tokens") == 131072
    latent = value(figures, "workspace latent rows")
    # Half of the 288 MB that is often quoted.
    assert (round(latent / 1e6), latent / MIB) == (151, 144)
    assert round(value(figures, "up-projected keys") / 1e9, 2) == 6.44


def test_34_6_gb_for_a_million_tokens(shape):
    # 60 layers, as DeepSeek-V2 has them, at one byte to an element; in 16 bits it is twice that.
    model = shape("deepseek_v3", num_hidden_layers=60)
    one_byte, two = (value(kv_bytes(model, dtype, tokens=MILLION), "KV of the rank") for dtype in ("fp8", "bf16"))
    assert round(one_byte / 1e9, 1) == 34.6
    assert two == 2 * one_byte


def test_packed_rows_are_656_bytes(shape):
    for dtype in ("c8", "fp8"):
        row = named(kv_bytes(shape("deepseek_v32"), dtype), "latent rows: row")
        assert (row.value, row.formula) == (656, "1 B x 512 + 2 B x 64 + 4 B x 512 / 128")


@pytest.mark.parametrize(("dtype", "row"), [("bf16", 256), ("c8", 130), ("fp8", 132)])
def test_rows_of_the_indexer(shape, dtype, row):
    assert value(kv_bytes(shape("deepseek_v32"), "bf16", dtype), "indexer keys: row") == row
    assert value(kv_bytes(shape("deepseek_v4_pro"), "bf16", dtype), "indexer keys: row") == row


@pytest.mark.parametrize(
    ("name", "dtype", "gib"),
    [
        ("deepseek_v32", "bf16", 83.875),
        ("deepseek_v4_pro", "bf16", 9.617),
        ("deepseek_v4_flash", "bf16", 6.719),
        ("deepseek_v32", "fp8", 46.941),
        ("deepseek_v4_pro", "fp8", 5.382),
    ],
)
def test_kv_of_1048576_tokens(shape, name, dtype, gib):
    # As published: 83.88, 9.62 and 6.72 GiB in bf16; 46.9 and 5.38 in fp8.
    assert round(value(kv_bytes(shape(name), dtype, tokens=FULL), "KV of the rank") / GIB, 3) == gib


def test_caches_of_v4(shape):
    figures = kv_bytes(shape("deepseek_v4_pro"), tokens=MILLION)
    assert value(figures, "CSA rows: one layer") == 250_000 * 1024
    assert value(figures, "HCA rows: one layer") == 7812 * 1024  # the last 64 tokens are no group yet
    assert value(figures, "window rows: one layer") == 128 * 1024
    assert value(figures, "CSA compressor state: one layer") == 65536
    assert value(figures, "indexer compressor state: one layer") == 16384
    assert value(figures, "HCA compressor state: one layer") == 524288
    fixed = 61 * 128 * 1024 + 30 * (65536 + 16384) + 31 * 524288
    assert value(figures, "KV that does not grow") == fixed
    assert value(kv_bytes(shape("deepseek_v4_pro"), tokens=1), "KV that does not grow") == fixed
    assert value(kv_bytes(shape("deepseek_v4_pro"), "fp8"), "window rows: row") == 584
    assert "KV that does not grow" not in [figure.name for figure in kv_bytes(shape("deepseek_v32"))]


@pytest.mark.parametrize(
    ("name", "tp", "dtype", "row"),
    [
        ("llama3_70b", 1, "bf16", 2 * 8 * 128 * 2),
        ("llama3_70b", 8, "bf16", 2 * 128 * 2),
        ("llama3_70b", 16, "bf16", 2 * 128 * 2),  # two ranks to a KV head
        ("llama3_70b", 8, "fp8", 2 * 128),
        ("qwen3_235b", 2, "c8", 2 * 2 * 128),
    ],
)
def test_keys_and_values_of_grouped_heads(shape, name, tp, dtype, row):
    figures = kv_bytes(shape(name), dtype, parallel=Parallel(tp=tp), tokens=1000)
    assert value(figures, "keys and values: row") == row
    assert value(figures, "KV of the rank") == row * 1000 * shape(name).layers
    assert named(figures, "keys and values: all layers").source == "KV heads are divided over TP"


def test_ranks_of_dcp_share_tokens_but_not_the_indexer_s(shape):
    figures = kv_bytes(shape("deepseek_v32"), parallel=Parallel(tp=8, dcp=8), tokens=MILLION)
    assert value(figures, "latent rows: one layer") == 125_000 * 1152
    assert value(figures, "indexer keys: one layer") == MILLION * 256
    assert "over 8 ranks of DCP" in named(figures, "latent rows: one layer").source
    figures = kv_bytes(shape("llama3_70b"), parallel=Parallel(tp=16, dcp=2), tokens=MILLION)
    assert value(figures, "keys and values: one layer") == 500_000 * 512
    assert "over 2 ranks of DCP" in named(figures, "keys and values: one layer").source


def test_a_pipeline_stage_holds_its_layers(shape):
    assert value(kv_bytes(shape("deepseek_v3"), parallel=Parallel(pp=8), tokens=MILLION), "KV of the rank") == 8 * 1.152e9
    sharing = shape("glm5", index_topk_freq=4, index_skip_topk_offset=3)
    figures = kv_bytes(sharing, parallel=Parallel(pp=2))
    assert value(figures, "latent rows: all layers") == 39 * 1152
    assert value(figures, "indexer keys: all layers") == 11 * 256
    # Stages of 15, 15, 16 and 15 layers: the third has 8 of each kind.
    found = {cache.name: cache.layers for cache in caches(shape("deepseek_v4_pro"), parallel=Parallel(pp=4))}
    assert (found["CSA rows"], found["HCA rows"], found["window rows"]) == (8, 8, 16)


@pytest.mark.parametrize(
    ("name", "kv_dtype", "indexer_dtype", "message"),
    [
        ("llama3_70b", "fp4", None, "bf16, fp8, c8"),
        ("deepseek_v3", "c8", None, "bf16, fp8."),
        ("deepseek_v4_pro", "c8", None, "bf16, fp8."),
        ("deepseek_v32", "bf16", "int4", "bf16, c8, fp8"),
    ],
)
def test_unknown_cache_dtypes(shape, name, kv_dtype, indexer_dtype, message):
    with pytest.raises(PlanError) as error:
        caches(shape(name), kv_dtype, indexer_dtype)
    assert message in str(error.value)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_formulas_give_the_values(shape, evaluate, name, dtype):
    model = shape(name)
    for parallel in (Parallel(), Parallel(tp=8), Parallel(tp=16, pp=2, dcp=2), Parallel(tp=8, dsa_cp=8, pcp=2)):
        figures = [
            *kv_bytes(model, dtype, parallel=parallel, tokens=123_456),
            *blocks(123_456, 64, 7, parallel),
            *workspace(model, 123_456, 7, 128, parallel),
            *activations(model, 8192, 123_456, 7, parallel=parallel),
            left_for_kv(64e9, 20e9, 3e9, 1e9),
            requests_that_fit(caches(model, dtype, parallel=parallel), 40e9, 123_456),
            kv_tokens(caches(model, dtype, parallel=parallel), 40e9, 131072),
        ]
        for figure in figures:
            assert figure.source
            if figure.name == "workspace tokens":
                unit = 128  # the formula before it is rounded down
                assert figure.value == evaluate(figure.formula) // unit * unit
            elif figure.name == "KV cache size":
                assert figure.value == pytest.approx(evaluate(figure.formula), rel=1e-4)
            elif figure.name != "activation peak":
                assert figure.value == evaluate(figure.formula), figure


@pytest.mark.parametrize("longest", [1, 1000, 4096, 16384, 131072, MILLION])
@pytest.mark.parametrize("requests", [1, 8, 64, 2000])
@pytest.mark.parametrize(("block", "dcp", "interleave"), [(128, 1, 1), (16, 1, 1), (128, 2, 1), (128, 8, 1), (128, 3, 128)])
def test_the_workspace_is_that_of_mla_workspace(shape, longest, requests, block, dcp, interleave):
    parallel = Parallel(tp=8, dcp=dcp)
    figures = workspace(shape("deepseek_v3"), longest, requests, block, parallel, interleave)
    tokens = size.workspace_tokens(longest, requests, size.context_alignment(block, dcp, interleave))
    assert value(figures, "workspace tokens") == tokens
    assert value(figures, "workspace latent rows") == size.workspace_bytes(tokens, dcp=dcp)
    up = value(figures, "up-projected keys") + value(figures, "up-projected values")
    assert up == size.up_projected_bytes(tokens, heads=16)
    if dcp > 1:
        assert value(figures, "gathered under DCP") == size.exchange_bytes(tokens, dcp)
    else:
        assert "gathered under DCP" not in [figure.name for figure in figures]


def test_defaults_of_the_workspace(shape):
    # 3 ranks and blocks of 128: tokens alternate among the ranks unless an interleave is given.
    model, parallel = shape("deepseek_v3"), Parallel(tp=3, dcp=3)
    assert workspace(model, 4096, 2000, 128, parallel) == workspace(model, 4096, 2000, 128, parallel, interleave=1)
    assert workspace(model, 4096, 2000, 128, parallel)[0].formula.endswith("2000 x 384)")


def test_workspaces_of_other_families(shape):
    assert workspace(shape("llama3_70b"), MILLION, 8) == workspace(shape("deepseek_v4_pro"), MILLION, 8) == []
    # Sparse attention up-projects contexts within its top-k only.
    assert value(workspace(shape("deepseek_v32"), MILLION, 8), "workspace tokens") == 8 * 2048
    glm = workspace(shape("glm5"), MILLION, 8)
    assert value(glm, "up-projected keys") == 2 * 256 * 64 * 8 * 2048
    assert value(glm, "up-projected values") == 2 * 256 * 64 * 8 * 2048
    assert value(workspace(shape("deepseek_v3"), MILLION, 8, itemsize=4), "workspace latent rows") == 4 * 576 * 131072


def test_activations_of_grouped_attention(shape):
    figures = activations(shape("llama3_70b"), 8192, MILLION, 4, parallel=Parallel(tp=8))
    assert value(figures, "residual") == 2 * 8192 * 2 * 8192
    assert value(figures, "attention") == 2 * 8192 * 9 * 2 * 128
    assert value(figures, "dense layer") == 2 * 8192 * 3 * 3584
    assert value(figures, "logits") == 4 * 128256 * 6
    assert value(figures, "activation peak") == 2 * 8192 * 2 * 8192 + 2 * 8192 * 3 * 3584
    assert named(figures, "activation peak").formula == "residual + feed-forward (the largest part)"


def test_activations_of_latent_attention(shape):
    figures = activations(shape("deepseek_v3"), 8192, MILLION, 8, parallel=Parallel(tp=1))
    context = 131072 * 128 * 320 * 2
    merged = size.partial_bytes(8192, 128)
    assert value(figures, "attention") == 2 * 8192 * 128 * 640
    assert value(figures, "merge of partial results") == merged
    assert value(figures, "activation peak") == 2 * 2 * 8192 * 7168 + 2 * 8192 * 128 * 640 + context + merged
    assert "attention" in named(figures, "activation peak").formula


def test_activations_of_sparse_attention(shape):
    figures = activations(shape("deepseek_v32"), 8192, MILLION, 8, parallel=Parallel(tp=8))
    assert value(figures, "attention") == 2 * 8192 * 16 * (192 + 576 + 512 + 128)
    assert value(figures, "indexer queries") == 2 * 8192 * 64 * 128
    assert value(figures, "indexer scores") == 512 * MIB
    assert "134 rows at a time" in named(figures, "indexer scores").source
    short = activations(shape("deepseek_v32"), 64, 8192, 8, parallel=Parallel(tp=8))
    assert value(short, "indexer scores") == 4 * 64 * 8192
    assert "64 rows at a time" in named(short, "indexer scores").source
    # DSA-CP has an eighth of the rows with all heads: the same attention, an eighth of the indexer's queries.
    split = activations(shape("deepseek_v32"), 8192, MILLION, 8, parallel=Parallel(tp=8, dsa_cp=8))
    assert value(split, "attention") == value(figures, "attention")
    assert value(split, "indexer queries") == value(figures, "indexer queries") / 8
    halves = activations(shape("deepseek_v32"), 8192, MILLION, 8, parallel=Parallel(tp=2, dsa_cp=2))
    assert value(halves, "attention") == 2 * 4096 * 128 * 1408


def test_activations_of_v4(shape):
    figures = activations(shape("deepseek_v4_pro"), 8192, MILLION, 8, parallel=Parallel(tp=8))
    assert value(figures, "residual") == 2 * 8192 * 8 * 7168
    assert value(figures, "attention") == 2 * 8192 * 16 * 2 * 512
    small = activations(shape("deepseek_v4_pro"), 128, 8192, 8, parallel=Parallel(tp=8))
    assert value(small, "indexer scores") == 4 * 128 * 2048


def test_activations_of_experts(shape):
    model = shape("qwen3_235b")
    for parallel, inner in ((Parallel(tp=4), 384), (Parallel(tp=4, dp=2), 192), (Parallel(tp=4, ep=True), 1536)):
        experts = value(activations(model, 1000, 4096, parallel=parallel), "experts")
        assert experts == 2 * 8000 * max(4096 + 3 * inner, 2 * 4096 + inner)
    assert value(activations(model, 1000, 4096, parallel=Parallel(pcp=4)), "experts") == 2 * 2000 * (2 * 4096 + 384)
    # The larger of a dense layer and one with experts.
    v3 = activations(shape("deepseek_v3", num_experts_per_tok=1), 1000, 4096)
    assert value(v3, "dense layer") == 2 * 1000 * 3 * 18432
    assert value(v3, "logits") == 129280 * 6
    logits = activations(shape("llama3_70b"), 1, 4096, max_num_seqs=1024)
    assert "logits" in named(logits, "activation peak").formula


def test_what_is_left():
    left = left_for_kv(141e9, 80e9, 10e9, 1e9, utilization=0.9)
    assert left.value == pytest.approx(141e9 * 0.9 - 91e9)
    assert left_for_kv(100, 0, 0).value == 92
    assert left_for_kv(80e9, 100e9, 1e9).value < 0


def test_requests_take_whole_blocks(shape):
    found = caches(shape("deepseek_v3"))
    assert request_bytes(found, 1) == request_bytes(found, 128) == 61 * 128 * 1152
    assert request_bytes(found, 129) == 2 * 61 * 128 * 1152
    sharded = caches(shape("deepseek_v32"), parallel=Parallel(tp=8, dcp=8))
    assert request_bytes(sharded, 1) == 61 * 128 * (1152 + 8 * 256)
    v4 = caches(shape("deepseek_v4_pro"))
    fixed = sum(cache.size(0) for cache in v4)
    assert request_bytes(v4, 1) == fixed + 128 * (30 * 1280 + 31 * 1024)
    assert request_bytes(v4, 513) == fixed + 128 * (60 * 1280 + 31 * 1024)


def test_requests_that_fit(shape):
    found = caches(shape("deepseek_v3"))
    each = request_bytes(found, MILLION)
    for left, count in ((each, 1), (each - 1, 0), (10 * each + 5, 10), (-1, 0)):
        assert requests_that_fit(found, left, MILLION).value == count


def test_tokens_of_a_pool(shape):
    found = caches(shape("deepseek_v3"))
    block = 61 * 128 * 1152
    for memory, tokens in ((block, 128), (block - 1, 0), (10 * block + 5, 1280)):
        assert kv_tokens(found, memory, max_model_len=2048).value == tokens
    # vLLM multiplies concurrency by the longest request: blocks that it fills in part count as that part.
    assert kv_tokens(found, 10 * block, max_model_len=200).value == 1000
    sharded = caches(shape("deepseek_v3"), parallel=Parallel(tp=8, dcp=8))
    assert kv_tokens(sharded, 10 * block, max_model_len=2048).value == 10240
    v4 = caches(shape("deepseek_v4_pro"))
    assert kv_tokens(v4, 3 * request_bytes(v4, 4096), max_model_len=4096).value == 3 * 4096


def test_kv_tokens_under_dcp_count_whole_blocks_of_all_ranks(shape):
    """A block and a half hold what one block holds, 128 tokens on each of two ranks."""
    found = caches(shape("deepseek_v3"), parallel=Parallel(tp=2, dcp=2))
    assert kv_tokens(found, 1.5 * request_bytes(found, 256), 256).value == 256


def test_workspace_of_many_ranks_interleaves_by_single_tokens(shape):
    [tokens, *_] = workspace(shape("deepseek_v3"), 1040, 1, parallel=Parallel(tp=128, dcp=128))
    assert tokens.value == 8 * 1040
