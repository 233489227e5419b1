"""read_model: shapes of the public configurations, and errors that say what is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.figure import PlanError
from planner.model import FAMILIES, read_model

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


def config(name, **changes):
    return json.loads((CONFIGS / f"{name}.json").read_text()) | changes


@pytest.mark.parametrize(
    ("name", "family", "layers", "heads", "kv_heads", "head_dim", "indexers", "dense", "experts"),
    [
        ("llama3_70b", "gqa", 80, 64, 8, 128, 0, 80, 0),
        ("llama3_405b", "gqa", 126, 128, 8, 128, 0, 126, 0),
        ("qwen3_235b", "gqa", 94, 64, 4, 128, 0, 0, 128),
        ("deepseek_v3", "mla", 61, 128, 1, 192, 0, 3, 256),
        ("deepseek_v32", "dsa", 61, 128, 1, 192, 61, 3, 256),
        ("glm5", "dsa", 78, 64, 1, 256, 78, 3, 256),
        ("deepseek_v4_pro", "v4", 61, 128, 1, 512, 30, 0, 384),
        ("deepseek_v4_flash", "v4", 43, 64, 1, 512, 21, 0, 256),
    ],
)
def test_public_configs(name, family, layers, heads, kv_heads, head_dim, indexers, dense, experts):
    model = read_model(CONFIGS / f"{name}.json")
    assert (model.name, model.family, model.layers, model.heads) == (name, family, layers, heads)
    assert (model.kv_heads, model.head_dim, model.indexer_layers) == (kv_heads, head_dim, indexers)
    assert (model.dense_layers, model.moe_layers, model.experts) == (dense, layers - dense, experts)
    assert "huggingface.co" in config(name)["_source"]


def test_layers_of_v4():
    pro, flash = (read_model(CONFIGS / f"deepseek_v4_{name}.json") for name in ("pro", "flash"))
    assert (pro.layers_of(4), pro.layers_of(128), pro.layers_of(0), pro.index_topk) == (30, 31, 0, 1024)
    assert (flash.layers_of(4), flash.layers_of(128), flash.layers_of(0), flash.index_topk) == (21, 20, 2, 512)
    assert pro.compress_ratios[:4] == (128, 128, 4, 128)


def test_v4_as_transformers_names_its_layers():
    raw = config("deepseek_v4_flash")
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    layer_types = [names[ratio] for ratio in raw.pop("compress_ratios")[:43]]
    raw.pop("qk_rope_head_dim")
    assert read_model(raw | {"layer_types": layer_types, "_name_or_path": "deepseek_v4_flash"}) == read_model(
        CONFIGS / "deepseek_v4_flash.json"
    )


@pytest.mark.parametrize(
    ("changes", "indexers"),
    [
        # GLM-5.2: the first three layers score, then every fourth.
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 21),
        ({"index_topk_freq": 3}, 27),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 3}, 28),
        ({"index_topk_freq": 1}, 78),
        ({"index_topk_pattern": "FS" * 39, "index_topk_freq": 1}, 39),
        ({"indexer_types": ["full", *["shared"] * 77], "index_topk_pattern": "F" * 78}, 1),
    ],
)
def test_layers_that_share_their_top_k(changes, indexers):
    assert read_model(config("glm5", **changes)).indexer_layers == indexers


def test_folders_nested_configs_and_names(tmp_path):
    folder = tmp_path / "My-Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_vl", "text_config": config("deepseek_v3")}))
    assert read_model(folder).name == read_model(folder / "config.json").name == "My-Model"
    assert read_model(str(folder)).family == "mla"
    assert read_model(config("llama3_70b")).name == "llama"
    assert read_model(config("llama3_70b", _name_or_path="a")).name == "a"


def test_fields_that_configs_may_leave_out():
    raw = config("llama3_70b")
    raw.pop("num_key_value_heads")
    assert read_model(raw).kv_heads == 64
    assert read_model(config("llama3_70b", head_dim=64)).head_dim == 64
    assert read_model(config("deepseek_v3", q_lora_rank=None)).q_lora == 0
    assert read_model(config("deepseek_v3", mlp_layer_types=["dense"] * 5 + ["sparse"] * 56)).dense_layers == 5
    assert read_model(config("deepseek_v3", first_k_dense_replace=99)).dense_layers == 61
    assert read_model(config("qwen3_235b", model_type="qwen2")).head_vectors == (64 + 2 * 4) * 128


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama3_70b", {"model_type": "mamba2"}, "llama (gqa), mistral"),
        ("llama3_70b", {"model_type": None}, "deepseek_v4 (v4)"),
        ("llama3_70b", {"hidden_size": None}, "hidden_size: a whole number"),
        ("llama3_70b", {"hidden_size": -1}, "got -1"),
        ("llama3_70b", {"hidden_size": True}, "got True"),
        ("llama3_70b", {"sliding_window": 4096}, "sliding_window"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("qwen3_235b", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("qwen3_235b", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("glm5", {"index_topk_pattern": "FS"}, "for each of 78 layers"),
        ("glm5", {"index_topk_pattern": "X" * 78}, "full or shared, F or S"),
        ("deepseek_v4_pro", {"compress_ratios": [4, 4]}, "for each of 61 layers"),
        ("deepseek_v4_pro", {"compress_ratios": [8] * 61}, "0, 1, 4 or 128"),
        ("deepseek_v4_pro", {"compress_ratios": None}, "compress_ratios"),
    ],
)
def test_bad_configs(name, changes, message):
    with pytest.raises(PlanError) as error:
        read_model(config(name, **changes))
    assert message in str(error.value)


def test_every_known_family_is_in_the_message():
    with pytest.raises(PlanError) as error:
        read_model({"model_type": "gpt2"})
    assert all(known in str(error.value) for known in FAMILIES)


def test_files_that_cannot_be_read(tmp_path):
    for content in (None, "{", "[]"):
        path = tmp_path / "config.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(PlanError, match=r"config\.json"):
            read_model(path)
