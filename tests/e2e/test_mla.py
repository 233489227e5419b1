"""ASCEND_MLA: DeepSeek V2, V3 and a Kimi K2 against transformers, in both forms, however the context is cut."""

from __future__ import annotations

import pytest
from parity_e2e_client import EngineHost, HostError, random_prompt

from npu_ops import device as devices

# fp32 sums in another order, through the latent space and back.
LOGPROB_TOLERANCE = 2e-4

PROMPTS = [random_prompt(length) for length in (1, 5, 127, 128, 129, 300)]
# Every extend in MHA form, its context through a workspace of one block.
CHUNKED = {"mla_absorbed_rows": 0, "mla_workspace_tokens": 128}


@pytest.mark.parametrize("settings", [{}, CHUNKED], ids=["default", "chunked"])
@pytest.mark.parametrize("model", ["deepseek_v2", "deepseek_v3", "kimi_k2"])
def test_tokens_equal_transformers(host, checkpoint, oracle, model, settings):
    engine = host.engine(checkpoint(model), max_num_batched_tokens=128, additional_config=settings)
    reference = oracle(model)
    worst = 0.0
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, 16), strict=True):
        assert completion.tokens == reference.greedy(prompt, 16), f"prompt of {len(prompt)} tokens"
        expected = reference.logprobs(prompt, completion.tokens)
        worst = max(worst, *(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)))
    print(f"{model}: worst logprob difference {worst:.1e}")
    assert worst < LOGPROB_TOLERANCE


def test_context_in_1_2_and_5_iterations(host, checkpoint, oracle):
    engine = host.engine(checkpoint("deepseek_v3"), max_num_batched_tokens=1024, additional_config=CHUNKED)
    for iterations in (1, 2, 5):
        prompt = random_prompt(128 * iterations + 60, seed=1)
        # The second step finds the first one's tokens as context.
        chunk = 128 * iterations
        assert engine.generate([prompt], 8, chunk=chunk)[0].tokens == oracle("deepseek_v3").greedy(prompt, 8)
        launches = engine.profile([prompt], [2], chunk=chunk)
        assert launches == [1, 1 + iterations, 1], "new tokens, then a launch to each iteration; then a decode"


@pytest.mark.parametrize("plan", ["proportional", "equal"])
def test_chunk_size_changes_nothing(host, checkpoint, oracle, plan):
    settings = {**CHUNKED, "mla_workspace_tokens": 384, "mla_context_plan": plan}
    engine = host.engine(checkpoint("deepseek_v3"), max_num_batched_tokens=1024, max_num_seqs=3, additional_config=settings)
    # A long prompt and short ones: contexts of very different lengths share the workspace. Tiny chunks see the short ones.
    prompts = [random_prompt(600, seed=2), random_prompt(200, seed=2), random_prompt(30, seed=2)]
    expected = [oracle("deepseek_v3").greedy(prompt, 8) for prompt in prompts]
    for chunk in (1, 7, 64, 127, 128, 129, 1000):
        chosen = {1: prompts[2:], 7: prompts[2:], 64: prompts[1:]}.get(chunk, prompts)
        assert [c.tokens for c in engine.generate(chosen, 8, chunk=chunk)] == expected[-len(chosen) :], f"chunk {chunk}"


def test_short_extends_run_absorbed(host, checkpoint, oracle):
    engine = host.engine(checkpoint("deepseek_v3"), max_num_batched_tokens=1024)
    # 170 new tokens still cost less absorbed, 171 do not: one launch, or one for the new tokens and one for the context.
    for tail, launches in ((170, 1), (171, 2)):
        prompt = random_prompt(256 + tail, seed=3)
        assert engine.profile([prompt], [2], chunk=256)[:2] == [1, launches]
        assert engine.generate([prompt], 8, chunk=256)[0].tokens == oracle("deepseek_v3").greedy(prompt, 8)


@pytest.mark.parametrize("settings", [{}, CHUNKED], ids=["default", "chunked"])
@pytest.mark.parametrize(("length", "hit"), [(1193, 1024), (1025, 1024), (1024, 896)])
def test_prefix_hit_with_a_short_tail(host, checkpoint, settings, length, hit):
    engine = host.engine(checkpoint("deepseek_v3"), max_num_batched_tokens=1024, additional_config=settings)
    prompt = random_prompt(length, seed=4)
    cold = engine.generate([prompt], 8)[0]
    engine.generate([prompt[:1024]], 1)
    warm = engine.generate([prompt], 8, keep_cache=True)[0]
    assert (warm.tokens, warm.cached) == (cold.tokens, hit)


def test_speculative_rows_change_no_token(device, checkpoint, oracle, tmp_path):
    # Prompts that repeat themselves, so that there is something to guess. Guessed rows are decodes of several tokens.
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    options = {"max_num_batched_tokens": 512, "speculative_config": guesses}
    # A process of its own: after vLLM has guessed by numba, no second engine starts in it.
    host = EngineHost(device, tmp_path / "engine.log")
    try:
        if "npu" in device:
            with pytest.raises(HostError, match="speculative decoding is not supported on npu yet"):
                host.engine(checkpoint("deepseek_v3"), **options)
            return
        engine = host.engine(checkpoint("deepseek_v3"), **options)
        prompts = [random_prompt(20, seed=5) * 6, random_prompt(200, seed=5) + random_prompt(20, seed=5) * 3]
        for prompt, completion in zip(prompts, engine.generate(prompts, 24), strict=True):
            assert completion.tokens == oracle("deepseek_v3").greedy(prompt, 24)
        assert engine.metric("vllm:spec_decode_num_draft_tokens") > 20
    finally:
        host.close()


def test_a_batch_gives_what_each_prompt_gives_alone(host, checkpoint):
    engine = host.engine(checkpoint("deepseek_v2"), max_num_batched_tokens=128, additional_config=CHUNKED)
    together = engine.generate(PROMPTS, 12)
    alone = [engine.generate([prompt], 12)[0] for prompt in PROMPTS]
    assert [c.tokens for c in together] == [c.tokens for c in alone]


def test_a_prompt_of_full_length_fits_what_was_reserved(host, device, checkpoint):
    if device == devices.CPU:
        pytest.skip("vLLM measures no memory on a CPU: its KV cache is set by hand")
    # Its last chunk finds a context that all but fills the workspace. benchmarks/mla_memory.py does the same at full size.
    settings = {"mla_absorbed_rows": 0, "mla_workspace_tokens": 4096}
    engine = host.engine(
        checkpoint("deepseek_v3"),
        max_num_batched_tokens=256,
        max_model_len=4096,
        kv_cache_memory_bytes=None,
        gpu_memory_utilization=0.05,
        dtype="bfloat16",
        additional_config=settings,
    )
    memory = engine.memory(random_prompt(4090, seed=7), 4)
    print(memory)
    assert 0.9 * memory["reserved"] <= memory["used"] <= memory["reserved"]


def test_two_ranks_give_transformers_tokens(host, checkpoint, oracle):
    engine = host.engine(checkpoint("deepseek_v3"), max_num_batched_tokens=128, tensor_parallel_size=2)
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, 12), strict=True):
        assert completion.tokens == oracle("deepseek_v3").greedy(prompt, 12), f"prompt of {len(prompt)} tokens"


@pytest.mark.parametrize(
    ("ranks", "dcp", "interleave", "style"),
    [(2, 2, 16, "a2a"), (4, 4, 1, "ag_rs"), (4, 2, 128, "a2a")],
)
def test_sharded_caches_give_transformers_tokens(host, checkpoint, oracle, ranks, dcp, interleave, style):
    engine = host.engine(
        checkpoint("deepseek_v3"),
        max_num_batched_tokens=512,
        tensor_parallel_size=ranks,
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=interleave,
        dcp_comm_backend=style,
        # Some extends run absorbed, others gather their context through a workspace that several chunks fill.
        additional_config={"mla_absorbed_rows": 40, "mla_workspace_tokens": 512},
    )
    prompts = [random_prompt(length, seed=6) for length in (1, 2, 130, 900)]
    for chunk in (64, 300):
        for prompt, completion in zip(prompts, engine.generate(prompts, 10, chunk=chunk), strict=True):
            assert completion.tokens == oracle("deepseek_v3").greedy(prompt, 10), f"{len(prompt)} tokens in chunks of {chunk}"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, "quantised latent caches are not supported yet"),
        ({"block_size": 64}, "16 or a multiple of 128 is required for latent attention"),
        ({"additional_config": {"mla_workspace_tokens": 100}}, "mla_workspace_tokens"),
        ({"hf_overrides": {"v_head_dim": 64}}, "v_head_dim 128 are required"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(host, checkpoint, options, reason):
    with pytest.raises(HostError, match=reason):
        host.engine(checkpoint("deepseek_v3"), max_num_batched_tokens=128, **options)
