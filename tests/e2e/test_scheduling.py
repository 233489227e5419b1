"""The same answer however the scheduler cuts, repeats or resumes the work."""

from __future__ import annotations

import pytest
from parity_e2e_client import HostError, random_prompt

CHUNKS = [1, 7, 64, 127, 128, 129, 1000]


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_chunk_size_changes_nothing(host, checkpoint, model):
    engine = host.engine(checkpoint(model), max_num_batched_tokens=1024)
    prompt = random_prompt(1000)
    answers = {chunk: engine.generate([prompt], 8, chunk=chunk)[0].tokens for chunk in CHUNKS}
    assert all(answer == answers[1000] for answer in answers.values()), answers


def test_a_one_token_tail_beside_decodes(host, checkpoint):
    # 257 tokens in chunks of 128: the last chunk is one token long, while the short prompt already decodes.
    engine = host.engine(checkpoint("llama"), max_num_batched_tokens=1024)
    prompts = [random_prompt(3), random_prompt(257, seed=1), random_prompt(130, seed=2)]
    mixed = engine.generate(prompts, 10, chunk=129)
    alone = [engine.generate([prompt], 10)[0] for prompt in prompts]
    assert [c.tokens for c in mixed] == [c.tokens for c in alone]


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("shared", [127, 128, 129, 256])
def test_prefix_cache_hit_at_a_block_edge(host, checkpoint, model, shared):
    engine = host.engine(checkpoint(model), max_num_batched_tokens=1024)
    prefix = random_prompt(shared, seed=3)
    prompts = [prefix + random_prompt(tail, seed=4) for tail in (1, 40)]
    cold = [engine.generate([prompt], 8)[0] for prompt in prompts]
    engine.generate([[*prefix, 7]], 1)
    warm = [engine.generate([prompt], 8, keep_cache=True)[0] for prompt in prompts]
    assert [c.tokens for c in warm] == [c.tokens for c in cold]
    assert all(c.cached >= shared // 128 * 128 for c in warm)


def test_long_hit_short_tail(host, checkpoint):
    engine = host.engine(checkpoint("llama"), max_num_batched_tokens=1024)
    prompt = random_prompt(1193, seed=5)
    cold = engine.generate([prompt], 8)[0]
    engine.generate([prompt[:1024]], 1)
    warm = engine.generate([prompt], 8, keep_cache=True)[0]
    assert (warm.tokens, warm.cached) == (cold.tokens, 1024)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_preempted_request_resumes(host, device, checkpoint, model):
    block = 128 if "npu" in device else 32
    tokens = 60 * block // 32
    prompts = [random_prompt(tokens, seed=seed) for seed in range(4)]
    roomy = host.engine(checkpoint(model), max_num_batched_tokens=256).generate(prompts, tokens)
    # 4 requests need 4 blocks each at their end; 13 blocks make at least one wait and start over.
    tight = host.engine(
        checkpoint(model), max_num_batched_tokens=256, block_size=block, num_gpu_blocks_override=13, max_model_len=4 * block
    )
    before = tight.metric("vllm:num_preemptions")
    answers = tight.generate(prompts, tokens)
    assert tight.metric("vllm:num_preemptions") > before
    assert [c.tokens for c in answers] == [c.tokens for c in roomy]


@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_block_size_changes_nothing(host, device, checkpoint, block_size):
    prompts = [random_prompt(length, seed=6) for length in (15, 16, 17, 300)]
    usual = host.engine(checkpoint("llama"), max_num_batched_tokens=128).generate(prompts, 8)
    if "npu" in device and block_size % 128:
        with pytest.raises(HostError, match="requires a multiple of 128"):
            host.engine(checkpoint("llama"), max_num_batched_tokens=128, block_size=block_size)
        return
    other = host.engine(checkpoint("llama"), max_num_batched_tokens=128, block_size=block_size).generate(prompts, 8)
    assert [c.tokens for c in other] == [c.tokens for c in usual]


def test_split_and_unsplit_batches_agree_and_launch_as_documented(host, checkpoint):
    prompts = [random_prompt(4), random_prompt(9), random_prompt(300, seed=7)]
    answers, launches = {}, {}
    for mode in ("never", "always"):
        engine = host.engine(checkpoint("llama"), max_num_batched_tokens=1024, additional_config={"fia_split": mode})
        answers[mode] = [c.tokens for c in engine.generate(prompts, 12, chunk=64)]
        launches[mode] = engine.profile(prompts, [12, 12, 2], chunk=64)
    assert answers["always"] == answers["never"]
    assert set(launches["never"]) == {1}
    # First step: prefills only. Then two decodes beside the long prompt's chunks: two calls. At last decodes alone.
    assert launches["always"][0] == 1
    assert launches["always"][1:4] == [2, 2, 2]
    assert launches["always"][-1] == 1
