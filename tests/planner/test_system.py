"""Published times and costs of whole systems, each with its source and the band that the planner stays in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner import memory
from planner.hardware import efficiency, load
from planner.parallel import Parallel
from planner.step import Dtypes
from planner.timing import decode_step, prefill, transfer

# DeepSeek-V3.2-Exp's figure of costs, H800 at $2 an hour, digitised to 3 %: dollars for a million tokens, for every 1,000
# tokens of context. The slope is that of attention and the indexer alone, whatever the batch and the experts cost.
DOLLARS = 2 / 3600 * 1e6
V31, V32 = Dtypes("fp8", "bf16"), Dtypes("fp8", "fp8")


@pytest.mark.parametrize(("name", "dtypes", "slope"), [("deepseek_v3", V31, 0.00478), ("deepseek_v32", V32, 0.000716)])
def test_prefill_cost_of_context(shape, name, dtypes, slope):
    chunks = prefill(shape(name), load("H800"), prompt=131072, chunk=8192, dtypes=dtypes).chunks
    first, last = chunks[4], chunks[-1]
    seconds = (last.seconds - first.seconds) / 8192 / (last.prior - first.prior)
    assert seconds * 1000 * DOLLARS == pytest.approx(slope, rel=0.15)


@pytest.mark.parametrize(("name", "dtypes", "slope"), [("deepseek_v3", V31, 0.01626), ("deepseek_v32", V32, 0.00078)])
def test_decode_cost_of_context(shape, name, dtypes, slope):
    """DeepSeek decodes two tokens a step (next_n = 2, which its indexer's bandwidth implies); MLA's slope does not see it."""
    short, long = (
        decode_step(shape(name), load("H800"), context=context, batch=64, dtypes=dtypes, query_tokens=2)
        for context in (32_000, 96_000)
    )
    seconds = (long.seconds - short.seconds) / (64 * 2) / 64_000
    assert seconds * 1000 * DOLLARS == pytest.approx(slope, rel=0.15)


@pytest.mark.parametrize(
    ("parallel", "seconds"),
    [
        (Parallel(tp=8, pcp=16), 77),  # arXiv 2411.01783, 128 H100
        (Parallel(tp=8), 1200),  # the same, about, on one node
    ],
)
def test_metas_context_parallel_prefill(shape, parallel, seconds):
    """Llama 3 405B, a million tokens in one step, KV around the ring over 400 Gb/s; overlap is not counted."""
    found = prefill(shape("llama3_405b"), load("H100"), parallel, 2**20, 2**20)
    assert found.seconds == pytest.approx(seconds, rel=0.30)
    assert [part.bound for part in found.parts] == [None, "compute", "compute", None, "link"]


def test_crossover_of_tensor_and_context_parallelism(shape):
    """Qwen3-235B in fp8, TPU v7x-8, chunks of 16,384 (vllm-project/tpu-inference PR3260).

    Measured, of ten prompts: 4K 1.66 s with TP8 and 1.75 s with PCP2 x TP4, 256K 477.9 and 396.3 s. Collectives take their
    time at 4K, of which context parallelism has more; at 256K it sends less. What is left out is that TP8's kernel, with half
    the heads, is slower: the planner finds the direction, and 2 % of the 17 %.
    """
    device, dtypes = load("TPU7x"), Dtypes("fp8")

    def seconds(prompt, parallel):
        return prefill(shape("qwen3_235b"), device, parallel, prompt, 16384, dtypes=dtypes).seconds

    heads, tokens = Parallel(tp=8), Parallel(tp=4, pcp=2)
    assert seconds(4096, tokens) / seconds(4096, heads) == pytest.approx(1.75 / 1.66, rel=0.05)
    assert seconds(4096, heads) < seconds(4096, tokens)
    assert seconds(262144, heads) > seconds(262144, tokens)
    # Twice the cards are nearly twice as fast: 793.0 s with TP4.
    assert seconds(262144, Parallel(tp=4)) / seconds(262144, tokens) == pytest.approx(793.0 / 396.3, rel=0.10)


def test_a_latency_of_none_has_no_crossover(shape):
    """What decides at 4K is the time of a collective beside its bytes."""
    shares = replace(efficiency(load("TPU7x")), collective_latency=0.0)
    heads, tokens = (
        prefill(shape("qwen3_235b"), load("TPU7x"), parallel, 4096, 16384, shares, Dtypes("fp8")).seconds
        for parallel in (Parallel(tp=8), Parallel(tp=4, pcp=2))
    )
    assert tokens < heads


def test_a_layers_million_latents_over_400_gigabits(shape):
    (latent,) = memory.caches(shape("deepseek_v3"))
    size = latent.row * 1_000_000
    assert size == 1.152e9
    assert transfer(size, 1, 400e9 / 8).seconds == pytest.approx(0.023, abs=0.0005)
    # All layers are 61 times that: the figure of one layer is often taken for the model's.
    assert transfer(size, 61, 400e9 / 8).seconds == pytest.approx(1.405, abs=0.001)
