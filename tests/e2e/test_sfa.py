"""ASCEND_SFA: DeepSeek V3.2 and GLM-MoE-DSA against transformers, with contexts well past the top-k of 64."""

from __future__ import annotations

import pytest
from parity_e2e_client import random_prompt

# fp32 sums in another order, through the latent space and back.
LOGPROB_TOLERANCE = 2e-4
# Within the top-k and past it, around blocks; the last has five times the top-k.
PROMPTS = [random_prompt(length, seed=11) for length in (1, 5, 63, 64, 65, 129, 330)]


def assert_transformers_tokens(answers, reference, prompts, count):
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == reference.greedy(prompt, count), f"prompt of {len(prompt)} tokens"
        expected = reference.logprobs(prompt, answer.tokens)
        worst = max(worst, *(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)))
    assert worst < LOGPROB_TOLERANCE
    return worst


@pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa", "glm_shared"])
def test_tokens_equal_transformers(host, checkpoint, oracle, model):
    engine = host.engine(checkpoint(model), max_num_batched_tokens=128)
    worst = assert_transformers_tokens(engine.generate(PROMPTS, 16), oracle(model), PROMPTS, 16)
    print(f"{model}: worst logprob difference {worst:.1e}")


def test_chunk_size_changes_nothing(host, checkpoint, oracle):
    engine = host.engine(checkpoint("deepseek_v32"), max_num_batched_tokens=1024)
    prompts = [random_prompt(600, seed=2), random_prompt(200, seed=2), random_prompt(70, seed=2)]
    expected = [oracle("deepseek_v32").greedy(prompt, 8) for prompt in prompts]
    for chunk in (1, 7, 63, 64, 65, 128, 1000):
        chosen = {1: prompts[2:], 7: prompts[2:]}.get(chunk, prompts)
        assert [c.tokens for c in engine.generate(chosen, 8, chunk=chunk)] == expected[-len(chosen) :], f"chunk {chunk}"


@pytest.mark.parametrize(("length", "hit"), [(1193, 1024), (1025, 1024), (1024, 896)])
def test_prefix_hit_with_a_short_tail(host, checkpoint, length, hit):
    engine = host.engine(checkpoint("deepseek_v32"), max_num_batched_tokens=1024)
    prompt = random_prompt(length, seed=4)
    cold = engine.generate([prompt], 8)[0]
    engine.generate([prompt[:1024]], 1)
    warm = engine.generate([prompt], 8, keep_cache=True)[0]
    assert (warm.tokens, warm.cached) == (cold.tokens, hit)
