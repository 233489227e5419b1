"""Bytes on one card: caches, blocks, MLA's workspace, activations, and what is left for requests.

Every figure is per rank. A cache of latent rows is the same on each rank of tensor parallelism, as all heads read all of it;
decode context parallelism divides its tokens among ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from planner.figure import Figure, PlanError
from planner.model import ModelShape
from planner.parallel import Parallel
from planner.weights import stages, weights

__all__ = ["Cache", "activations", "blocks", "caches", "kv_bytes", "kv_tokens", "left_for_kv", "named", "request_bytes",
           "requests_that_fit", "weights", "workspace"]  # fmt: skip

BF16, FP32, INT32 = 2, 4, 4
SCALE16 = 2  # the fp16 scale of an int8 indexer row
TILE = 128  # latent elements to one fp32 scale of a packed row
V4_FP8_ROW = 584
KEYS_AND_VALUES = "keys and values"
# What a KV cache can be kept in, and where that is from.
KV_SOURCES = {
    "gqa": {"bf16": "16 bits", "fp8": "vLLM's fp8, scales per tensor", "c8": "int8, static scales per channel"},
    "mla": {"bf16": "16 bits", "fp8": "vLLM's fp8, scales per tensor"},
    "dsa": {"bf16": "16 bits", "fp8": "vLLM's fp8_ds_mla", "c8": "docs/sfa.md, packed rows"},
    "v4": {"bf16": "16 bits", "fp8": "vLLM's fp8_ds_mla of V4: 448 B + 2 x 64 B of rope + 8 B of scales"},
}
INDEXER_SOURCES = {"bf16": "16 bits", "c8": "docs/sfa.md, indexer_c8", "fp8": "vLLM's indexer cache"}
# mla_workspace/size.py: eight requests of full length, four blocks to a request, and a cap.
FULL_REQUESTS, BLOCKS, CAP = 8, 4, 128 * 1024
# vllm_plugin/config.py, indexer_logits_bytes.
LOGITS_BYTES = 512 * 2**20
# vLLM's default of gpu_memory_utilization.
UTILIZATION = 0.92


def cdiv(value: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-value // by)


def named(figures: Iterable[Figure], name: str) -> Figure:
    """The figure of this name.

    Raises:
        PlanError: if there is none; the message lists those there are.
    """
    found = {figure.name: figure for figure in figures}
    if name not in found:
        raise PlanError(f"figure {name!r} is not known. Known are {', '.join(found)}.")
    return found[name]


@dataclass(frozen=True)
class Cache:
    """One kind of cache on one rank.

    Attributes:
        name: what its rows are.
        row: bytes of a row.
        formula: of the row's bytes.
        source: of the formula.
        layers: of the rank that have it.
        ratio: tokens to a row.
        ranks: that the tokens are divided among.
        rows: that a request has, however long it is; 0 if it grows.
    """

    name: str
    row: int
    formula: str
    source: str
    layers: int
    ratio: int = 1
    ranks: int = 1
    rows: int = 0

    def rows_of(self, tokens: int) -> int:
        """Rows of one request in one layer; a row of a compressed cache is written once all of its tokens are there."""
        return self.rows or cdiv(tokens // self.ratio, self.ranks)

    def size(self, tokens: int) -> int:
        """Bytes of one request in all layers."""
        return self.layers * self.rows_of(tokens) * self.row


def _latent_row(model: ModelShape, dtype: str) -> tuple[int, str]:
    if dtype == "bf16":
        return BF16 * (model.kv_lora + model.rope_dim), f"{BF16} B x ({model.kv_lora} + {model.rope_dim})"
    if model.family == "mla":
        return model.kv_lora + model.rope_dim, f"1 B x ({model.kv_lora} + {model.rope_dim})"
    row = model.kv_lora + BF16 * model.rope_dim + FP32 * model.kv_lora // TILE
    return row, f"1 B x {model.kv_lora} + {BF16} B x {model.rope_dim} + {FP32} B x {model.kv_lora} / {TILE}"


def _indexer_row(model: ModelShape, dtype: str) -> tuple[int, str]:
    if dtype == "bf16":
        return BF16 * model.index_dim, f"{BF16} B x {model.index_dim}"
    scale = SCALE16 if dtype == "c8" else FP32
    return model.index_dim + scale, f"1 B x {model.index_dim} + {scale} B"


def _known(what: str, dtype: str, sources: dict[str, str]) -> str:
    if dtype not in sources:
        raise PlanError(f"{what} in {dtype!r} is not known. Known are {', '.join(sources)}.")
    return sources[dtype]


def caches(
    model: ModelShape, kv_dtype: str = "bf16", indexer_dtype: str | None = None, parallel: Parallel | None = None
) -> list[Cache]:
    """The caches of a rank, of the pipeline stage that has most layers; the indexer's is in the KV dtype unless it is given.

    Raises:
        PlanError: for a dtype that the family does not have.
    """
    parallel = parallel or Parallel()
    source = _known(f"a KV cache of family {model.family}", kv_dtype, KV_SOURCES[model.family])
    layers = max(stages(model, parallel.pp), key=len)
    if model.family == "gqa":
        # Ranks beyond the number of KV heads hold copies, of all tokens without DCP.
        heads = cdiv(model.kv_heads, parallel.tp)
        size = BF16 if kv_dtype == "bf16" else 1
        row, formula = 2 * heads * model.head_dim * size, f"2 x {heads} x {model.head_dim} x {size} B"
        return [Cache(KEYS_AND_VALUES, row, formula, source, len(layers), ranks=parallel.dcp)]
    indexer_source = ""
    if model.index_dim:
        indexer_dtype = indexer_dtype or kv_dtype
        indexer_source = _known("an indexer cache", indexer_dtype, INDEXER_SOURCES)
    if model.family == "v4":
        return _compressed_caches(model, kv_dtype, indexer_dtype or kv_dtype, layers)
    found = [Cache("latent rows", *_latent_row(model, kv_dtype), source, len(layers), ranks=parallel.dcp)]
    if model.family == "dsa":
        # Every rank of DCP keeps the keys of all tokens, to pick the same ones.
        share = cdiv(model.indexer_layers * len(layers), model.layers)
        found.append(Cache("indexer keys", *_indexer_row(model, indexer_dtype or kv_dtype), indexer_source, share))
    return found


def _compressed_caches(model: ModelShape, kv_dtype: str, indexer_dtype: str, layers: range) -> list[Cache]:
    """V4: compressed rows, indexer keys over those of CSA, the window, and what the compressors hold of unfinished groups.

    No rank of DCP gets only a part: each layer's compressed rows, or the window, have to be whole for every head.
    """
    ratios = [model.compress_ratios[layer] for layer in layers]
    csa, hca = ratios.count(4), ratios.count(128)
    bf16 = kv_dtype == "bf16"
    row, formula = BF16 * model.head_dim if bf16 else V4_FP8_ROW, f"{BF16} B x {model.head_dim}" if bf16 else f"{V4_FP8_ROW} B"
    source = KV_SOURCES["v4"][kv_dtype]
    states = "vLLM's CompressorStateCache: values and scores in fp32, of two groups at ratio 4"

    def state(name: str, width: int, overlap: int, count: int, ratio: int) -> Cache:
        size = FP32 * 2 * overlap * width
        return Cache(name, size, f"{FP32} B x 2 x {overlap} x {width}", states, count, rows=overlap * ratio)

    return [
        Cache("CSA rows", row, formula, source, csa, ratio=4),
        Cache("indexer keys", *_indexer_row(model, indexer_dtype), INDEXER_SOURCES[indexer_dtype], csa, ratio=4),
        Cache("HCA rows", row, formula, source, hca, ratio=128),
        Cache("window rows", row, formula, "config.json, sliding_window", len(ratios), rows=model.window),
        state("CSA compressor state", model.head_dim, 2, csa, 4),
        state("indexer compressor state", model.index_dim, 2, csa, 4),
        state("HCA compressor state", model.head_dim, 1, hca, 128),
    ]


def kv_bytes(
    model: ModelShape,
    kv_dtype: str = "bf16",
    indexer_dtype: str | None = None,
    parallel: Parallel | None = None,
    tokens: int = 1,
) -> list[Figure]:
    """The cache of one request of ``tokens``: bytes of each kind's row, layer and layers, then for the whole model.

    "KV of the rank" grows with the tokens, "KV that does not grow" is V4's windows and compressor states.
    """
    figures = []
    found = caches(model, kv_dtype, indexer_dtype, parallel)
    for cache in found:
        rows = cache.rows_of(tokens)
        name, source = cache.name, cache.source
        layer = f"{rows:,} rows x {cache.row} B"
        figures += [
            Figure(f"{name}: row", cache.row, "B", cache.formula, source),
            Figure(f"{name}: one layer", rows * cache.row, "B", layer, _rows_source(cache, tokens)),
            Figure(f"{name}: all layers", cache.size(tokens), "B", f"{cache.layers} layers x {layer}", _replicas(cache)),
        ]
    growing, fixed = [c for c in found if not c.rows], [c for c in found if c.rows]
    figures.append(_sum("KV of the rank", growing, tokens))
    return [*figures, _sum("KV that does not grow", fixed, tokens)] if fixed else figures


def _rows_source(cache: Cache, tokens: int) -> str:
    """Where the number of rows is from, and what a figure for one layer leaves out."""
    rows = "for any length" if cache.rows else f"{tokens:,} tokens, {cache.ratio} to a row"
    shared = f", over {cache.ranks} ranks of DCP" if cache.ranks > 1 else ""
    return f"{rows}{shared}; this layer alone, the rank has {cache.layers}"


def _replicas(cache: Cache) -> str:
    return "KV heads are divided over TP" if cache.name == KEYS_AND_VALUES else "the same on every rank of TP"


def _sum(name: str, found: list[Cache], tokens: int) -> Figure:
    formula = " + ".join(f"{cache.layers} x {cache.rows_of(tokens):,} x {cache.row} B" for cache in found)
    return Figure(name, sum(cache.size(tokens) for cache in found), "B", formula, ", ".join(cache.name for cache in found))


def blocks(tokens: int, block_size: int = 128, max_num_seqs: int = 1, parallel: Parallel | None = None) -> list[Figure]:
    """Blocks of one request, and the block table of all requests of that length."""
    ranks = parallel.dcp if parallel else 1
    count = cdiv(tokens, block_size * ranks)
    formula = f"ceil({tokens:,} / ({block_size} x {ranks}))" if ranks > 1 else f"ceil({tokens:,} / {block_size})"
    return [
        Figure("blocks", count, "blocks", formula, "--block-size; a block stands for as many tokens on each rank of DCP"),
        Figure(
            "block table", max_num_seqs * count * INT32, "B", f"{max_num_seqs} x {count:,} x {INT32} B", "int32 block numbers"
        ),
    ]


def request_bytes(found: list[Cache], tokens: int, block_size: int = 128) -> int:
    """What a request takes of the pool: whole blocks of rows in caches that grow; windows and states as they are."""
    whole = 0
    for cache in found:
        block = cache.ratio * block_size * max(other.ranks for other in found)
        rows = cache.rows or cdiv(tokens, block) * block // cache.ratio // cache.ranks
        whole += cache.layers * rows * cache.row
    return whole


def kv_tokens(found: list[Cache], memory: float, max_model_len: int, block_size: int = 128) -> Figure:
    """vLLM's "KV cache size": requests of ``max_model_len`` that fit, in blocks where all caches grow alike, as tokens."""
    needed = request_bytes(found, max_model_len, block_size)
    unit = block_size * max(cache.ranks for cache in found)
    source = "vLLM's get_kv_cache_capacity"
    if any(cache.rows or cache.ratio > 1 for cache in found):
        formula = f"{memory:,.0f} B / {needed:,} B x {max_model_len:,}"
        return Figure("KV cache size", int(memory / needed * max_model_len), "tokens", formula, source)
    each = cdiv(max_model_len, unit)
    count = int(memory // (needed // each))
    formula = f"floor({memory:,.0f} B / {needed // each:,} B) / {each:,} blocks x {max_model_len:,}"
    return Figure("KV cache size", int(count / each * max_model_len), "tokens", formula, source)


def workspace(
    model: ModelShape,
    max_model_len: int,
    max_num_seqs: int,
    block_size: int = 128,
    parallel: Parallel | None = None,
    interleave: int = 1,
    itemsize: int = BF16,
) -> list[Figure]:
    """Cached context that MLA's prefills read at a time; none for a family that reads its cache as it is.

    Of the bytes the latent rows are the small part: up-projected they have keys and values for each head. Sparse attention
    takes this way for contexts within its top-k only.
    """
    if model.family not in ("mla", "dsa"):
        return []
    parallel = parallel or Parallel()
    source = "mla_workspace/size.py"
    unit = math.lcm(block_size, parallel.dcp * interleave) if parallel.dcp > 1 else block_size
    longest = min(max_model_len, model.index_topk or max_model_len)
    wanted = max(FULL_REQUESTS * longest, BLOCKS * max_num_seqs * unit)
    tokens = max(min(wanted, CAP), max_num_seqs * unit) // unit * unit
    formula = (
        f"max(min(max({FULL_REQUESTS} x {longest:,}, {BLOCKS} x {max_num_seqs} x {unit}), {CAP:,}), {max_num_seqs} x {unit})"
    )
    own = tokens // parallel.dcp if parallel.dcp > 1 else 0
    row, heads = model.kv_lora + model.rope_dim, model.heads // parallel.tp

    def size(name: str, rows: int, width: int, text: str) -> Figure:
        return Figure(name, rows * width * itemsize, "B", f"{itemsize} B x {text} x {rows:,}", source)

    figures = [
        Figure("workspace tokens", tokens, "tokens", formula, source),
        size("workspace latent rows", tokens + own, row, f"{row}"),
        size("up-projected keys", tokens, model.head_dim * heads, f"{model.head_dim} x {heads}"),
        size("up-projected values", tokens, model.value_dim * heads, f"{model.value_dim} x {heads}"),
    ]
    return [*figures, size("gathered under DCP", tokens + own, row, f"{row}")] if own else figures


def _attention_width(model: ModelShape) -> tuple[int, str]:
    """Elements of a head that live at once for a token: queries, keys, values, output, and what absorbed attention adds."""
    if model.family == "gqa":
        return 2 * model.head_dim, f"2 x {model.head_dim}"
    if model.family == "mla":
        return 2 * (model.head_dim + model.value_dim), f"2 x ({model.head_dim} + {model.value_dim})"
    if model.family == "v4":
        return 2 * model.head_dim, f"2 x {model.head_dim}"
    absorbed = 2 * model.kv_lora + model.rope_dim
    return model.head_dim + absorbed + model.value_dim, f"({model.head_dim} + {absorbed} + {model.value_dim})"


def activations(
    model: ModelShape,
    chunk: int,
    max_model_len: int,
    max_num_seqs: int = 1,
    block_size: int = 128,
    parallel: Parallel | None = None,
    logits_bytes: int = LOGITS_BYTES,
) -> list[Figure]:
    """The largest tensors of a step of ``chunk`` tokens, and the peak: the residual with the largest of a layer's parts.

    What ops keep for themselves is not in it, nor what an allocator loses.
    """
    parallel = parallel or Parallel()
    rows = cdiv(chunk, parallel.pcp)
    # DSA-CP: part of the rows with all heads in place of all rows with part of the heads.
    queries = cdiv(rows, parallel.dsa_cp)
    heads = model.heads if parallel.dsa_cp > 1 else cdiv(model.heads, parallel.tp)
    kv_heads = cdiv(model.kv_heads, parallel.tp) if model.family == "gqa" else 0
    width, text = _attention_width(model)
    source = "counted: tensors that a layer has at once"

    def size(name: str, count: int, formula: str, source: str = source) -> Figure:
        return Figure(name, count, "B", formula, source)

    streams = 2 * model.residual_streams
    residual = size("residual", BF16 * rows * streams * model.hidden, f"{BF16} B x {rows:,} x {streams} x {model.hidden}")
    attention = [
        size("attention", BF16 * queries * (heads + kv_heads) * width, f"{BF16} B x {queries:,} x {heads + kv_heads} x {text}")
    ]
    if model.index_dim:
        attention += _indexing(model, queries, max_model_len, logits_bytes)
    context = []
    if model.family in ("mla", "dsa"):
        read = workspace(model, max_model_len, max_num_seqs, block_size, parallel)
        context = [figure for figure in read if figure.name not in ("workspace tokens", "workspace latent rows")]
        merged = rows * heads * (2 * FP32 * (model.value_dim + 1) + BF16 * model.value_dim + FP32)
        formula = f"{rows:,} x {heads} x (2 x {FP32} B x {model.value_dim + 1} + {BF16} B x {model.value_dim} + {FP32} B)"
        context.append(size("merge of partial results", merged, formula, "mla_workspace/size.py"))
    feed_forward = _feed_forward(model, rows, parallel)
    per_token = BF16 + FP32
    logits = size("logits", max_num_seqs * model.vocab * per_token, f"{max_num_seqs} x {model.vocab:,} x ({BF16} B + {FP32} B)")
    parts = {"attention": [*attention, *context], "feed-forward": feed_forward, "logits": [logits]}
    sums = {name: sum(figure.value for figure in figures) for name, figures in parts.items()}
    largest = max(sums, key=lambda name: sums[name])
    peak = size("activation peak", int(residual.value + sums[largest]), f"residual + {largest} (the largest part)")
    return [residual, *attention, *context, *feed_forward, logits, peak]


def _indexing(model: ModelShape, queries: int, max_model_len: int, logits_bytes: int) -> list[Figure]:
    """Queries and scores of the indexer, whose ops slice rows to stay within the budget."""
    keys = max_model_len // (4 if model.family == "v4" else 1)
    scores = FP32 * queries * keys
    width = model.index_heads * model.index_dim
    formula = f"min({FP32} B x {queries:,} x {keys:,}, {logits_bytes:,} B)"
    source = "--additional-config indexer_logits_bytes"
    rows = min(queries, logits_bytes // (FP32 * keys))
    return [
        Figure(
            "indexer queries", BF16 * queries * width, "B", f"{BF16} B x {queries:,} x {width}", "config.json, index_n_heads"
        ),
        Figure("indexer scores", min(scores, logits_bytes), "B", formula, f"{source}; {rows:,} rows at a time"),
    ]


def _feed_forward(model: ModelShape, rows: int, parallel: Parallel) -> list[Figure]:
    """Gate, up and their product; before and after experts a row for each expert of a token, if all of them are here."""
    figures = []
    if model.dense_layers:
        inner = cdiv(model.dense_hidden, parallel.tp)
        formula = f"{BF16} B x {rows:,} x 3 x {inner}"
        figures.append(Figure("dense layer", BF16 * rows * 3 * inner, "B", formula, "counted: gate, up, product"))
    if model.experts:
        # vLLM divides each expert's width, or with EP the experts.
        inner = model.moe_hidden if parallel.ep else cdiv(model.moe_hidden, parallel.tp * parallel.dp * parallel.pcp)
        copies = rows * model.experts_per_token
        width = max(model.hidden + 3 * inner, 2 * model.hidden + inner)
        formula = f"{BF16} B x {copies:,} x max({model.hidden} + 3 x {inner}, 2 x {model.hidden} + {inner})"
        figures.append(Figure("experts", BF16 * copies * width, "B", formula, "vllm_plugin/layers/moe.py"))
    largest = max(figures, key=lambda figure: figure.value)
    return [largest]


def left_for_kv(
    card_bytes: float,
    weight_bytes: float,
    activation_bytes: float,
    workspace_bytes: float = 0,
    utilization: float = UTILIZATION,
) -> Figure:
    """What a card has left for caches; negative if even the rest does not fit."""
    value = card_bytes * utilization - weight_bytes - activation_bytes - workspace_bytes
    parts = " - ".join(f"{part:,.0f}" for part in (weight_bytes, activation_bytes, workspace_bytes))
    source = "card's memory x gpu_memory_utilization - weights - activations - workspace"
    return Figure("left for KV", value, "B", f"{card_bytes:,.0f} B x {utilization} - {parts}", source)


def requests_that_fit(found: list[Cache], left: float, tokens: int, block_size: int = 128) -> Figure:
    """Requests of ``tokens`` (prompt and output) whose caches fit at once."""
    each = request_bytes(found, tokens, block_size)
    count = max(int(left // each), 0)
    return Figure("requests that fit", count, "requests", f"floor({left:,.0f} B / {each:,} B)", "whole blocks to a request")
