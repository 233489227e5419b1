"""Llama on two devices: the same tokens as on one, over the platform's own process group."""

from __future__ import annotations

import pytest
from parity_e2e_client import random_prompt

from npu_ops import device as devices

PROMPTS = [random_prompt(length) for length in (1, 41, 300)]
LOGPROB_TOLERANCE = 1e-4


def test_two_ranks_give_transformers_tokens(host, device, checkpoint, oracle):
    # A CPU is as many devices as it has ranks.
    if device != devices.CPU and device in devices.found_devices() and devices.device_count(device) < 2:
        pytest.skip(f"one {device} device")
    engine = host.engine(checkpoint("llama"), max_num_batched_tokens=128, tensor_parallel_size=2)
    reference = oracle("llama")
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, 16), strict=True):
        assert completion.tokens == reference.greedy(prompt, 16), f"prompt of {len(prompt)} tokens"
        expected = reference.logprobs(prompt, completion.tokens)
        worst = max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True))
        assert worst < LOGPROB_TOLERANCE
