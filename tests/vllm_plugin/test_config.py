"""--additional-config and the environment variables."""

from __future__ import annotations

import pytest

from vllm_plugin import envs
from vllm_plugin.config import ParityConfig


def test_defaults():
    assert ParityConfig.parse({}).fia_split == "auto"
    assert ParityConfig.parse({}).mla_context_plan == "proportional"
    assert ParityConfig.parse({}).mla_workspace_tokens is None


def test_vllms_own_key_is_let_through():
    assert ParityConfig.parse({"gdn_prefill_backend": "x", "fia_split": "never"}).fia_split == "never"


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"fia_splt": "auto"}, "unknown key 'fia_splt'. Did you mean 'fia_split'? Known keys: fia_split, indexer_c8"),
        ({"enable_dsa_cp": True}, "unknown key 'enable_dsa_cp'. Did you mean '"),
        ({"fia_split": "maybe"}, "fia_split: Input should be 'auto', 'always' or 'never', got 'maybe'."),
        ({"fia_split": None}, "fia_split: "),
        ({"mla_context_plan": "even"}, "mla_context_plan: Input should be 'proportional' or 'equal', got 'even'."),
        ({"mla_workspace_tokens": 0}, "mla_workspace_tokens: Input should be greater than 0, got 0."),
    ],
)
def test_refused(raw, line):
    with pytest.raises(ValueError, match=r"^--additional-config: ") as error:
        ParityConfig.parse(raw)
    assert line in str(error.value)


def test_variables_are_read_when_asked(monkeypatch):
    monkeypatch.setenv("VLLM_NPU_PARITY_DEVICE", "cpu")
    assert envs.as_vllm_variables()["VLLM_NPU_PARITY_DEVICE"]() == "cpu"
    monkeypatch.delenv("VLLM_NPU_PARITY_DEVICE")
    assert envs.DEVICE.get() == ""
