"""Which layers score: the three ways to say it, against transformers' GLM-MoE-DSA and the layers that vLLM builds."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfa.sharing import TopkSharing


def config(layers: int, **keys: object) -> SimpleNamespace:
    return SimpleNamespace(num_hidden_layers=layers, **keys)


def upstream_skips(given: SimpleNamespace) -> list[bool]:
    """What vLLM's DeepseekV2MLAAttention makes of a configuration: its own statements, run for each layer."""
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLAAttention

    body = ast.parse(textwrap.dedent(inspect.getsource(DeepseekV2MLAAttention.__init__))).body[0].body
    [block] = [
        part for part in body if isinstance(part, ast.If) and ast.unparse(part.test) == "self.is_v32" and not part.orelse
    ]
    code = compile(ast.Module([block], []), "deepseek_v2", "exec")
    skips = []
    for layer in range(given.num_hidden_layers):
        names = {"self": SimpleNamespace(is_v32=True), "config": given, "prefix": str(layer), "extract_layer_index": int}
        exec(code, names)
        skips.append(names["_skip_topk"])
    return skips


def shares(given: SimpleNamespace) -> list[bool]:
    sharing = TopkSharing.of(given)
    return [not sharing.scores(layer) for layer in range(given.num_hidden_layers)]


@given(st.integers(1, 80), st.none() | st.integers(1, 9), st.none() | st.integers(1, 9))
def test_frequency_and_offset_as_in_vllm_and_transformers(layers, frequency, offset):
    from transformers import GlmMoeDsaConfig

    keys = {"index_topk_freq": frequency, "index_skip_topk_offset": offset}
    keys = {key: value for key, value in keys.items() if value is not None}
    ours = shares(config(layers, **keys))
    assert ours == upstream_skips(config(layers, **keys))
    assert ours == [kind == "shared" for kind in GlmMoeDsaConfig(num_hidden_layers=layers, **keys).indexer_types]


@given(st.text("FS", max_size=70))
def test_pattern_as_in_vllm_and_transformers(tail):
    from transformers import GlmMoeDsaConfig

    pattern = "F" + tail
    theirs = GlmMoeDsaConfig(num_hidden_layers=len(pattern), index_topk_pattern=pattern)
    for given_pattern in (pattern, list(pattern)):
        ours = shares(config(len(pattern), index_topk_pattern=given_pattern, index_topk_freq=3))
        assert ours == upstream_skips(config(len(pattern), index_topk_pattern=given_pattern, index_topk_freq=3))
        assert ours == [kind == "shared" for kind in theirs.indexer_types]
    assert shares(theirs) == ours


def test_indexer_types_come_before_the_pattern_and_that_before_the_frequency():
    types, pattern = ["full", "full", "shared", "full"], "FSSS"
    assert shares(config(4, indexer_types=types, index_topk_pattern=pattern, index_topk_freq=2)) == [False, False, True, False]
    assert shares(config(4, index_topk_pattern=pattern, index_topk_freq=2)) == [False, True, True, True]
    assert shares(config(4, indexer_types=None, index_topk_pattern=None, index_topk_freq=2)) == [False, False, True, False]
    assert shares(config(4)) == [False] * 4


def test_sources_are_the_last_layer_that_scored():
    sharing = TopkSharing.of(config(7, index_topk_pattern="FSSFFSS"))
    assert sharing.sources == (0, 0, 0, 3, 4, 4, 4)
    # A draft layer past the model's own chooses for itself, as in vLLM.
    assert sharing.source(7) == 7
    assert sharing.scores(7)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"indexer_types": ["shared", "full"]}, "the first layer must score"),
        ({"index_topk_pattern": "SF"}, "the first layer must score"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "the first layer must score"),
        ({"indexer_types": ["full"]}, "indexer_types: one entry to each of 2 layers is required, got 1"),
        ({"index_topk_pattern": "FSS"}, "index_topk_pattern: one entry to each of 2 layers is required, got 3"),
        ({"index_topk_pattern": "FX"}, "the entries that exist, got X"),
        ({"indexer_types": ["full", "none"]}, "the entries that exist, got none"),
        ({"index_topk_freq": 0}, "index_topk_freq: at least 1 is required, got 0"),
    ],
)
def test_refusals(keys, message):
    with pytest.raises(ValueError, match=message):
        TopkSharing.of(config(2, **keys))
