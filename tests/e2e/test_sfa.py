"""ASCEND_SFA: DeepSeek V3.2 and GLM-MoE-DSA against transformers, with contexts well past the top-k of 64."""

from __future__ import annotations

import json
import shutil

import pytest
from parity_e2e_client import HostError, random_prompt

from npu_ops.pack_sparse_kv import pack_sparse_kv, unpack_sparse_kv

# fp32 sums in another order, through the latent space and back.
LOGPROB_TOLERANCE = 2e-4
# Within the top-k and past it, around blocks; the last has five times the top-k.
PROMPTS = [random_prompt(length, seed=11) for length in (1, 5, 63, 64, 65, 129, 330)]

LONG = {"hf_overrides": {"max_position_embeddings": 1 << 20}, "max_model_len": 1 << 19}


@pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa", "glm_shared"])
def test_tokens_equal_transformers(host, checkpoint, oracle, model):
    engine = host.engine(checkpoint(model), max_num_batched_tokens=128)
    reference = oracle(model)
    worst = 0.0
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, 16), strict=True):
        assert completion.tokens == reference.greedy(prompt, 16), f"prompt of {len(prompt)} tokens"
        expected = reference.logprobs(prompt, completion.tokens)
        worst = max(worst, *(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)))
    print(f"{model}: worst logprob difference {worst:.1e}")
    assert worst < LOGPROB_TOLERANCE


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


def layers_with_caches(engine):
    """Names of the layers that have a KV cache, and the bytes that one block takes in each."""
    return {name.removeprefix("model.layers."): size for name, size in engine.cache_layers().items()}


def test_layers_that_share_have_no_indexer_cache(host, checkpoint):
    layers = layers_with_caches(host.engine(checkpoint("glm_shared"), max_num_batched_tokens=128))
    assert [name for name in layers if "indexer" in name] == ["0.self_attn.indexer.k_cache", "1.self_attn.indexer.k_cache"]
    assert len(layers) == 6


@pytest.mark.parametrize("form", ["sparse_kv_c8", "indexer_c8", "both"])
def test_quantised_caches(host, checkpoint, oracle, form):
    keys = ("sparse_kv_c8", "indexer_c8") if form == "both" else (form,)
    options = {"max_num_batched_tokens": 128, "additional_config": dict.fromkeys(keys, True)}
    engine = host.engine(checkpoint("deepseek_v32"), **options)
    layers = layers_with_caches(engine)
    main, indexer = layers["0.self_attn.attn"], layers["0.self_attn.indexer.k_cache"]
    assert main == 128 * (656 if "sparse_kv_c8" in keys else 576 * 4)
    assert indexer == 128 * (130 if "indexer_c8" in keys else 128 * 4)
    reference, worst = oracle("deepseek_v32"), 0.0
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, 8), strict=True):
        expected = reference.logprobs(prompt, completion.tokens)
        worst = max(worst, *(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)))
    print(f"{form}: worst logprob difference from fp32 {worst:.2f}")
    again = engine.generate(PROMPTS, 8, chunk=50)
    assert [c.tokens for c in again] == [c.tokens for c in engine.generate(PROMPTS, 8)], "chunks of 50 change a token"


def test_packed_rows_are_those_of_a_simulation(host, checkpoint, oracle):
    # transformers with latent rows that have been packed and unpacked; that the rope part of such a row is bf16 is left out.
    simulated = oracle("deepseek_v32")
    packed = []

    def round_trip(module, inputs, latent):
        rows = pack_sparse_kv(latent.flatten(0, -2), latent.new_zeros(latent.shape[:-1].numel(), 64))
        packed.append(len(rows))
        return unpack_sparse_kv(rows, latent.dtype)[0].view_as(latent)

    options = {"max_num_batched_tokens": 128, "additional_config": {"sparse_kv_c8": True}}
    completions = host.engine(checkpoint("deepseek_v32"), **options).generate(PROMPTS, 8)
    exact = [simulated.logprobs(prompt, c.tokens) for prompt, c in zip(PROMPTS, completions, strict=True)]
    with simulated.hooked("kv_a_layernorm", round_trip):
        same = [simulated.logprobs(prompt, c.tokens) for prompt, c in zip(PROMPTS, completions, strict=True)]
    assert packed

    def worst(expected):
        pairs = zip(completions, expected, strict=True)
        return max(abs(a - b) for c, row in pairs for a, b in zip(c.logprobs, row, strict=True))

    print(f"worst logprob difference from the simulation {worst(same):.3f}, from fp32 {worst(exact):.3f}")
    assert worst(same) < 0.1 < worst(exact)


def test_capacity_of_quantised_caches(host, checkpoint):
    tokens = {}
    for keys in ((), ("sparse_kv_c8",), ("indexer_c8",), ("sparse_kv_c8", "indexer_c8")):
        options = {"dtype": "bfloat16", "additional_config": dict.fromkeys(keys, True)}
        engine = host.engine(checkpoint("deepseek_v32"), max_num_batched_tokens=128, **options)
        tokens[keys] = engine.cache_tokens()
    plain = 1152 + 256
    for keys, row in zip(tokens, (plain, 656 + 256, 1152 + 130, 656 + 130), strict=True):
        print(f"{' and '.join(keys) or 'bf16'}: {tokens[keys]} tokens, {tokens[keys] / tokens[()]:.2f} times")
        assert tokens[keys] / tokens[()] == pytest.approx(plain / row, rel=0.01)


def test_a_checkpoint_says_which_indexers_are_quantised(host, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("deepseek_v32"), tmp_path / "described")
    description = {f"model.layers.{n}.self_attn.indexer.quant_type": kind for n, kind in enumerate(("FLOAT", "INT8_DYNAMIC"))}
    (folder / "quant_model_description.json").write_text(json.dumps(description))
    engine = host.engine(folder, max_num_batched_tokens=128, additional_config={"indexer_c8": True})
    layers = layers_with_caches(engine)
    assert layers["0.self_attn.indexer.k_cache"] == 128 * 128 * 4
    assert layers["1.self_attn.indexer.k_cache"] == 128 * 130


@pytest.mark.parametrize(
    ("ranks", "dcp", "interleave", "style", "settings"),
    [(4, 2, 16, "a2a", {}), (4, 4, 128, "ag_rs", {"sparse_kv_c8": True, "indexer_c8": True})],
)
def test_sharded_caches_give_the_same_tokens(host, checkpoint, oracle, ranks, dcp, interleave, style, settings):
    # In chunks of 300 rows of a long context are gathered, in chunks of 64 queries are.
    prompts = [random_prompt(length, seed=6) for length in (1, 130, 700)]
    options = {"max_num_batched_tokens": 512, "additional_config": settings}
    if settings:
        expected = [c.tokens for c in host.engine(checkpoint("deepseek_v32"), **options).generate(prompts, 10)]
    else:
        expected = [oracle("deepseek_v32").greedy(prompt, 10) for prompt in prompts]
    engine = host.engine(
        checkpoint("deepseek_v32"),
        tensor_parallel_size=ranks,
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=interleave,
        dcp_comm_backend=style,
        **options,
    )
    for chunk in (64, 300):
        assert [c.tokens for c in engine.generate(prompts, 10, chunk=chunk)] == expected, f"chunks of {chunk}"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_backend": "ASCEND_MLA"}, "ASCEND_MLA cannot serve this model: sparse not supported"),
        ({"kv_cache_dtype": "fp8"}, "quantised latent caches are not supported yet"),
        ({"hf_overrides": {"index_topk_pattern": "SF"}}, "the first layer must score"),
        ({**LONG, "additional_config": {"indexer_logits_bytes": 1 << 20}}, "Raise indexer_logits_bytes"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(host, checkpoint, options, reason):
    with pytest.raises(HostError, match=reason):
        host.engine(checkpoint("deepseek_v32"), max_num_batched_tokens=128, **options)
