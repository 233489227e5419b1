"""The shape of a model, read from its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Family = Literal["gqa", "mla", "dsa", "v4"]


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
    dense_hidden: int = 0
    dense_layers: int = 0
    mtp_layers: int = 0
    compress_ratios: tuple[int, ...] = ()
    window: int = 0
    o_groups: int = 0
    o_lora: int = 0
    residual_streams: int = 1
    max_len: int = 0


def read_model(source: Path | str | dict[str, Any]) -> ModelShape:
    """The shape in a config.json, its folder, or its contents.

    Raises:
        PlanError: if it cannot be read, or its family is not known.
    """
    raise NotImplementedError
