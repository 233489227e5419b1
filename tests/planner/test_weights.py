"""Parameters to the unit, bytes of the published checkpoints, and how ranks share them."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.figure import PlanError
from planner.memory import named
from planner.parallel import Parallel
from planner.weights import PRECISIONS, parameters, stages, weights

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
GIB = 2**30


def total(*args, **kwargs):
    return weights(*args, **kwargs)[-1].value


@pytest.mark.parametrize(
    ("name", "mtp", "count"),
    [
        # The safetensors metadata that Hugging Face shows.
        ("llama3_70b", False, 70_553_706_496),
        ("llama3_405b", False, 405_853_388_800),
        ("qwen3_235b", False, 235_093_634_560),
        ("glm5", True, 753_864_139_008),
        # Of DeepSeek-V3's 684,531,386,000 elements those of the main model, without scales.
        ("deepseek_v3", False, 671_026_419_200),
    ],
)
def test_parameters_are_those_of_the_checkpoint(shape, name, mtp, count):
    assert parameters(shape(name), mtp) == count


def test_parameters_of_v4_are_those_of_its_tensors(shape):
    # Listed by shape in the checkpoints; the elements of fp4 matrices are stored in pairs.
    pro, flash = shape("deepseek_v4_pro"), shape("deepseek_v4_flash")
    expert = 3 * 7168 * 3072
    scales = expert // 32
    stored, pairs = 861_608_274_846, 62 * 384 * expert // 2
    hash_tables = 3 * (129280 * 6 - 384)  # those three layers have no bias
    matrices = 62 * (  # scales of fp8 matrices, to blocks of 128 x 128
        4 * 56 + 128 * 32 + 56 * 128 + 12 * 56 + 512 * 12 + 3 * 24 * 56) + 30 * 64 * 12 + 2 * 56 * 56  # fmt: skip
    assert parameters(pro, True) == stored + pairs - 62 * 384 * scales - hash_tables - matrices
    assert round(parameters(pro) / 1e12, 1) == 1.6
    assert round(parameters(flash) / 1e9) == 284


def test_bytes_of_checkpoints(shape):
    # GLM-5.2 shares the top-k of an indexer among four layers: to the byte, with biases in fp32.
    glm = shape("glm5", index_topk_freq=4, index_skip_topk_offset=3)
    assert total(glm, "bf16", mtp=True) == 1_506_659_919_872
    assert total(shape("deepseek_v4_pro"), "fp4", mtp=True) == pytest.approx(805.32 * GIB, rel=5e-5)
    assert total(shape("deepseek_v4_flash"), "fp4", mtp=True) == pytest.approx(148.65 * GIB, rel=2e-4)
    # DeepSeek-V3's holds a second embedding and head in the layer for multi-token prediction, and its norms in fp32.
    copies = 2 * 2 * 129280 * 7168
    assert total(shape("deepseek_v3"), "fp8", mtp=True) + copies == pytest.approx(688_574_839_360, rel=2e-5)
    assert total(shape("deepseek_v32"), "fp8", mtp=True) + copies == pytest.approx(642.12 * GIB, rel=2e-5)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
@pytest.mark.parametrize("dtype", ["bf16", "fp8", "int8", "fp4"])
def test_formulas_give_the_values(shape, evaluate, name, dtype):
    for parallel in (Parallel(), Parallel(tp=8), Parallel(tp=4, dp=2, pcp=2, pp=2), Parallel(tp=8, dsa_cp=8)):
        *parts, all_of_them = weights(shape(name), dtype, parallel)
        for figure in parts:
            # Bytes of an element are printed to six digits.
            assert evaluate(figure.formula) == pytest.approx(figure.value, rel=1e-5)
            assert figure.value > 0
        assert all_of_them.value == sum(figure.value for figure in parts)


def test_tensor_parallelism_divides_what_has_heads_and_widths(shape):
    model = shape("llama3_70b")
    whole, rank = weights(model), weights(model, parallel=Parallel(tp=8))
    assert named(rank, "weights: attention").value == named(whole, "weights: attention").value / 8
    assert named(rank, "weights: dense").value == named(whole, "weights: dense").value / 8
    assert named(rank, "weights: norms").value == named(whole, "weights: norms").value
    # 16 ranks on 8 KV heads: keys and values are there twice.
    queries, keys = 2 * 8192 * 8192, 2 * 8 * 128 * 8192
    assert named(weights(model, parallel=Parallel(tp=16)), "weights: attention").value == 80 * 2 * (queries / 16 + keys / 8)


def test_mla_keeps_what_is_shared_by_all_heads(shape):
    model = shape("deepseek_v3")
    shared = 7168 * (1536 + 512 + 64) + 1536 + 512
    heads = 1536 * 128 * 192 + 512 * 128 * 256
    output = 128 * 128 * 7168
    attention = named(weights(model, parallel=Parallel(tp=8)), "weights: attention").value
    assert attention == 61 * 2 * (shared + (heads + output) / 8)
    # DSA-CP: all heads on every rank, but for the output.
    attention = named(weights(model, parallel=Parallel(tp=8, dsa_cp=8)), "weights: attention").value
    assert attention == 61 * 2 * (shared + heads + output / 8)


def test_without_query_compression(shape):
    attention = named(weights(shape("deepseek_v3", q_lora_rank=None)), "weights: attention").value
    assert attention == 61 * 2 * (7168 * 128 * 192 + 7168 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 7168)


def test_experts_are_over_all_ranks_of_the_replicas(shape):
    model = shape("qwen3_235b")
    experts = named(weights(model), "weights: experts").value
    assert experts == 94 * 128 * 3 * 4096 * 1536 * 2
    for parallel, ranks in ((Parallel(tp=4, dp=2), 8), (Parallel(tp=4, pcp=2), 8), (Parallel(tp=8, ep=True), 8)):
        assert named(weights(model, parallel=parallel), "weights: experts").value == experts / ranks


def test_pipeline_stages_are_those_of_vllm(shape):
    model = shape("deepseek_v3")
    sizes = [len(stage) for stage in stages(model, 8)]
    assert sum(sizes) == 61
    assert sizes == [7, 7, 8, 8, 8, 8, 8, 7]
    assert [len(stage) for stage in stages(model, 2)] == [31, 30]
    assert [len(stage) for stage in stages(model, 61)] == [1] * 61
    assert stages(model, 4)[0] == range(15)


def test_the_fullest_stage_counts(shape):
    model = shape("deepseek_v3")
    # 61 layers in 2: the first stage has 3 dense layers among 31, the second 30 with experts.
    rank = weights(model, parallel=Parallel(pp=2))
    expert_layer = named(weights(model), "weights: experts").value / 58
    assert named(rank, "weights: experts").value == 30 * expert_layer
    assert "weights: embedding" not in [figure.name for figure in rank]
    assert named(rank, "weights: head").value == 2 * 129280 * 7168


def test_tied_heads(shape):
    untied, tied = shape("llama3_70b"), shape("llama3_70b", tie_word_embeddings=True)
    assert parameters(untied) - parameters(tied) == 128256 * 8192
    assert "weights: head" not in [figure.name for figure in weights(tied)]


def test_unknown_precision(shape):
    with pytest.raises(PlanError, match="bf16, fp8, int8, fp4"):
        weights(shape("llama3_70b"), "fp6")
    with pytest.raises(PlanError, match="weights: attention"):
        named(weights(shape("llama3_70b")), "weights: heads")


@pytest.mark.parametrize(
    ("dtype", "matrix", "expert"),
    [("bf16", 2, 2), ("fp8", 16388 / 16384, 16388 / 16384), ("int8", 1, 1), ("fp4", 16385 / 16384, 17 / 32)],
)
def test_bytes_of_an_element(shape, dtype, matrix, expert):
    assert (PRECISIONS[dtype].matrix, PRECISIONS[dtype].expert) == (matrix, expert)
    figures = weights(shape("qwen3_235b"), dtype)
    assert named(figures, "weights: experts").value == pytest.approx(94 * 128 * 3 * 4096 * 1536 * expert, rel=1e-12)
    projections = 2 * 4096 * 128 * (64 + 4)
    assert named(figures, "weights: attention").value == pytest.approx(94 * (projections * matrix + 2 * 256), rel=1e-12)


def test_two_ranks(shape):
    model = shape("deepseek_v3")
    rank = named(weights(model, parallel=Parallel(tp=2, dsa_cp=2)), "weights: attention").value
    output = 61 * 128 * 128 * 7168
    assert rank == named(weights(model), "weights: attention").value - output
    dense = named(weights(shape("llama3_70b"), parallel=Parallel(tp=2)), "weights: dense")
    assert dense.formula == f"{80 * 3 * 8192 * 28672:,} x 2 B / 2"


def test_the_sum_names_its_parts(shape):
    figure = weights(shape("llama3_70b"))[-1]
    assert (figure.name, figure.formula) == ("weights", "attention + norms + dense + embedding + head")


def test_two_residual_streams(shape):
    def residual(streams):
        return named(weights(shape("deepseek_v4_pro", hc_mult=streams)), "weights: residual").value

    assert residual(2) == 4 * (61 * 2 * (8 * 2 * 7168 + 8 + 3) + 2 * 2 * 7168 + 2 + 1)
    assert "weights: residual" not in [figure.name for figure in weights(shape("deepseek_v4_pro", hc_mult=1))]
