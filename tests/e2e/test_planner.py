"""The planner against the running engine: tokens of a KV cache of given bytes."""

from __future__ import annotations

import pytest

from planner.memory import caches, kv_tokens
from planner.model import read_model

MEMORY = 64 << 20
C8 = {"sparse_kv_c8": ("c8", "bf16"), "indexer_c8": ("bf16", "c8"), "both": ("c8", "c8")}


@pytest.mark.parametrize(
    ("name", "form"),
    [("llama", None), ("deepseek_v3", None), ("deepseek_v32", None), ("glm_shared", None), *(("deepseek_v32", f) for f in C8)],
)
def test_tokens_of_a_cache(host, checkpoint, name, form):
    keys = [] if form is None else ["sparse_kv_c8", "indexer_c8"] if form == "both" else [form]
    engine = host.engine(
        checkpoint(name),
        dtype="bfloat16",
        kv_cache_memory_bytes=MEMORY,
        max_num_batched_tokens=128,
        additional_config=dict.fromkeys(keys, True),
    )
    found = caches(read_model(checkpoint(name)), *C8.get(form, ("bf16", None)))
    planned = kv_tokens(found, MEMORY, max_model_len=2048)
    print(
        f"{name} {form or 'bf16'}: planned {planned.value:,.0f} tokens, vLLM has {engine.cache_tokens():,}; {planned.formula}"
    )
    assert planned.value == pytest.approx(engine.cache_tokens(), rel=0.01)
