"""FLOPs and bytes against a table that was computed by hand for an H200, and weights against those that memory counts."""

from __future__ import annotations

import pytest

from planner import step, work
from planner.figure import PlanError
from planner.parallel import Parallel
from planner.step import Dtypes, Step
from planner.weights import PRECISIONS, weights
from planner.work import Work

MILLION = 2**20
C = 8192
P = MILLION - C
BATCH, LONG = 64, 131072


def gqa(rows, prior, heads, kv_heads):
    return work.grouped(rows, work.pairs(rows, prior), prior + rows, heads, 128, 512 * kv_heads, decode=False)


def csa(heads, topk):
    picked = work.pairs(C, P, 4 * topk) / 4
    return work.compressed("csa", C, picked + 128 * C, picked, heads, 512, 1024)


def hca(heads):
    return work.compressed("hca", C, work.pairs(C, P) / 128 + 128 * C, MILLION / 128, heads, 512, 1024)


def decode(op, heads, keys):
    return work.compressed(op, BATCH, BATCH * keys, BATCH * keys, heads, 512, 584)


def scores(rows, prior, row, dtype):
    return work.index_scores(rows, work.pairs(rows, prior), prior + rows, 64, 128, row, dtype)


# Name, work, TFLOP and GB to three decimals.
TABLE = [
    ("GQA 64/8, chunk 8192 at 1M", gqa(C, P, 64, 8), 280.375, 4.563),
    ("GQA 64/8, chunk 16384 at 1M", gqa(2 * C, P - C, 64, 8), 558.552, 4.832),
    ("GQA 8/1, chunk 8192 at 1M", gqa(C, P, 8, 1), 35.047, 0.570),
    ("GQA 64/8, chunk 8192 at 128K", gqa(C, LONG - C, 64, 8), 34.085, 0.805),
    ("MLA in MHA form", work.expanded(C, work.pairs(C, P), MILLION, 128, 192, 128), 700.939, 86.570),
    ("its up-projection", work.up_projection(P, 128, 512, 256, 1152), 34.909, 69.415),
    ("MLA absorbed", work.absorbed(C, work.pairs(C, P), MILLION, 128, 512, 64, 1152), 2383.191, 3.490),
    ("sparse, 128 heads", work.sparse(C, C * 2048, 2048, 128, 512, 64, 1152), 4.673, 21.676),
    ("sparse, 64 heads", work.sparse(C, C * 2048, 2048, 64, 512, 64, 1152), 2.336, 20.535),
    ("sparse, 16 heads", work.sparse(C, C * 2048, 2048, 16, 512, 64, 1152), 0.584, 19.680),
    ("sparse decode, fp8", work.sparse(BATCH, BATCH * 2048, 2048, 128, 512, 64, 656), 0.037, 0.104),
    ("indexer, fp8", scores(C, P, 132, "fp8"), 140.188, 34.431),
    ("indexer, bf16", scores(C, P, 256, "bf16"), 140.188, 34.628),
    ("indexer at 128K, fp8", scores(C, LONG - C, 132, "fp8"), 17.042, 4.245),
    ("indexer decode", work.index_scores(BATCH, BATCH * LONG, BATCH * LONG, 64, 128, 132, "fp8"), 0.137, 1.141),
    ("top-k decode", work.top_k(BATCH * LONG, LONG), 0.0, 0.034),
    ("MLA decode, 128 heads", work.absorbed(BATCH, BATCH * LONG, BATCH * LONG, 128, 512, 64, 1152), 2.336, 9.682),
    ("MLA decode, 16 heads", work.absorbed(BATCH, BATCH * LONG, BATCH * LONG, 16, 512, 64, 1152), 0.292, 9.666),
    ("GQA decode", work.grouped(BATCH, BATCH * LONG, BATCH * LONG, 64, 128, 4096, decode=True), 0.275, 34.362),
    ("V4-Flash CSA", csa(64, 512), 0.687, 5.369),
    ("V4-Pro CSA", csa(128, 1024), 2.474, 10.737),
    ("V4-Flash HCA", hca(64), 8.899, 1.082),
    ("V4-Pro HCA", hca(128), 17.798, 2.156),
    ("V4-Flash CSA decode", decode("csa", 64, 640), 0.005, 0.032),
    ("V4-Flash HCA decode", decode("hca", 64, 8320), 0.070, 0.319),
    ("V4-Pro HCA decode", decode("hca", 128, 8320), 0.140, 0.328),
    ("merge of two", work.merge(C, 128, 128, 2), 0.0, 0.814),
    ("gather of 1M rows", work.gather(MILLION, 1152), 0.0, 2.416),
]


@pytest.mark.parametrize(("op", "tflop", "gigabytes"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_roofline_table(op: Work, tflop: float, gigabytes: float):
    assert op.flops / 1e12 == pytest.approx(tflop, abs=0.0006)
    assert op.bytes / 1e9 == pytest.approx(gigabytes, abs=0.0011)


def test_crossover_of_mlas_forms(shape):
    assert work.absorbed_rows(shape("deepseek_v3")) == pytest.approx(170.67, abs=0.01)


@pytest.mark.parametrize(
    ("rows", "prior", "cap", "expected"),
    [
        (4, 0, 100, 8),  # 4 x 4 / 2
        (4, 10, 100, 48),
        (4, 10, 5, 20),
        (8, 0, 4, 8 + 16),
        (8, 2, 6, 2 * 4 + 8 + 4 * 6),
        (8, 6, 6, 48),
    ],
)
def test_pairs(rows, prior, cap, expected):
    assert work.pairs(rows, prior, cap) == expected


def test_pairs_have_no_cap_unless_asked():
    assert work.pairs(10, 1000) == 10 * 1000 + 50


# Norms and biases are not multiplied: below 0.1 % of a layer.
@pytest.mark.parametrize(
    "name", ["llama3_70b", "llama3_405b", "qwen3_235b", "deepseek_v3", "deepseek_v32", "glm5", "deepseek_v4_pro"]
)
@pytest.mark.parametrize("tp", [1, 4])
def test_projections_are_the_weights_that_memory_counts(shape, name, tp):
    """Every matrix of the model is multiplied once a token: read in full, as a chunk visits all experts."""
    model, parallel = shape(name), Parallel(tp=tp)
    found = step.compute(model, parallel, Dtypes(), Step(1, 65536, 0))
    read = sum(op.count * op.bytes for op in found if op.op == "gemm" and op.part in ("projections", "moe"))
    parts = {figure.name: figure.value for figure in weights(model, "bf16", parallel)}
    there = parts["weights"] - parts["weights: embedding"] - parts.get("weights: residual", 0)
    assert read == pytest.approx(there, rel=2e-3)


def test_products_of_a_token(shape):
    """V3 has 37 billion active parameters (DeepSeek-V3's report, arXiv 2412.19437); embedding and MTP are not multiplied."""
    model = shape("deepseek_v3")
    found = step.compute(model, Parallel(), Dtypes(), Step(1, 1, 0))
    active = sum(op.count * op.flops for op in found if op.op == "gemm") / 2
    assert active == pytest.approx(37e9, rel=0.03)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_weights_dtypes(dtype):
    assert Dtypes(dtype).precision is PRECISIONS[dtype]


def test_unknown_weights():
    with pytest.raises(PlanError, match=r"weights in 'fp3' are not known. Known are bf16, fp8, int8, fp4"):
        _ = Dtypes("fp3").precision


def attention(model, parallel, at):
    return [op for op in step.compute(model, parallel, Dtypes(), at) if op.part == "attention"]


def test_what_a_rank_of_context_parallelism_has(shape):
    """DCP: part of the keys for the heads of all; DSA-CP: part of the rows with all heads; PCP: part of the rows."""
    mla, dsa = shape("deepseek_v3"), shape("deepseek_v32")
    decode = Step(4, 1, 65536, decode=True)
    (alone,), (shared,) = attention(mla, Parallel(tp=8), decode), attention(mla, Parallel(tp=8, dcp=8), decode)
    assert (alone.heads, shared.heads) == (16, 128)
    assert shared.flops == alone.flops
    outputs = 4 * 16 * 1088 * 2
    assert shared.bytes - 8 * outputs == (alone.bytes - outputs) / 8
    chunk = Step(1, 8192, 65536)
    (rows,), (heads,) = attention(dsa, Parallel(tp=8, dsa_cp=8), chunk), attention(dsa, Parallel(tp=8), chunk)
    assert (rows.heads, heads.heads) == (128, 16)
    assert rows.flops == heads.flops
    assert rows.bytes < heads.bytes / 4
    (tokens,) = attention(dsa, Parallel(tp=8, pcp=4), chunk)
    assert (tokens.heads, tokens.flops) == (16, heads.flops / 4)
    (sparse,) = attention(dsa, Parallel(tp=8, dcp=8), decode)
    assert (sparse.heads, sparse.flops) == (128, 2 * 128 * 1088 * 4 * 2048 / 8)
    scored = [
        sum(op.flops * op.count for op in step.compute(dsa, parallel, Dtypes(), chunk) if op.op == "indexer")
        for parallel in (Parallel(tp=8), Parallel(tp=8, dsa_cp=8), Parallel(tp=8, pcp=4))
    ]
    assert scored == [scored[0], scored[0] / 8, scored[0] / 4]


def test_mla_takes_the_cheaper_form(shape):
    model = shape("deepseek_v3")
    ops = [[op.op for op in attention(model, Parallel(), Step(1, rows, 200_000))] for rows in (170, 171)]
    # 200,000 cached tokens are two workspaces of 131,072, which two merges join.
    assert ops == [["mla_absorbed"], ["mla_prefill", "copy", "gemm", "copy", "copy"]]
    # Nothing is cached: nothing to gather, up-project or merge.
    assert [op.op for op in attention(model, Parallel(), Step(1, 171, 0))] == ["mla_prefill"]


def test_v4s_layers(shape):
    model = shape("deepseek_v4_flash")
    found = {op.op: op for op in attention(model, Parallel(), Step(1, 8192, P))}
    assert {name: op.count for name, op in found.items()} == {"window": 2, "csa": 21, "hca": 20}
    assert found["csa"].flops / 1e12 == pytest.approx(0.687, abs=0.0006)
    assert found["hca"].flops / 1e12 == pytest.approx(8.899, abs=0.0006)
    assert found["window"].flops == 4 * 64 * 512 * 8192 * 128
    # Queries and outputs, the window's rows once, and what lies behind it compressed; a short prompt has less than a window.
    for requests, rows, prior in ((1, 8192, P), (2, 8192, P), (2, 100, 0)):
        found = {op.op: op.bytes for op in attention(model, Parallel(), Step(requests, rows, prior))}
        moved, near = 2 * 2 * rows * 64 * 512, min(rows + 128, rows + prior)
        picked = work.pairs(rows, prior, 2048) / 4
        seen = {"window": near, "csa": near + picked, "hca": near + (rows + prior) / 128}
        assert found == {name: requests * (moved + 1024 * count) for name, count in seen.items()}
    indexer = next(op for op in step.compute(model, Parallel(), Dtypes(), Step(1, 8192, P)) if op.op == "indexer")
    assert (indexer.count, indexer.flops) == (21, 2 * 64 * 128 * work.pairs(8192, P) / 4)


def test_matrices_of_a_layer(shape):
    """To the element, as the modules of the public checkpoints have them."""
    v3, flash, dense = shape("deepseek_v32"), shape("deepseek_v4_flash"), shape("qwen3_235b")
    queries = 7168 * 1536 + 1536 * 128 * 192
    assert work.attention_weights(v3, 128, 1) == queries + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert work.attention_weights(v3, 16, 1) == 7168 * 1536 + (1536 * 192 + 512 * 256 + 128 * 7168) * 16 + 7168 * 576
    assert work.attention_weights(dense, 64, 4) == 4096 * 128 * (64 + 4 + 4 + 64)
    output = 1024 * 64 * 512 + 8 * 1024 * 4096
    assert work.attention_weights(flash, 64, 1) == 4096 * 1024 + 1024 * 64 * 512 + 4096 * 512 + output
    assert work.attention_weights(flash, 16, 1) == 4096 * 1024 + 1024 * 16 * 512 + 4096 * 512 + output / 4
    assert work.indexer_weights(v3) == 1536 * 64 * 128 + 7168 * 64 + 7168 * 128
    # Values and gates of two overlapping groups at ratio 4.
    assert work.indexer_weights(flash) == 1024 * 64 * 128 + 4096 * 64 + 2 * 4096 * 128 * 2
    assert work.compressor_weights(flash, 4, 512) == 2 * 4096 * 512 * 2
    assert work.compressor_weights(flash, 128, 512) == 2 * 4096 * 512


def test_what_moves_bytes_alone():
    for op in (work.top_k(8, 4), work.merge(8, 2, 4, 2), work.gather(8, 4)):
        assert op.flops == 0
    plain = work.linear("moe", 3, 5, 2, "fp8")
    assert (plain.flops, plain.bytes, plain.dtype, plain.heads, plain.serial, plain.count) == (30, 10, "fp8", 0, 0, 1)
    assert plain.times(7).count == 7


def test_experts_that_tokens_visit(shape):
    """One token visits its eight; evenly routed, a chunk visits nearly all, and few tokens meet in few."""
    model, expert = shape("deepseek_v3"), 3 * 7168 * 2048
    one, few, many = (work.routed_experts(rows, model, 4, 1, "fp8") for rows in (1, 32, 8192))
    assert (one.flops, one.bytes) == (2 * 8 * expert / 4, pytest.approx(8 * expert / 4))
    assert few.bytes == pytest.approx(256 * (1 - (1 - 8 / 256) ** 32) * expert / 4)
    assert (many.flops, many.bytes) == (8192 * one.flops, pytest.approx(256 * expert / 4))


def test_projections_of_a_rank(shape):
    """DSA-CP: a part of the rows through all heads' matrices, the indexer's too; compressors and experts see all rows."""
    chunk = Step(1, 8192, 65536)

    def matrices(name, parallel, part="projections"):
        ops = step.compute(shape(name), parallel, Dtypes(), chunk)
        return [(op.flops, op.count) for op in ops if op.op == "gemm" and op.part == part]

    model, flash = shape("deepseek_v32"), shape("deepseek_v4_flash")
    attention, indexer, head = matrices("deepseek_v32", Parallel(tp=8, dsa_cp=8))
    assert attention == (2 * 1024 * work.attention_weights(model, 128, 1), 61)
    assert indexer == (2 * 1024 * work.indexer_weights(model), 61)
    assert head == (2 * 129280 * 7168 / 8, 1)
    # The head's are those of the last token alone; dense layers count to the feed-forward.
    assert matrices("deepseek_v32", Parallel(tp=8), "moe")[0] == (2 * 8192 * 3 * 7168 * 18432 / 8, 3)
    attention, indexer, csa, hca, _ = matrices("deepseek_v4_flash", Parallel(tp=8, dsa_cp=8))
    assert attention == (2 * 1024 * work.attention_weights(flash, 64, 1), 43)
    assert indexer == (2 * 1024 * work.indexer_weights(flash), 21)
    assert (csa, hca) == ((2 * 8192 * 2 * 4096 * 512 * 2, 21), (2 * 8192 * 2 * 4096 * 512, 20))
    shared, router, routed = matrices("deepseek_v4_flash", Parallel(tp=8), "moe")
    assert shared == (2 * 8192 * 3 * 4096 * 2048 / 8, 43)
    assert router == (2 * 8192 * 256 * 4096, 43)
    assert routed == (2 * 8192 * 6 * 3 * 4096 * 2048 / 8, 43)
    # Experts are over data-parallel and context-parallel ranks too, whose tokens come together; shared ones are not.
    assert matrices("deepseek_v4_flash", Parallel(tp=2, pcp=4), "moe")[2][0] == routed[0]
    assert matrices("deepseek_v4_flash", Parallel(tp=2, pcp=4), "moe")[0][0] == shared[0]
