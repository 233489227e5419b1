"""The shape of a model, read from its config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from planner.figure import PlanError

Family = Literal["gqa", "mla", "dsa", "v4"]
# By ``model_type``: those whose attention and weights the formulas have been checked for.
FAMILIES: dict[str, Family] = {
    "llama": "gqa", "mistral": "gqa", "qwen2": "gqa", "qwen3": "gqa", "qwen3_moe": "gqa",
    "deepseek_v2": "mla", "deepseek_v3": "mla", "kimi_k2": "mla",
    "deepseek_v32": "dsa", "glm_moe_dsa": "dsa",
    "deepseek_v4": "v4",
}  # fmt: skip
# What transformers' DeepseekV4Config calls the layers that the published files give as compression ratios.
V4_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


@dataclass(frozen=True)
class ModelShape:
    """What the formulas need of a model. Fields that its family does not have are 0 or empty.

    Attributes:
        name: of the checkpoint's folder or file.
        family: "gqa" (dense attention on KV heads), "mla", "dsa" (MLA with an indexer), "v4" (DeepSeek V4).
        layers: hidden layers; layers for multi-token prediction are ``mtp_layers``.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: KV heads; 1 for families that cache one latent row for all heads.
        head_dim: of a GQA or V4 head; for MLA ``nope_dim + rope_dim``.
        head_vectors: elements of a layer's norms and biases of query, key and value heads (Qwen).
        vocab: rows of the embedding.
        tied: the output head is the embedding.
        q_lora: rank of the query compression, 0 for none.
        kv_lora: width of the latent row, without the rope part.
        rope_dim: width of the rope part.
        nope_dim: width of a head's query and key without the rope part.
        value_dim: width of a head's value.
        index_heads: heads of the indexer.
        index_dim: width of an indexer key.
        index_topk: tokens (V4: compressed blocks) that a query attends.
        indexer_layers: layers that have an indexer, and its cache; the others use what a layer before has picked.
        experts: routed experts of a layer.
        experts_per_token: routed experts that a token visits.
        shared_experts: experts that every token visits.
        moe_hidden: width of an expert.
        router_bias: the router adds a bias to each expert's score.
        dense_hidden: width of a dense layer's feed-forward.
        dense_layers: layers without experts.
        mtp_layers: layers for multi-token prediction.
        compress_ratios: V4, of each layer: 0 or 1 = window alone, 4 = CSA, 128 = HCA.
        window: V4, tokens of the sliding window that every layer keeps.
        o_groups: V4, groups of the output projection.
        o_lora: V4, rank of the output projection, of each group.
        residual_streams: V4, copies of the residual stream (hyper-connections).
        max_len: tokens that the config allows.
    """

    name: str
    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    head_vectors: int = 0
    tied: bool = False
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    value_dim: int = 0
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int = 0
    indexer_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    moe_hidden: int = 0
    router_bias: bool = False
    dense_hidden: int = 0
    dense_layers: int = 0
    mtp_layers: int = 0
    compress_ratios: tuple[int, ...] = ()
    window: int = 0
    o_groups: int = 0
    o_lora: int = 0
    residual_streams: int = 1
    max_len: int = 0

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    def layers_of(self, ratio: int) -> int:
        """V4's layers of this compression ratio."""
        return self.compress_ratios.count(ratio)


def read_model(source: Path | str | dict[str, Any]) -> ModelShape:
    """The shape in a config.json, its folder, or its contents.

    Raises:
        PlanError: if it cannot be read, if its ``model_type`` is not known, or if a key is missing.
    """
    name, values = _load(source)
    config = _Config(values | values.get("text_config", {}))
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        known = ", ".join(f"{key} ({family})" for key, family in FAMILIES.items())
        raise PlanError(f"{name}: model_type {model_type!r} is not known. Known are {known}.")
    family = FAMILIES[model_type]
    readers = {"gqa": _grouped, "mla": _latent, "dsa": _latent, "v4": _compressed}
    common: dict[str, Any] = {
        "name": name,
        "family": family,
        "layers": config.count("num_hidden_layers"),
        "hidden": config.count("hidden_size"),
        "heads": config.count("num_attention_heads"),
        "vocab": config.count("vocab_size"),
        "tied": bool(config.get("tie_word_embeddings")),
        "max_len": config.count("max_position_embeddings"),
        "mtp_layers": config.count("num_nextn_predict_layers", 0),
    }
    return ModelShape(**common, **_experts(config, common["layers"]), **readers[family](config, common))


class _Config:
    """Keys of a config.json, with errors that name them."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise PlanError(f"{key}: a whole number is required in config.json, got {value!r}.")
        return value


def _load(source: Path | str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(source, dict):
        return str(source.get("_name_or_path") or source.get("model_type")), source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: the config.json of a model, or its folder, is required: {error}.") from None
    if not isinstance(values, dict):
        raise PlanError(f"{path}: a JSON object is required, as config.json has it.")
    return path.parent.name if path.name == "config.json" else path.stem, values


def _experts(config: _Config, layers: int) -> dict[str, Any]:
    """Feed-forward networks: dense layers come first, then layers with experts."""
    experts = config.count("n_routed_experts", config.count("num_experts", 0))
    if not experts:
        return {"dense_hidden": config.count("intermediate_size"), "dense_layers": layers}
    types = config.get("mlp_layer_types")
    dense = types.count("dense") if types else min(config.count("first_k_dense_replace", 0), layers)
    if config.count("moe_layer_freq", 1) != 1 or config.count("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise PlanError(
            "moe_layer_freq, decoder_sparse_step and mlp_only_layers: only dense layers first, then experts, is known."
        )
    return {
        "experts": experts,
        "experts_per_token": config.count("num_experts_per_tok"),
        "shared_experts": config.count("n_shared_experts", 0),
        "moe_hidden": config.count("moe_intermediate_size"),
        "dense_hidden": config.count("intermediate_size") if dense else 0,
        "dense_layers": dense,
        "router_bias": config.get("topk_method") == "noaux_tc",
    }


def _grouped(config: _Config, common: dict[str, Any]) -> dict[str, Any]:
    # Qwen2's config gives a window that it switches off by default; Mistral's has no such switch.
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        raise PlanError("sliding_window: models of which only part of the layers or a window is cached are not known.")
    kv_heads = config.count("num_key_value_heads", common["heads"])
    head_dim = config.count("head_dim", common["hidden"] // common["heads"])
    vectors = {"qwen2": (common["heads"] + 2 * kv_heads) * head_dim, "qwen3": 2 * head_dim, "qwen3_moe": 2 * head_dim}
    return {"kv_heads": kv_heads, "head_dim": head_dim, "head_vectors": vectors.get(config.get("model_type"), 0)}


def _latent(config: _Config, common: dict[str, Any]) -> dict[str, Any]:
    nope, rope = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    shape = {
        "kv_heads": 1,
        "head_dim": nope + rope,
        "nope_dim": nope,
        "rope_dim": rope,
        "value_dim": config.count("v_head_dim"),
        "kv_lora": config.count("kv_lora_rank"),
        "q_lora": config.count("q_lora_rank", 0),
    }
    if common["family"] == "dsa":
        shape |= _indexer(config) | {"indexer_layers": common["layers"] - _shared_topk(config, common["layers"])}
    return shape


def _indexer(config: _Config) -> dict[str, Any]:
    keys = {"index_heads": "index_n_heads", "index_dim": "index_head_dim", "index_topk": "index_topk"}
    return {field: config.count(key) for field, key in keys.items()}


def _shared_topk(config: _Config, layers: int) -> int:
    """Layers that use the top-k of a layer before: docs/sfa.md has the three ways to say which, of which the first counts."""
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds is None:
        frequency, offset = max(config.count("index_topk_freq", 1), 1), config.count("index_skip_topk_offset", 2)
        return sum(max(layer - offset + 1, 0) % frequency != 0 for layer in range(layers))
    if len(kinds) != layers or {*kinds} - {"full", "shared", "F", "S"}:
        raise PlanError(f"indexer_types, index_topk_pattern: full or shared, F or S, for each of {layers} layers is required.")
    return sum(kind in ("shared", "S") for kind in kinds)


def _compressed(config: _Config, common: dict[str, Any]) -> dict[str, Any]:
    layers, names = common["layers"], config.get("layer_types")
    # Entries past the model's own layers are those of multi-token prediction.
    ratios = config.get("compress_ratios") or [V4_RATIOS.get(name, -1) for name in names or ()]
    ratios = tuple(ratios[:layers])
    if len(ratios) != layers or {*ratios} - {0, 1, 4, 128}:
        raise PlanError(f"compress_ratios: 0, 1, 4 or 128 for each of {layers} layers is required, got {ratios}.")
    return _indexer(config) | {
        "kv_heads": 1,
        "head_dim": config.count("head_dim"),
        "rope_dim": config.count("qk_rope_head_dim", 64),  # 64: transformers' DeepseekV4Config
        "q_lora": config.count("q_lora_rank"),
        "indexer_layers": ratios.count(4),
        "compress_ratios": ratios,
        "window": config.count("sliding_window"),
        "o_groups": config.count("o_groups"),
        "o_lora": config.count("o_lora_rank"),
        "residual_streams": config.count("hc_mult"),
    }
