"""Two devices: the same tokens as on one, over the platform's own process group; experts divided each, or among the ranks."""

from __future__ import annotations

import pytest
from parity_e2e_client import HostError, random_prompt

from npu_ops import device as devices

PROMPTS = [random_prompt(length) for length in (1, 41, 300)]
LOGPROB_TOLERANCE = 1e-4


@pytest.mark.parametrize(
    ("model", "options"),
    [("llama", {}), ("qwen3_moe", {}), ("qwen3_moe", {"enable_expert_parallel": True})],
    ids=["llama", "experts-divided", "experts-distributed"],
)
def test_two_ranks_give_transformers_tokens(host, device, checkpoint, oracle, model, options):
    # A CPU is as many devices as it has ranks.
    if device != devices.CPU and device in devices.found_devices() and devices.device_count(device) < 2:
        pytest.skip(f"one {device} device")
    # A start that fails in this process leaves nothing behind that ranks of their own would stumble over.
    with pytest.raises(HostError, match="FLASH_ATTN is not one of ours"):
        host.engine(checkpoint(model), max_num_batched_tokens=128, attention_backend="FLASH_ATTN")
    engine = host.engine(checkpoint(model), max_num_batched_tokens=128, tensor_parallel_size=2, **options)
    reference = oracle(model)
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, 16), strict=True):
        assert completion.tokens == reference.greedy(prompt, 16), f"prompt of {len(prompt)} tokens"
        expected = reference.logprobs(prompt, completion.tokens)
        worst = max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True))
        assert worst < LOGPROB_TOLERANCE
