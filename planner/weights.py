"""Parameters of a model, and what they take on one card.

The counts are those of the published checkpoints to the unit (tests/planner/test_weights.py); left out are the scales of
quantised matrices, which the bytes include, and the tables of V4's hash-routed layers, 0.02 GB in all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from planner.figure import Figure, PlanError
from planner.model import ModelShape
from planner.parallel import Parallel

Kind = Literal["matrix", "expert", "plain", "fp32"]
# Over which ranks a tensor is divided: none, those of TP, as many as there are KV heads, all that share the experts.
# "queries" is "tp" without DSA-CP, which gives every rank all heads (docs of vLLM-Ascend: q_b_proj and kv_b_proj replicated).
Split = Literal["all", "tp", "queries", "kv", "experts"]


@dataclass(frozen=True)
class Precision:
    """Bytes of an element: of a quantised matrix, of a routed expert, with their scales; all else stays in 16 bits."""

    matrix: float
    expert: float
    source: str


PRECISIONS = {
    "bf16": Precision(2, 2, "16 bits"),
    # An fp32 scale to a block of 128 x 128 elements.
    "fp8": Precision(1 + 4 / 128**2, 1 + 4 / 128**2, "DeepSeek-V3's config.json, weight_block_size; scales are fp32"),
    # A scale to a row of thousands of elements: under 0.1 %.
    "int8": Precision(1, 1, "W8A8; scales of rows are not counted"),
    # fp8 with a scale byte (e8m0) to a block; experts in 4 bits with one to 32 elements.
    "fp4": Precision(1 + 1 / 128**2, 0.5 + 1 / 32, "DeepSeek-V4's checkpoint: experts in MXFP4, other matrices in fp8"),
}
PLAIN, FP32 = 2, 4


@dataclass(frozen=True)
class Weights:
    """Tensors of one kind: the part of the model, their elements, how they are stored and divided."""

    part: str
    elements: int
    kind: Kind = "matrix"
    split: Split = "tp"


def _grouped_attention(model: ModelShape) -> list[Weights]:
    head = model.hidden * model.head_dim
    return [
        Weights("attention", 2 * model.heads * head),  # queries, output
        Weights("attention", 2 * model.kv_heads * head, split="kv"),
        Weights("attention", model.head_vectors, "plain", "all"),
    ]


def _latent_attention(model: ModelShape) -> list[Weights]:
    width, rank = model.heads * model.head_dim, model.q_lora
    compressed = [
        Weights("attention", model.hidden * rank, split="all"),
        Weights("attention", rank, "plain", "all"),
        Weights("attention", rank * width, split="queries"),
    ]
    latent, up = model.kv_lora + model.rope_dim, model.heads * (model.nope_dim + model.value_dim)
    return [
        *(compressed if rank else [Weights("attention", model.hidden * width, split="queries")]),
        Weights("attention", model.hidden * latent, split="all"),
        Weights("attention", model.kv_lora, "plain", "all"),
        Weights("attention", model.kv_lora * up, split="queries"),
        Weights("attention", model.heads * model.value_dim * model.hidden),
    ]


def _indexer(model: ModelShape) -> list[Weights]:
    return [
        Weights("indexer", model.q_lora * model.index_heads * model.index_dim, split="all"),
        Weights("indexer", model.hidden * model.index_dim, split="all"),
        Weights("indexer", 2 * model.index_dim + model.hidden * model.index_heads, "plain", "all"),  # LayerNorm, head weights
    ]


def _compressor(part: str, hidden: int, width: int, ratio: int) -> list[Weights]:
    """Projections of values and gates, which overlap at ratio 4; a norm; a position bias."""
    projected = width * (2 if ratio == 4 else 1)
    return [
        Weights(part, 2 * hidden * projected + width, "plain", "all"),
        Weights(part, ratio * projected, "fp32", "all"),
    ]


def _compressed_attention(model: ModelShape, ratio: int) -> list[Weights]:
    width, output = model.heads * model.head_dim, model.o_groups * model.o_lora
    found = [
        Weights("attention", model.hidden * (model.q_lora + model.head_dim), split="all"),
        Weights("attention", model.q_lora + model.head_dim, "plain", "all"),
        Weights("attention", model.q_lora * width, split="queries"),
        Weights("attention", output * width // model.o_groups + output * model.hidden),
        Weights("attention", model.heads, "fp32", "queries"),  # sinks
    ]
    if ratio > 1:
        found += _compressor("compressor", model.hidden, model.head_dim, ratio)
    if ratio == 4:
        found += [
            Weights("indexer", model.q_lora * model.index_heads * model.index_dim, split="all"),
            Weights("indexer", model.hidden * model.index_heads, "plain", "all"),
            *_compressor("indexer", model.hidden, model.index_dim, ratio),
        ]
    return found


def _hyper_connections(model: ModelShape) -> list[Weights]:
    """Two of them in a layer, each from all residual streams to weights for reading, writing and mixing them, with 3 scales."""
    streams = model.residual_streams
    outputs = streams * (streams + 2)
    return [Weights("residual", 2 * (outputs * streams * model.hidden + outputs + 3), "fp32", "all")] if streams > 1 else []


def _stream_head(model: ModelShape) -> list[Weights]:
    """From all residual streams to one weight for each, with a scale."""
    streams = model.residual_streams
    return [Weights("residual", streams * streams * model.hidden + streams + 1, "fp32", "all")] if streams > 1 else []


def _feed_forward(model: ModelShape, dense: bool) -> list[Weights]:
    if dense:
        return [Weights("dense", 3 * model.hidden * model.dense_hidden)]
    expert = 3 * model.hidden * model.moe_hidden
    return [
        Weights("experts", model.experts * expert, "expert", "experts"),
        Weights("shared experts", model.shared_experts * expert),
        Weights("router", model.experts * model.hidden, "plain", "all"),
        Weights("router", model.experts if model.router_bias else 0, "fp32", "all"),
    ]


def _layer(model: ModelShape, index: int) -> list[Weights]:
    """Weights of a layer; at ``index >= model.layers`` of one for multi-token prediction, which has an indexer but in V4."""
    drafts = index >= model.layers
    attention: list[Weights] = []
    if model.family == "gqa":
        attention = _grouped_attention(model)
    elif model.family == "v4":
        attention = _compressed_attention(model, 0 if drafts else model.compress_ratios[index])
    else:
        attention = _latent_attention(model)
        # Which layers have one does not matter here: what is asked for is the sum over layers.
        attention += _indexer(model) if index < model.indexer_layers or (drafts and model.indexer_layers) else []
    norms = [Weights("norms", 2 * model.hidden, "plain", "all")]
    return attention + norms + _hyper_connections(model) + _feed_forward(model, index < model.dense_layers)


def _drafting(model: ModelShape) -> list[Weights]:
    """A layer for multi-token prediction: projection of embedding and hidden state, three norms, the layer itself."""
    join = Weights("", 2 * model.hidden**2, "matrix" if model.family == "v4" else "plain", "all")
    layer = [join, Weights("", 3 * model.hidden, "plain", "all"), *_stream_head(model), *_layer(model, model.layers)]
    return [replace(weights, part="multi-token prediction") for weights in layer]


def stages(model: ModelShape, pp: int) -> list[range]:
    """Layers of each pipeline stage: as many for each, and one more from the last but one backwards (vLLM's get_pp_indices)."""
    least, more = divmod(model.layers, pp)
    sizes = [least + (pp - 1 - more <= stage < pp - 1) for stage in range(pp)]
    starts = [sum(sizes[:stage]) for stage in range(pp + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def _stage(model: ModelShape, layers: range, mtp: bool) -> list[Weights]:
    found = [weights for index in layers for weights in _layer(model, index)]
    table = model.vocab * model.hidden
    if layers.start == 0:
        found.append(Weights("embedding", table, "plain"))
    if layers.stop == model.layers:
        found += [Weights("norms", model.hidden, "plain", "all"), *_stream_head(model)]
        # A tied head is a table of its own where the first stage is another card.
        found += [] if model.tied and layers.start == 0 else [Weights("head", table, "plain")]
        found += _drafting(model) * model.mtp_layers if mtp else []
    return found


def parameters(model: ModelShape, mtp: bool = False) -> int:
    """Parameters of the whole model, with or without its layers for multi-token prediction."""
    return sum(weights.elements for weights in _stage(model, range(model.layers), mtp))


def _divisor(split: Split, model: ModelShape, parallel: Parallel) -> int:
    """Over how many ranks it is divided: experts also over data and prefill-context ranks, with EP or without, as in vLLM."""
    return {
        "all": 1,
        "tp": parallel.tp,
        "queries": 1 if parallel.dsa_cp > 1 else parallel.tp,
        "kv": min(parallel.tp, model.kv_heads),
        "experts": parallel.tp * parallel.dp * parallel.pcp,
    }[split]


def _figures(found: Iterable[Weights], model: ModelShape, precision: Precision, parallel: Parallel) -> list[Figure]:
    """One figure to a part, and the sum."""
    sizes = {"matrix": precision.matrix, "expert": precision.expert, "plain": PLAIN, "fp32": FP32}
    parts: dict[str, dict[tuple[Kind, Split], int]] = defaultdict(lambda: defaultdict(int))
    for weights in found:
        parts[weights.part][weights.kind, weights.split] += weights.elements
    figures = []
    for part, groups in parts.items():
        terms = [(count, sizes[kind], _divisor(split, model, parallel)) for (kind, split), count in groups.items() if count]
        value = sum(count * size / ranks for count, size, ranks in terms)
        formula = " + ".join(f"{count:,} x {size:g} B" + f" / {ranks}" * (ranks > 1) for count, size, ranks in terms)
        if terms:
            figures.append(Figure(f"weights: {part}", value, "B", formula, f"config.json; {precision.source}"))
    total = sum(figure.value for figure in figures)
    return [*figures, Figure("weights", total, "B", " + ".join(figure.name[9:] for figure in figures), "sum of the above")]


def weights(model: ModelShape, dtype: str = "bf16", parallel: Parallel | None = None, mtp: bool = False) -> list[Figure]:
    """Bytes on one rank, of the pipeline stage that has the most; the last figure is their sum.

    Raises:
        PlanError: for an unknown ``dtype``.
    """
    if dtype not in PRECISIONS:
        raise PlanError(f"weights in {dtype!r} are not known. Known are {', '.join(PRECISIONS)}.")
    parallel = parallel or Parallel()
    found = [_stage(model, layers, mtp) for layers in stages(model, parallel.pp)]
    return max((_figures(part, model, PRECISIONS[dtype], parallel) for part in found), key=lambda figures: figures[-1].value)
