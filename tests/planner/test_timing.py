"""Seconds and bytes on links, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner import step
from planner.figure import PlanError
from planner.hardware import Efficiency, Hardware, Share, Sourced, load
from planner.parallel import Parallel
from planner.search import candidates, room, smallest
from planner.step import Dtypes, Step
from planner.timing import PARTS, decode_step, offload_break_even, op_seconds, prefill, transfer
from planner.work import Work


def sourced(value):
    return Sourced(value, "datasheet", "round numbers")


ROUND = Hardware(
    "round", bf16_flops=sourced(1e12), hbm_bytes=sourced(1e15), hbm_bandwidth=sourced(1e9), scale_up=sourced(1e8),
    scale_up_cards=sourced(8), scale_out=sourced(1e7),
)  # fmt: skip
IDEAL = Efficiency()


def sent(model, parallel, at, dtypes=None):
    return {entry.name: entry for entry in step.traffic(model, parallel, dtypes or Dtypes(), at)}


@pytest.mark.parametrize(
    ("flops", "bytes", "seconds", "bound"),
    [(1e12, 1e8, 2.0, "compute"), (1e11, 1e9, 4.0, "memory"), (0, 1e6, 0.6, "latency")],
)
def test_an_op_takes_the_longest(flops, bytes, seconds, bound):
    shares = Efficiency(((("op", "bf16", 0), Share(0.5, 0.25, 0.001, "a test")),))
    op = Work("op", "attention", flops, bytes, "", serial=600)
    assert op_seconds(op, ROUND, shares) == (pytest.approx(seconds), bound, "a test")


def test_the_five_parts(shape):
    found = prefill(shape("deepseek_v32"), load("H200"), Parallel(tp=8), 65536, 8192)
    assert [part.name for part in found.parts] == [*PARTS] == ["indexer", "attention", "projections", "moe", "communication"]
    assert [part.bound for part in found.parts] == ["compute", "compute", "compute", "compute", "link"]
    assert [chunk.prior for chunk in found.chunks] == [*range(0, 65536, 8192)]
    assert found.seconds == pytest.approx(sum(part.seconds for part in found.parts))
    assert found.seconds == pytest.approx(sum(chunk.seconds for chunk in found.chunks))
    last = found.chunks[-1]
    assert last.part("indexer").seconds == last.parts[0].seconds > found.chunks[0].part("indexer").seconds
    # Each part can be traced to its terms.
    figures = last.part("indexer").figures()
    assert [figure.name for figure in figures] == ["indexer", "indexer: indexer", "indexer: top_k"]
    assert figures[0].value == pytest.approx(figures[1].value + figures[2].value)
    assert figures[1].formula.startswith("61 layers x (2 x 64 heads x 128 x ")
    assert "h200_lightning_indexer.json" in figures[1].source


def test_a_cached_prefix_and_an_odd_end(shape):
    model, device = shape("llama3_70b"), load("H200")
    whole, rest = (prefill(model, device, None, 20000, 8192, cached=cached) for cached in (0, 8192))
    assert [chunk.tokens for chunk in whole.chunks] == [8192, 8192, 3616]
    assert rest.chunks == whole.chunks[1:]
    for chunk, cached in ((0, 0), (8192, 20000)):
        with pytest.raises(PlanError, match=r"at least 1 token"):
            prefill(model, device, None, 20000, chunk, cached=cached)


def test_pipeline_stages_overlap_chunks(shape):
    model, device = shape("llama3_70b"), replace(ROUND, scale_up=sourced(1e30))
    one = prefill(model, device, Parallel(), 32768, 8192, IDEAL)
    four = prefill(model, device, Parallel(pp=4), 32768, 8192, IDEAL)
    assert four.seconds == pytest.approx(one.seconds / 4 + one.chunks[-1].seconds * 3 / 4)
    # A token goes through all stages: no decode is faster.
    steps = [decode_step(model, device, Parallel(pp=pp), 1000, 1, IDEAL).seconds for pp in (1, 4)]
    assert steps[0] == pytest.approx(steps[1])


def test_decode_reads_weights_and_cache(shape):
    found = decode_step(shape("llama3_70b"), ROUND, Parallel(), 1_000_000, 2, IDEAL)
    assert found.part("attention").bound == found.part("projections").bound == "memory"
    cache = 80 * (2 * 8 * 128 * 2 * 2 * 1_000_001 + 2 * 2 * 2 * 64 * 128)
    assert found.part("attention").seconds == pytest.approx(cache / 1e9)
    matrices = 80 * 8192 * (128 * 2 * (64 + 8) + 3 * 28672) + 128256 * 8192
    assert found.part("projections").seconds == pytest.approx(2 * matrices / 1e9)


def test_requests_are_shared_by_data_parallel_ranks(shape):
    model = shape("llama3_70b")
    times = [decode_step(model, ROUND, Parallel(dp=dp), 100_000, batch, IDEAL).part("attention").seconds for dp, batch in
             ((1, 2), (4, 8), (4, 5))]  # fmt: skip
    assert times[0] == times[1] == times[2]


def test_what_tensor_parallel_ranks_send(shape):
    found = sent(shape("llama3_70b"), Parallel(tp=8), Step(1, 8192, 0))
    assert {name: (entry.bytes, entry.count, entry.span) for name, entry in found.items()} == {
        f"all-reduce of {what}": (2 * 7 / 8 * 8192 * 8192 * 2, 80, 8) for what in ("attention", "the feed-forward")
    }
    assert not sent(shape("llama3_70b"), Parallel(), Step(1, 8192, 0))


def test_what_context_parallel_ranks_send(shape):
    model, at = shape("llama3_70b"), Step(1, 8192, 8192)
    found = sent(model, Parallel(tp=8, pcp=4), at)
    # One of the eight KV heads is here; three of four ranks have another part of it.
    exchange = found["exchange of KV"]
    assert (exchange.bytes, exchange.count, exchange.span) == (3 / 4 * 16384 * 2 * 128 * 2, 80, 32)
    assert found["all-reduce of attention"].bytes == 2 * 7 / 8 * 2048 * 8192 * 2
    assert "exchange of KV" not in sent(model, Parallel(tp=8, pcp=4), replace(at, decode=True))
    decode = Step(4, 1, 100_000, decode=True)
    queries = sent(shape("deepseek_v3"), Parallel(tp=8, dcp=4), decode)["queries and partial outputs of DCP"]
    assert (queries.bytes, queries.count) == (3 / 4 * 4 * 64 * (2 * (576 + 512) + 4), 61)
    queries = sent(model, Parallel(tp=16, dcp=2), decode)["queries and partial outputs of DCP"]
    assert queries.bytes == 1 / 2 * 4 * 8 * (2 * (128 + 128) + 4)
    gather = sent(shape("deepseek_v3"), Parallel(tp=8, dcp=4), at)["gather of cached latents"]
    assert (gather.bytes, gather.count) == (3 / 4 * 8192 * 1152, 61)
    rows = sent(shape("deepseek_v32"), Parallel(tp=8, dsa_cp=8), at)["all-gather of DSA-CP's rows"]
    assert (rows.bytes, rows.count) == (7 / 8 * 8192 * (2 * 7168 + 1152 + 256), 61)


def test_v4s_exchange_is_of_compressed_rows(shape):
    model = shape("deepseek_v4_flash")
    exchange = sent(model, Parallel(pcp=2), Step(1, 8192, 2**20 - 8192))["exchange of KV"]
    # 6.72 GiB of all caches at 1,048,576 tokens.
    assert exchange.bytes * exchange.count * 2 / 2**30 == pytest.approx(6.72, rel=0.01)


def test_what_experts_ranks_send(shape):
    model, at = shape("deepseek_v3"), Step(4, 512, 0)
    found = sent(model, Parallel(tp=2, dp=4), at)
    for name in ("all-gather of tokens for experts", "reduce-scatter of their outputs"):
        assert (found[name].bytes, found[name].count, found[name].span) == (3 * 512 * 7168 * 2, 58, 8)
    found = sent(model, Parallel(tp=2, dp=4, ep=True), at)
    away = found["all-to-all to and from experts"]
    assert (away.bytes, away.count) == (2 * 7 / 8 * 512 / 2 * 8 * 7168 * 2, 58)


def test_who_sends_nothing_for_experts(shape):
    at = Step(4, 512, 0)
    assert not sent(shape("llama3_70b"), Parallel(dp=4), at)
    assert not sent(shape("deepseek_v3"), Parallel(), at)
    # Tensor-parallel ranks see the same tokens: the all-reduce is all.
    assert [*sent(shape("deepseek_v3"), Parallel(tp=4, ep=True), at)] == [
        "all-reduce of the feed-forward", "all-reduce of attention",
    ]  # fmt: skip


def test_links(shape):
    """Scale-up within its cards, scale-out beyond, a measured pace of collectives before the datasheet's, latency on top."""
    model, at = shape("llama3_70b"), 8192

    def seconds(parallel, device, shares=IDEAL):
        return prefill(model, device, parallel, at, at, shares).parts[-1].seconds

    ring = 80 * 2 * 2 * 8192 * 8192 * 2
    assert seconds(Parallel(tp=8), ROUND) == pytest.approx(ring * 7 / 8 / 1e8)
    assert seconds(Parallel(tp=16), ROUND) == pytest.approx(ring * 15 / 16 / 1e7)
    assert seconds(Parallel(tp=8), replace(ROUND, collective=sourced(5e7))) == pytest.approx(ring * 7 / 8 / 5e7)
    assert seconds(Parallel(tp=8), ROUND, replace(IDEAL, collective_latency=0.5)) == pytest.approx(ring * 7 / 8 / 1e8 + 80)
    stages = 3 * 8192 * 8192 * 2 / 1e8
    assert seconds(Parallel(pp=4), ROUND) == pytest.approx(stages)
    with pytest.raises(PlanError, match=r"H20: scale_out is not known"):
        seconds(Parallel(tp=16), load("H20"))


def test_transfer():
    after = transfer(100, 10, 50)
    assert (after.bytes, after.seconds, after.exposed, after.buffer) == (1000, 20, 20, 1000)
    # Two seconds a layer: hidden behind three of the prefill, but for the last layer's.
    hidden = transfer(100, 10, 50, prefill_seconds=30, by_layer=True)
    assert (hidden.seconds, hidden.exposed, hidden.buffer) == (20, 2, 100)
    # Behind one second of the prefill, nine layers lag by one each.
    assert transfer(100, 10, 50, prefill_seconds=10, by_layer=True).exposed == 2 + 9
    with pytest.raises(PlanError, match=r"link = 0"):
        transfer(100, 10, 0)


def test_offload_break_even(shape):
    done = prefill(shape("llama3_70b"), load("H200"), Parallel(tp=8), 131072, 8192)
    size = 40960.0  # one of eight KV heads, 80 layers
    even = offload_break_even(done, size, 64e9)
    assert (even.reload, even.recompute, even.worth) == (131072 * size / 64e9, done.seconds, True)
    assert even.tokens == 8192
    assert even.bandwidth == pytest.approx(131072 * size / done.seconds)
    slower = offload_break_even(done, size, even.bandwidth * 0.99)
    assert (slower.worth, slower.tokens) == (False, None)
    # Attention grows with the context, loading does not: at some length it is worth it.
    assert offload_break_even(done, size, even.bandwidth * 1.01).tokens == 131072
    with pytest.raises(PlanError, match=r"link = -1"):
        offload_break_even(done, size, -1)


def test_candidates(shape):
    found = [(c.tp, c.pcp, c.dcp, c.dsa_cp) for c in candidates(shape("llama3_70b"), 4)]
    assert found == [(1, 1, 1, 1), (1, 2, 1, 1), (2, 1, 1, 1), (1, 4, 1, 1), (2, 2, 1, 1), (4, 1, 1, 1)]
    assert {(c.dcp, c.dsa_cp) for c in candidates(shape("deepseek_v3"), 8) if c.tp == 8} == {(8, 1)}
    assert {(c.dcp, c.dsa_cp) for c in candidates(shape("deepseek_v32"), 8) if c.tp == 8} == {(1, 8)}
    assert {c.dcp for c in candidates(shape("llama3_70b"), 16) if c.tp == 16} == {2}


def test_smallest(shape):
    model, device = shape("llama3_70b"), load("H200")
    found = smallest(model, device, 131072, ttft=30)
    assert found.parallel.cards == 4
    assert found.ttft <= 30
    # It is the smallest: half the cards are too slow, or too small.
    with pytest.raises(PlanError, match=r"No division on up to 2 cards has a TTFT of 30 s and a TPOT of inf s. The nearest is"):
        smallest(model, device, 131072, ttft=30, most=2)
    assert smallest(model, device, 131072).parallel.cards == 2
    with pytest.raises(PlanError, match=r"2 requests of 131,073 tokens fit no division of .* on up to 1 cards"):
        smallest(model, device, 131072, batch=2, most=1)
    assert room(model, device, Parallel(), 131072, 8192, 1, Dtypes()) == 0
    assert smallest(model, device, 131072, tpot=0.02).tpot <= 0.02
