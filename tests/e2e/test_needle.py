"""One token far back decides the answer: the needle models through the real engine, in chunks, at several depths."""

from __future__ import annotations

import pytest
from parity_needle import LOGPROB, needle_prompt, write_needle

LENGTH, CHUNK = 4096, 512


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_the_needle_is_found_in_chunks(host, tmp_path, kind, dtype):
    folder = write_needle(tmp_path, kind)
    engine = host.engine(folder, max_model_len=LENGTH + 8, max_num_batched_tokens=CHUNK, dtype=dtype)
    # The last prompt is short: it is one chunk, beside one of a longer one.
    prompts = [needle_prompt(LENGTH, depth, seed=2) for depth in (0, 0.4, 0.97)] + [needle_prompt(100, 0.5)]
    for (_, answer), completion in zip(prompts, engine.generate([tokens for tokens, _ in prompts], 1), strict=True):
        assert completion.tokens == [answer]
        assert completion.logprobs[0] > LOGPROB


# Prompts of 64 and 512 times the top-k of 64: what is not picked, or read from another slot, is not found.
@pytest.mark.parametrize(("length", "chunk"), [(4096, 512), (32768, 2048)])
def test_the_sparse_needle_is_found(host, tmp_path, length, chunk):
    folder = write_needle(tmp_path, "v32")
    engine = host.engine(folder, max_model_len=length + 8, max_num_batched_tokens=chunk, kv_cache_memory_bytes=1 << 30)
    for depth in (0.01,) if length > 4096 else (0, 0.4, 0.97):
        tokens, answer = needle_prompt(length, depth, seed=3)
        completion = engine.generate([tokens], 1)[0]
        assert completion.tokens == [answer]
        assert completion.logprobs[0] > LOGPROB
