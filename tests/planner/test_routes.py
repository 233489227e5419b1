"""Six routes, by what each is for."""

from __future__ import annotations

import pytest

from planner.figure import PlanError
from planner.hardware import load
from planner.routes import CHUNKING, CONTEXT, LATENT, OFFLOAD, ROUTES, SPARSE, SPLIT, Setting, compare, stripped, take
from planner.work import attention_weights

SETTING = Setting(link=50e9, tier=64e9)


@pytest.fixture(scope="module")
def sparse_model():
    from planner.model import read_model

    return read_model("tests/data/configs/deepseek_v32.json")


@pytest.fixture(scope="module")
def found(sparse_model):
    return {route.names: route for route in compare(sparse_model, load("H200"), 1_000_000, SETTING)[0]}


def test_none_each_and_all(found):
    assert [*found] == [(), *((name,) for name in ROUTES), ROUTES]
    assert not found[()].fits
    assert found[ROUTES].fits
    assert found[ROUTES].ttft < found[()].ttft / 3


def test_chunks_are_for_activations_and_stalls(found):
    none, chunked = found[()], found[CHUNKING,]
    assert chunked.activations < none.activations / 100
    assert chunked.stall < none.stall / 50
    assert (chunked.kv, chunked.ttft) == (none.kv, pytest.approx(none.ttft, rel=0.01))


def test_context_parallelism_is_for_time(found):
    none, context = found[()], found[CONTEXT,]
    assert (none.cards, context.cards) == (8, 64)
    assert none.ttft / 8 < context.ttft < none.ttft / 4
    assert context.activations == pytest.approx(none.activations / 8, rel=0.05)


def test_latent_rows_are_for_memory(found):
    """16 heads of 192 + 128 on a rank against 576 for all."""
    none, latent = found[()], found[LATENT,]
    assert none.kv / latent.kv == pytest.approx(16 * 320 / 576)
    assert latent.kv == pytest.approx(70.3e9, rel=0.001)
    assert latent.tpot < none.tpot / 5


def test_sparse_attention_is_for_decode_and_needs_shared_scores(found):
    sparse, latent = found[SPARSE,], found[LATENT,]
    assert sparse.tpot < latent.tpot
    assert sparse.ttft > latent.ttft
    assert (
        sparse.note
        == "with it comes latent attention; each of 8 ranks scores all keys; context parallelism (dsa_cp) shares that out"
    )
    assert found[ROUTES].note == ""


def test_offload_is_for_prompts_that_come_again(found):
    none, offload = found[()], found[OFFLOAD,]
    assert none.again is None
    assert offload.again == pytest.approx(none.kv / 64e9 + none.tpot)
    assert offload.again < offload.ttft / 40


def test_disaggregation_is_for_stalls(found):
    none, split = found[()], found[SPLIT,]
    assert (none.stall, split.stall) == (none.ttft, 0)
    # The last of 61 layers is what is left to send.
    assert split.ttft - none.ttft == pytest.approx(none.kv / 61 / 50e9)


def test_routes_that_are_not_there(shape):
    dense = shape("llama3_70b")
    routes, missing = compare(dense, load("H200"), 131072)
    assert [route.names for route in routes] == [(), (CHUNKING,), (CONTEXT,), (CHUNKING, CONTEXT)]
    assert missing[OFFLOAD] == "the tier's B/s are not given"
    for name, reason in missing.items():
        with pytest.raises(PlanError, match=f"{name}: {reason}"):
            take((name,), dense, load("H200"), 131072)
    with pytest.raises(PlanError, match=r"sparse attention: .* has no indexer"):
        take((SPARSE,), shape("deepseek_v3"), load("H200"), 131072)
    with pytest.raises(PlanError, match=r"route 'magic' is not known. Known are chunked prefill, .* disaggregation"):
        take(("magic",), dense, load("H200"), 131072)


def test_stripped_models(shape):
    model = shape("deepseek_v32")
    assert stripped(model, latent=True, sparse=True) is model
    latent, plain = stripped(model, latent=True, sparse=False), stripped(model, latent=False, sparse=False)
    assert (latent.family, latent.indexer_layers) == ("mla", 0)
    # As many bytes and FLOPs in 128 heads of 160 as in keys of 192 and values of 128.
    assert (plain.family, plain.kv_heads, plain.head_dim) == ("gqa", 128, 160)
    assert attention_weights(plain, 128, 128) == 7168 * 4 * 128 * 160
    compressed = shape("deepseek_v4_pro")
    one, many = (stripped(compressed, latent, sparse=False) for latent in (True, False))
    assert (one.kv_heads, many.kv_heads, one.head_dim) == (1, 128, 512)
    dense = shape("llama3_70b")
    assert stripped(dense, latent=False, sparse=False) is dense
