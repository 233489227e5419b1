"""FLOPs and bytes of attention's ops and of what surrounds them: an op takes the longer of computing and moving.

A FLOP is half a fused multiply-add, causal pairs count once, and of HBM traffic the least that is possible counts, but for
sparse attention, which gathers each row's keys anew. Sizes are those of one rank.

rows: new tokens. pairs: query rows times the keys that each sees. keys: cached rows that are read, once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from planner.model import ModelShape

Part = Literal["indexer", "attention", "projections", "moe"]

BF16, FP32, INDEX = 2, 4, 4  # bytes


@dataclass(frozen=True)
class Work:
    """What one op does on one rank.

    Attributes:
        op: its kind; efficiencies are measured by kind and heads.
        part: of a step that it counts to.
        flops: FLOP.
        bytes: moved to and from HBM.
        formula: of both, with numbers.
        dtype: of the products, which says what peak is meant.
        heads: query heads.
        serial: keys of one row, where a kernel gives a row to one program.
        count: layers that do it.
    """

    op: str
    part: Part
    flops: float
    bytes: float
    formula: str
    dtype: str = "bf16"
    heads: int = 0
    serial: float = 0.0
    count: int = 1

    def times(self, count: int) -> Work:
        """The same in ``count`` layers."""
        return replace(self, count=count)


def pairs(rows: float, prior: float, cap: float = float("inf")) -> float:
    """Query-key pairs of ``rows`` new tokens behind ``prior`` cached ones, of which each sees at most ``cap``."""
    free = min(max(cap - prior, 0.0), rows)  # rows that still see all there is
    return free * prior + free**2 / 2 + (0.0 if free == rows else (rows - free) * cap)


def absorbed_rows(model: ModelShape) -> float:
    """New tokens of a request at which MLA's two forms do the same work: below, the absorbed form does less.

    2 x (nope + rope + value) + 2 x latent x (nope + value) / rows = 2 x (2 x latent + rope); 170.7 for DeepSeek.
    """
    expanded, up = model.head_dim + model.value_dim, model.kv_lora * (model.nope_dim + model.value_dim)
    return up / (2 * model.kv_lora + model.rope_dim - expanded)


def grouped(rows: float, pairs: float, keys: float, heads: int, dim: int, row: float, decode: bool) -> Work:
    """Dense attention; ``row`` has keys and values of all KV heads of the rank."""
    return Work(
        "gqa_decode" if decode else "gqa_prefill",
        "attention",
        flops=4 * heads * dim * pairs,
        bytes=row * keys + 2 * BF16 * rows * heads * dim,
        formula=f"4 x {heads} heads x {dim} x {pairs:.6g} pairs; {row:g} B x {keys:.6g} keys + queries, outputs",
        heads=heads,
    )


def expanded(rows: float, pairs: float, keys: float, heads: int, key_dim: int, value_dim: int) -> Work:
    """MLA in MHA form: keys and values up-projected into a workspace."""
    width = key_dim + value_dim
    return Work(
        "mla_prefill",
        "attention",
        flops=2 * heads * width * pairs,
        bytes=BF16 * heads * width * keys + BF16 * rows * heads * width,
        formula=f"2 x {heads} heads x {width} x {pairs:.6g} pairs; 2 B x {heads} x {width} x ({keys:.6g} + {rows:.6g})",
        heads=heads,
    )


def up_projection(keys: float, heads: int, latent: int, width: int, row: float) -> Work:
    """Latent rows to the keys and values of all heads; ``width`` is nope and value together."""
    return Work(
        "gemm",
        "attention",
        flops=2 * keys * latent * heads * width,
        bytes=row * keys + BF16 * keys * heads * width + BF16 * latent * heads * width,
        formula=f"2 x {keys:.6g} keys x {latent} x {heads} heads x {width}; rows of {row:g} B, keys, values, weights",
        heads=heads,
    )


def absorbed(rows: float, pairs: float, keys: float, heads: int, latent: int, rope: int, row: float) -> Work:
    """MLA on latent rows, which are keys and values of all heads."""
    width = 2 * latent + rope
    return Work(
        "mla_absorbed",
        "attention",
        flops=2 * heads * width * pairs,
        bytes=row * keys + BF16 * rows * heads * width,
        formula=f"2 x {heads} heads x ({latent} + {latent + rope}) x {pairs:.6g} pairs; {row:g} B x {keys:.6g} keys + queries, "
        "outputs",
        heads=heads,
    )


def sparse(rows: float, picked: float, longest: float, heads: int, latent: int, rope: int, row: float) -> Work:
    """Attention of each row to its own ``picked`` rows of the cache, at most ``longest`` to a row; packed rows are 8-bit."""
    width, is_packed = 2 * latent + rope, row < BF16 * (latent + rope)
    return Work(
        "sparse_c8" if is_packed else "sparse",
        "attention",
        flops=2 * heads * width * picked,
        bytes=row * picked + BF16 * rows * heads * width + INDEX * picked,
        formula=f"2 x {heads} heads x ({latent} + {latent + rope}) x {picked:.6g} picked; ({row:g} + 4) B x {picked:.6g}"
        " + queries, outputs",
        heads=heads,
        serial=longest,
    )


def compressed(op: str, rows: float, pairs: float, read: float, heads: int, dim: int, row: float) -> Work:
    """V4's attention (op csa, hca or window) to compressed rows and its window: ``read`` rows move."""
    return Work(
        op,
        "attention",
        flops=4 * heads * dim * pairs,
        bytes=row * read + 2 * BF16 * rows * heads * dim,
        formula=f"4 x {heads} heads x {dim} x {pairs:.6g} pairs; {row:g} B x {read:.6g} rows + queries, outputs",
        heads=heads,
    )


def index_scores(rows: float, pairs: float, keys: float, heads: int, dim: int, row: float, dtype: str) -> Work:
    """Scores of the indexer, written as fp32."""
    element = BF16 if dtype == "bf16" else 1
    return Work(
        "indexer",
        "indexer",
        flops=2 * heads * dim * pairs,
        bytes=row * keys + element * rows * heads * dim + FP32 * pairs,
        formula=f"2 x {heads} heads x {dim} x {pairs:.6g} pairs; {row:g} B x {keys:.6g} keys + queries + 4 B x pairs",
        dtype=dtype,
        heads=heads,
    )


def top_k(pairs: float, longest: float) -> Work:
    """One pass over the scores; the longest row has ``longest``."""
    return Work("top_k", "indexer", 0.0, FP32 * pairs, f"4 B x {pairs:.6g} scores", serial=longest)


def merge(rows: float, heads: int, dim: int, parts: int) -> Work:
    """Partial outputs to one by their LSE."""
    return Work(
        "copy",
        "attention",
        flops=0.0,
        bytes=BF16 * (parts + 1) * rows * heads * dim + FP32 * parts * rows * heads,
        formula=f"(2 B x {parts + 1} x {dim} + 4 B x {parts}) x {rows:.6g} rows x {heads} heads",
    )


def gather(keys: float, row: float) -> Work:
    """Cached rows to a workspace."""
    return Work("copy", "attention", 0.0, 2 * row * keys, f"2 x {row:g} B x {keys:.6g} rows")


def linear(part: Part, rows: float, elements: float, element: float, dtype: str) -> Work:
    """``rows`` times a matrix of ``elements``; its activations, small beside it or beside the products, are left out."""
    return Work(
        "gemm",
        part,
        flops=2 * rows * elements,
        bytes=element * elements,
        formula=f"2 x {rows:.6g} rows x {elements:.6g} weights; {element:g} B x weights",
        dtype=dtype,
    )


def routed_experts(rows: float, model: ModelShape, ranks: int, element: float, dtype: str) -> Work:
    """All ``rows`` of the ``ranks`` that share the experts; of weights those are read that a token visits, evenly routed."""
    expert = 3 * model.hidden * model.moe_hidden
    visited = model.experts * (1 - (1 - model.experts_per_token / model.experts) ** rows)
    return Work(
        "gemm",
        "moe",
        flops=2 * rows * model.experts_per_token * expert / ranks,
        bytes=element * visited * expert / ranks,
        formula=f"2 x {rows:.6g} rows x {model.experts_per_token} experts x {expert} weights / {ranks} ranks; {element:g} B x "
        f"{visited:.4g} experts x {expert} / {ranks}",
        dtype=dtype,
    )


def attention_weights(model: ModelShape, heads: int, kv_heads: int) -> float:
    """Elements of a layer's attention matrices on a rank with so many heads; V4's compressors and all indexers are extra."""
    if model.family == "gqa":
        return model.hidden * model.head_dim * 2 * (heads + kv_heads)
    queries = heads * model.head_dim * (model.q_lora or model.hidden) + model.hidden * model.q_lora
    if model.family == "v4":
        output = model.o_lora * (heads * model.head_dim + model.o_groups * model.hidden * heads / model.heads)
        return queries + model.hidden * model.head_dim + output
    latent = model.hidden * (model.kv_lora + model.rope_dim)
    up = model.kv_lora * heads * (model.nope_dim + model.value_dim)
    return queries + latent + up + heads * model.value_dim * model.hidden


def indexer_weights(model: ModelShape) -> float:
    """Elements of an indexer's matrices, on every rank; V4's keys come from a compressor of their own."""
    queries = model.q_lora * model.index_heads * model.index_dim + model.hidden * model.index_heads
    return queries + (compressor_weights(model, 4, model.index_dim) if model.family == "v4" else model.hidden * model.index_dim)


def compressor_weights(model: ModelShape, ratio: int, width: int) -> float:
    """Elements of a compressor's matrices, values and gates; at ratio 4 groups overlap, so that there are two of each."""
    return 2 * model.hidden * width * (2 if ratio == 4 else 1)
