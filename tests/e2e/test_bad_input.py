"""What a user who gets it wrong reads: one line that says what is required, what came, and what to do."""

from __future__ import annotations

import pytest
from parity_e2e_client import HostError, random_prompt


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"block_size": 17}, "a size of 16 to 256 in steps of 16 is required, got 17. Use --block-size 128."),
        ({"additional_config": {"fia_splt": "auto"}}, "unknown key 'fia_splt'. Did you mean 'fia_split'?"),
        (
            {"additional_config": {"fia_split": "maybe"}},
            "fia_split: Input should be 'auto', 'always' or 'never', got 'maybe'",
        ),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype must be auto or the model's own torch.float32, got fp8"),
        (
            {"attention_backend": "FLASH_ATTN"},
            "FLASH_ATTN is not one of ours. Choose one of: ASCEND_FIA, ASCEND_MLA, ASCEND_SFA.",
        ),
        ({"attention_backend": "ASCEND_MLA"}, "ASCEND_MLA cannot serve this model: non-MLA not supported"),
        ({"hf_overrides": {"head_dim": 72}}, "a head dim of (64, 80, 96, 128, 192, 256) is required, got 72"),
        ({"dtype": "float64"}, "Input should be 'auto', 'half', 'float16', 'bfloat16', 'float' or 'float32'"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_refused_with_a_reason(host, checkpoint, options, line):
    with pytest.raises(HostError) as error:
        host.engine(checkpoint("llama"), **options)
    assert line in str(error.value)


def test_the_host_survives_a_refused_engine(host, checkpoint):
    with pytest.raises(HostError):
        host.engine(checkpoint("llama"), block_size=17)
    assert len(host.engine(checkpoint("llama"), max_num_batched_tokens=128).generate([random_prompt(4)], 2)[0].tokens) == 2
