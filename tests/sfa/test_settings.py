"""What is read of a configuration, and the layout of a packed row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import DeepseekV3Config, DeepseekV32Config, GlmMoeDsaConfig

from sfa.packed import PackedRow
from sfa.settings import SparseSettings


def test_v32_and_glm():
    v32 = SparseSettings.of(DeepseekV32Config(num_hidden_layers=3))
    glm = SparseSettings.of(GlmMoeDsaConfig(num_hidden_layers=4, index_topk=512, index_topk_freq=2))
    assert (v32.topk, v32.heads, v32.head_dim, v32.interleaved_rope) == (2048, 64, 128, False)
    assert (glm.topk, glm.heads, glm.head_dim, glm.interleaved_rope) == (512, 32, 128, True)
    assert v32.sharing.sources == (0, 1, 2)
    assert glm.sharing.sources == (0, 1, 1, 3)
    assert hash(v32) != hash(glm)


@pytest.mark.parametrize("config", [DeepseekV32Config, GlmMoeDsaConfig])
@pytest.mark.parametrize("interleaved", [True, False])
def test_the_key_decides_on_the_rope(config, interleaved):
    assert SparseSettings.of(config(indexer_rope_interleave=interleaved)).interleaved_rope is interleaved


@pytest.mark.parametrize("config", [DeepseekV3Config(), SimpleNamespace(num_hidden_layers=1, index_topk=4, index_n_heads=None)])
def test_models_without_an_indexer_are_refused(config):
    with pytest.raises(ValueError, match="are required of a sparse model, got"):
        SparseSettings.of(config)


def test_packed_row_at_512_64_and_128():
    row = PackedRow()
    assert (row.nope, row.rope, row.scales) == (slice(0, 512), slice(512, 640), slice(640, 656))
    assert row.width == 656
    assert row.tiles == 4


def test_packed_row_at_other_widths():
    row = PackedRow(kv_lora=256, rope_dim=32, tile=64)
    assert (row.rope, row.scales, row.width) == (slice(256, 320), slice(320, 336), 336)


@pytest.mark.parametrize("tile", [0, 96, 1024])
def test_tiles_divide_the_latent(tile):
    with pytest.raises(ValueError, match=f"tiles that divide a latent of 512 are required, got {tile}"):
        PackedRow(tile=tile)
