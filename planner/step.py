"""What one rank computes and sends in a step, of requests with new tokens behind cached ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from planner import memory, work
from planner.figure import PlanError
from planner.memory import Cache
from planner.model import ModelShape
from planner.parallel import Parallel
from planner.weights import PRECISIONS, Precision
from planner.work import BF16, Work

# Layers of V4 that see nothing but their window have ratio 0 or 1.
WINDOW_ALONE = (0, 1)
# Weights in 4 bits are multiplied in 8.
PRODUCTS = {"bf16": "bf16", "fp8": "fp8", "int8": "int8", "fp4": "fp8"}


@dataclass(frozen=True)
class Dtypes:
    """Of weights (weights.py has the names), of the KV cache and of indexer keys (memory.py; None: as the cache)."""

    weights: str = "bf16"
    kv: str = "bf16"
    indexer: str | None = None

    @property
    def precision(self) -> Precision:
        """Bytes of a weight."""
        if self.weights not in PRODUCTS:
            raise PlanError(f"weights in {self.weights!r} are not known. Known are {', '.join(PRODUCTS)}.")
        return PRECISIONS[self.weights]

    @property
    def products(self) -> str:
        """What weights are multiplied in."""
        return PRODUCTS[self.weights]


@dataclass(frozen=True)
class Step:
    """The work of a step is the same on all ranks, prompts being shared out evenly.

    Attributes:
        requests: of all data-parallel ranks together.
        rows: new tokens of each.
        prior: cached tokens of each.
        decode: whether the step generates; then context parallelism of prefill has no part in it.
        workspace: tokens of cached context that MLA up-projects at a time.
    """

    requests: float
    rows: float
    prior: float
    decode: bool = False
    workspace: int = 131072

    @property
    def total(self) -> float:
        """Tokens that the last new token sees."""
        return self.prior + self.rows


@dataclass(frozen=True)
class Traffic:
    """Bytes that a card sends in a collective, over groups whose members are ``stride`` apart.

    Attributes:
        name: what is sent.
        bytes: by each card, in one layer.
        formula: with numbers.
        span: cards from the first to the last of a group, which say what link is used.
        count: layers.
    """

    name: str
    bytes: float
    formula: str
    span: int
    count: int = 1


@dataclass(frozen=True)
class _Rank:
    """Sizes on one rank."""

    model: ModelShape
    parallel: Parallel
    dtypes: Dtypes
    step: Step

    @property
    def requests(self) -> float:
        return math.ceil(self.step.requests / self.parallel.dp)

    @property
    def pcp(self) -> int:
        return 1 if self.step.decode else self.parallel.pcp

    @property
    def rows(self) -> float:
        """Tokens of the rank's projections."""
        return self.requests * self.step.rows / self.pcp

    @property
    def queries(self) -> float:
        """Share of the requests' query rows in attention."""
        return 1 / (self.pcp * self.parallel.dsa_cp)

    @property
    def dcp(self) -> int:
        """In prefill MLA gathers the context, in decode and in GQA each rank attends to its own part of it."""
        return self.parallel.dcp if self.step.decode or self.model.family != "mla" else 1

    @property
    def heads(self) -> int:
        """Query heads whose projections are on the rank."""
        return self.model.heads * self.parallel.dsa_cp // self.parallel.tp

    @property
    def kv_heads(self) -> int:
        return max(1, self.model.kv_heads // self.parallel.tp)

    @property
    def caches(self) -> list[Cache]:
        """All caches of a request as one rank would have them that shares no tokens."""
        return _caches(self.model, self.dtypes, self.parallel.tp)

    @property
    def row(self) -> int:
        """Bytes of a cached row that attention reads."""
        return self.caches[0].row

    @property
    def index_row(self) -> int:
        """Bytes of an indexer key, 0 without an indexer."""
        return sum(entry.row for entry in self.caches if entry.name == "indexer keys")

    def pairs(self, cap: float = math.inf) -> float:
        return self.requests * self.queries * work.pairs(self.step.rows, self.step.prior, cap)

    @property
    def keys(self) -> float:
        return self.requests * self.step.total


@cache
def _caches(model: ModelShape, dtypes: Dtypes, tp: int) -> list[Cache]:
    return memory.caches(model, dtypes.kv, dtypes.indexer, Parallel(tp=tp))


def compute(model: ModelShape, parallel: Parallel, dtypes: Dtypes, step: Step) -> list[Work]:
    """All ops of all layers on a rank; pipeline stages one after the other."""
    rank = _Rank(model, parallel, dtypes, step)
    found = [*_projections(rank), *_feed_forward(rank), *_attention(rank), *_indexer(rank)]
    return [op for op in found if op.count and (op.flops or op.bytes)]


def _projections(rank: _Rank) -> list[Work]:
    model, dtypes = rank.model, rank.dtypes

    def linear(rows: float, elements: float) -> Work:
        return work.linear("projections", rows, elements, dtypes.precision.matrix, dtypes.products)

    rows = rank.rows / rank.parallel.dsa_cp
    found = [linear(rows, work.attention_weights(model, rank.heads, rank.kv_heads)).times(model.layers)]
    found.append(linear(rows, work.indexer_weights(model)).times(model.indexer_layers))
    if model.family == "v4":
        for ratio in sorted({*model.compress_ratios} - {*WINDOW_ALONE}):
            weights = work.compressor_weights(model, ratio, model.head_dim)
            found.append(linear(rank.rows, weights).times(model.layers_of(ratio)))
    # The head sees the last token of each request, in 16 bits.
    head = work.linear("projections", rank.requests, model.vocab * model.hidden / rank.parallel.tp, BF16, "bf16")
    return [*found, head]


def _feed_forward(rank: _Rank) -> list[Work]:
    model, dtypes, tp = rank.model, rank.dtypes, rank.parallel.tp
    network, matrix = 3 * model.hidden, dtypes.precision.matrix
    # In a model without experts it is a projection like others.
    part: work.Part = "moe" if model.experts else "projections"
    found = [work.linear(part, rank.rows, network * model.dense_hidden / tp, matrix, dtypes.products).times(model.dense_layers)]
    if model.experts:
        shared = network * model.moe_hidden * model.shared_experts / tp
        everyone = rank.rows * rank.parallel.dp * rank.pcp
        ranks = rank.parallel.expert_ranks
        found += [
            work.linear("moe", rank.rows, shared, matrix, dtypes.products).times(model.moe_layers),
            work.linear("moe", rank.rows, model.experts * model.hidden, BF16, "bf16").times(model.moe_layers),
            work.routed_experts(everyone, model, ranks, dtypes.precision.expert, dtypes.products).times(model.moe_layers),
        ]
    return found


def _attention(rank: _Rank) -> list[Work]:
    model, step = rank.model, rank.step
    row = rank.row
    rows, keys, heads = rank.requests * step.rows * rank.queries, rank.keys, rank.heads
    if model.family == "v4":
        return _compressed(rank, row, rows)
    if model.family == "gqa":
        op = work.grouped(rows, rank.pairs(), keys / rank.dcp, heads, model.head_dim, row, decode=step.decode)
        return [op.times(model.layers)]
    if model.family == "dsa":
        # Under DCP a rank has its part of each row's keys, and the heads of all.
        longest = min(step.total, model.index_topk)
        op = work.sparse(
            rows, rank.pairs(model.index_topk) / rank.dcp, longest, heads * rank.dcp, model.kv_lora, model.rope_dim, row
        )
        return [op.times(model.layers)]
    if step.rows <= work.absorbed_rows(model):
        return [
            work.absorbed(
                rows, rank.pairs() / rank.dcp, keys / rank.dcp, heads * rank.dcp, model.kv_lora, model.rope_dim, row
            ).times(model.layers)
        ]
    return [op.times(model.layers) for op in _expanded(rank, row, rows)]


def _expanded(rank: _Rank, row: float, rows: float) -> list[Work]:
    """MLA in MHA form; the new tokens' own up-projection is one of the projections."""
    model, step, heads = rank.model, rank.step, rank.heads
    cached = rank.requests * step.prior
    parts = math.ceil(step.prior / step.workspace)
    found = [work.expanded(rows, rank.pairs(), rank.keys, heads, model.head_dim, model.value_dim)]
    if cached:
        up = model.nope_dim + model.value_dim
        found += [work.gather(cached, row), work.up_projection(cached, heads, model.kv_lora, up, row)]
        found += [work.merge(rows, heads, model.value_dim, 2)] * parts
    return found


def _compressed(rank: _Rank, row: float, rows: float) -> list[Work]:
    model, step = rank.model, rank.step
    window = rank.pairs(model.window)
    # The window's rows lie together and are read once.
    near = rank.requests * min(step.total, step.rows + model.window)
    found = []
    for ratio in sorted({*model.compress_ratios}):
        if ratio in WINDOW_ALONE:
            op, seen, read = "window", window, near
        elif ratio == 4:
            picked = rank.pairs(ratio * model.index_topk) / ratio
            op, seen, read = "csa", window + picked, near + picked
        else:
            op, seen, read = "hca", window + rank.pairs() / ratio, near + rank.keys / ratio
        found.append(work.compressed(op, rows, seen, read, rank.heads, model.head_dim, row).times(model.layers_of(ratio)))
    return found


def _indexer(rank: _Rank) -> list[Work]:
    """Replicated over tensor-parallel ranks, but for DSA-CP, which shares its rows; V4 scores compressed keys."""
    model, step, dtype = rank.model, rank.step, rank.dtypes.indexer or rank.dtypes.kv
    if not model.indexer_layers:
        return []
    ratio = 4 if model.family == "v4" else 1
    rows, pairs, keys = rank.requests * step.rows * rank.queries, rank.pairs() / ratio, rank.keys / ratio
    products = "int8" if dtype == "c8" else dtype
    scores = work.index_scores(rows, pairs, keys, model.index_heads, model.index_dim, rank.index_row, products)
    return [op.times(model.indexer_layers) for op in (scores, work.top_k(pairs, step.total / ratio))]


def traffic(model: ModelShape, parallel: Parallel, dtypes: Dtypes, step: Step) -> list[Traffic]:
    """All that a card sends in a step."""
    rank = _Rank(model, parallel, dtypes, step)
    found = [*_tensor_parallel(rank), *_expert_traffic(rank), *_context_parallel(rank)]
    if parallel.pp > 1:
        size = rank.rows * model.hidden * BF16
        span = parallel.tp * parallel.pcp * parallel.pp
        found.append(Traffic("pipeline stages", size, f"{rank.rows:.6g} rows x {model.hidden} x 2 B", span, parallel.pp - 1))
    return [entry for entry in found if entry.bytes and entry.count]


def _tensor_parallel(rank: _Rank) -> list[Traffic]:
    model, parallel = rank.model, rank.parallel
    tp = parallel.tp
    ring = f"2 x {tp - 1}/{tp} x {rank.rows:.6g} rows x {model.hidden} x 2 B"
    size = 2 * (tp - 1) / tp * rank.rows * model.hidden * BF16
    found = [Traffic("all-reduce of the feed-forward", size, ring, tp, model.layers)]
    if parallel.dsa_cp == 1:
        return [*found, Traffic("all-reduce of attention", size, ring, tp, model.layers)]
    # Hidden states of the rank's rows are gathered, and its cache rows before that.
    row = rank.row + rank.index_row
    share = (parallel.dsa_cp - 1) / parallel.dsa_cp
    gathered = Traffic(
        "all-gather of DSA-CP's rows",
        share * rank.rows * (BF16 * model.hidden + row),
        f"{parallel.dsa_cp - 1}/{parallel.dsa_cp} x {rank.rows:.6g} rows x (2 B x {model.hidden} + {row:g} B)",
        tp,
        model.layers,
    )
    return [*found, gathered]


def _expert_traffic(rank: _Rank) -> list[Traffic]:
    """Ranks that share experts but not tokens exchange tokens before, and partial outputs after."""
    model, parallel = rank.model, rank.parallel
    others = parallel.dp * rank.pcp
    if not model.experts or others == 1:
        return []
    if parallel.ep:
        # Each rank sends its part of the rows to their experts, and gets outputs back.
        away = (parallel.expert_ranks - 1) / parallel.expert_ranks
        rows = rank.rows / parallel.tp * model.experts_per_token
        name = "all-to-all to and from experts"
        size = 2 * away * rows * model.hidden * BF16
        formula = f"2 x {away:.4g} x {rows:.6g} rows and experts x {model.hidden} x 2 B"
        return [Traffic(name, size, formula, parallel.cards, model.moe_layers)]
    size = (others - 1) * rank.rows * model.hidden * BF16
    formula = f"{others - 1} x {rank.rows:.6g} rows x {model.hidden} x 2 B"
    return [
        Traffic(name, size, formula, parallel.cards, model.moe_layers)
        for name in ("all-gather of tokens for experts", "reduce-scatter of their outputs")
    ]


def _context_parallel(rank: _Rank) -> list[Traffic]:
    model, parallel, step = rank.model, rank.parallel, rank.step
    row = rank.row
    found = []
    if rank.pcp > 1:
        # Ring or gather, the bytes are the same: what the other ranks hold of all caches.
        size = sum(entry.size(round(step.total)) for entry in rank.caches) / model.layers * rank.requests
        formula = f"{rank.pcp - 1}/{rank.pcp} x {size:.6g} B, a layer's caches of {step.total:.6g} tokens"
        found.append(Traffic("exchange of KV", (rank.pcp - 1) / rank.pcp * size, formula, parallel.tp * rank.pcp, model.layers))
    if parallel.dcp > 1:
        share = (parallel.dcp - 1) / parallel.dcp
        if rank.dcp == 1:
            cached = rank.requests * step.prior
            formula = f"{parallel.dcp - 1}/{parallel.dcp} x {cached:.6g} cached rows x {row:g} B"
            return [*found, Traffic("gather of cached latents", share * cached * row, formula, parallel.tp, model.layers)]
        key, value = (model.head_dim,) * 2 if model.family == "gqa" else (model.kv_lora + model.rope_dim, model.kv_lora)
        heads = rank.heads * parallel.dcp
        size = share * rank.rows * heads * (BF16 * (key + value) + work.FP32)
        formula = f"{parallel.dcp - 1}/{parallel.dcp} x {rank.rows:.6g} rows x {heads} heads x (2 B x ({key} + {value}) + 4 B)"
        found.append(Traffic("queries and partial outputs of DCP", size, formula, parallel.tp, model.layers))
    return found
