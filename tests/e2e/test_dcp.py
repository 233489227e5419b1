"""Decode context parallelism with ASCEND_FIA: a KV cache in parts on several ranks gives transformers' tokens."""

from __future__ import annotations

import pytest
from parity_e2e_client import HostError, random_prompt

from npu_ops import device as devices

# Shorter than the ranks are many, around a block, and several chunks long.
PROMPTS = [random_prompt(length, seed=9) for length in (1, 2, 129, 700)]


def start(host, checkpoint, device, ranks, **options):
    # A CPU is as many devices as it has ranks, and the virtual NPU as many as it is told.
    if device not in (devices.CPU, "virtual-npu") and devices.device_count(device) < ranks:
        pytest.skip(f"{devices.device_count(device)} {device} devices")
    return host.engine(checkpoint("llama_mqa"), max_num_batched_tokens=512, tensor_parallel_size=ranks, **options)


@pytest.mark.parametrize(
    ("ranks", "dcp", "interleave", "style"),
    [(2, 2, 1, "ag_rs"), (4, 2, 128, "a2a")],
)
def test_sharded_caches_give_transformers_tokens(host, device, checkpoint, oracle, ranks, dcp, interleave, style):
    if device == "virtual-npu" and ranks > 2:
        pytest.skip("two ranks show the process group; four take minutes")
    options = {
        "decode_context_parallel_size": dcp,
        "cp_kv_cache_interleave_size": interleave,
        "dcp_comm_backend": style,
    }
    engine = start(host, checkpoint, device, ranks, **options)
    expected = [oracle("llama_mqa").greedy(prompt, 10) for prompt in PROMPTS]
    for chunk in (64, 300):
        answers = engine.generate(PROMPTS, 10, chunk=chunk)
        assert [answer.tokens for answer in answers] == expected, f"chunks of {chunk}"
    # A prefix hit: whole virtual blocks of all ranks, and a short tail.
    engine.generate([PROMPTS[3][:600]], 1)
    warm = engine.generate([PROMPTS[3]], 10, keep_cache=True)[0]
    assert warm.tokens == expected[3]
    assert warm.cached == 600 // (128 * dcp) * 128 * dcp


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (
            "llama",
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "greater than the model's total number of KV",
        ),
        ("llama_mqa", {"tensor_parallel_size": 3, "decode_context_parallel_size": 2}, "must be divisible by dcp_size=2"),
        (
            "llama_mqa",
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 48},
            "divisible by cp_kv_cache_interleave_size",
        ),
        ("llama_mqa", {"prefill_context_parallel_size": 2}, "prefill context parallelism is not supported yet"),
        ("deepseek_v3", {"tensor_parallel_size": 6, "decode_context_parallel_size": 4}, "must be divisible by dcp_size=4"),
        ("gemma3", {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}, "a sliding window cannot be served"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_reason(host, checkpoint, model, options, reason):
    with pytest.raises(HostError, match=reason):
        host.engine(checkpoint(model), max_num_batched_tokens=128, **options)
