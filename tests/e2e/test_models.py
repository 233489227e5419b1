"""Greedy tokens and logprobs of tiny models against transformers in fp32, alone and mixed into one batch."""

from __future__ import annotations

import pytest
from parity_e2e_client import random_prompt

# fp32 sums in another order: a few units in the last place of a logit around 10.
LOGPROB_TOLERANCE = 1e-4

PROMPTS = [random_prompt(length) for length in (1, 5, 39, 40, 41, 130, 300)]


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3", "qwen3_moe"])
def test_tokens_equal_transformers(host, checkpoint, oracle, model, record_property):
    engine = host.engine(checkpoint(model), max_num_batched_tokens=128)
    reference = oracle(model)
    worst = 0.0
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, 16), strict=True):
        assert completion.tokens == reference.greedy(prompt, 16), f"prompt of {len(prompt)} tokens"
        expected = reference.logprobs(prompt, completion.tokens)
        worst = max(worst, *(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)))
    record_property("worst logprob difference", worst)
    print(f"{model}: worst logprob difference {worst:.1e}")
    assert worst < LOGPROB_TOLERANCE


def test_a_batch_gives_what_each_prompt_gives_alone(host, checkpoint):
    engine = host.engine(checkpoint("gemma3"), max_num_batched_tokens=128)
    together = engine.generate(PROMPTS, 12)
    alone = [engine.generate([prompt], 12)[0] for prompt in PROMPTS]
    assert [c.tokens for c in together] == [c.tokens for c in alone]


def test_max_model_len_of_a_million_changes_nothing(host, checkpoint):
    # One KV head of 64 in fp32 and two layers: a million tokens are 1 GiB of cache, of which 8 tokens are touched.
    small = host.engine(checkpoint("qwen3"), max_num_batched_tokens=128).generate([random_prompt(8)], 8)
    large = host.engine(
        checkpoint("qwen3"),
        max_num_batched_tokens=128,
        max_model_len=1048576,
        kv_cache_memory_bytes=1100 << 20,
        hf_overrides={"max_position_embeddings": 1048576},
        max_num_seqs=2,
    ).generate([random_prompt(8)], 8)
    assert [c.tokens for c in large] == [c.tokens for c in small]
