"""Six routes to a million tokens, each alone and all together: what they do to time and to the memory of a card.

Without any of them a model would have keys and values for each head, see all tokens, take the prompt in one step, keep its
cache on the card, and prefill beside its decodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from planner import memory
from planner.figure import PlanError
from planner.hardware import Efficiency, Hardware
from planner.model import ModelShape
from planner.parallel import Parallel
from planner.step import Dtypes
from planner.timing import decode_step, prefill, transfer
from planner.weights import weights

CHUNKING, CONTEXT, LATENT, SPARSE, OFFLOAD, SPLIT = (
    "chunked prefill", "context parallelism", "latent attention", "sparse attention", "offload", "disaggregation",
)  # fmt: skip
ROUTES = (CHUNKING, CONTEXT, LATENT, SPARSE, OFFLOAD, SPLIT)


@dataclass(frozen=True)
class Setting:
    """What routes are measured on.

    Attributes:
        tp: ranks that share the heads, in all routes.
        ranks: that context parallelism adds.
        chunk: tokens of a step, of each context-parallel rank, with chunking.
        link: B/s of a card to the decode side; None without disaggregation.
        tier: B/s of a card to where caches are offloaded; None without.
    """

    tp: int = 8
    ranks: int = 8
    chunk: int = 8192
    link: float | None = None
    tier: float | None = None


@dataclass(frozen=True)
class Route:
    """One or more routes taken.

    Attributes:
        names: of the routes; none is the model without any.
        cards: of the prefill, where there is disaggregation.
        ttft: seconds to the first token, of a prompt that is not cached.
        again: seconds to the first token when its cache is in the tier, None without offload.
        tpot: seconds of a decode step alone.
        stall: seconds that a decode waits at most for a step of another prompt.
        kv, activations, weights: bytes on a card.
        fits: whether they do together.
        note: what to know.
    """

    names: tuple[str, ...]
    cards: int
    ttft: float
    again: float | None
    tpot: float
    stall: float
    kv: float
    activations: float
    weights: float
    fits: bool
    note: str = ""


def stripped(model: ModelShape, latent: bool, sparse: bool) -> ModelShape:
    """The model without latent or sparse attention: FLOPs and bytes of plain attention with the same heads.

    MLA's heads of 192 and 128 become ones of 160, the same in sum. V4 without compression has one row to a token, for all
    heads, whose keys and values are counted apart.
    """
    if sparse or model.family == "gqa":
        return model
    if latent and model.family in ("mla", "dsa"):
        return replace(model, family="mla", index_heads=0, index_dim=0, index_topk=0, indexer_layers=0)
    dim = model.head_dim if model.family == "v4" else (model.head_dim + model.value_dim) // 2
    plain = replace(model, family="gqa", kv_heads=1 if latent else model.heads, head_dim=dim, compress_ratios=())
    return replace(plain, index_heads=0, index_dim=0, index_topk=0, indexer_layers=0)


def _possible(model: ModelShape, setting: Setting) -> dict[str, str]:
    """Why a route is not there, by name."""
    missing = {}
    if model.family == "gqa":
        missing[LATENT] = missing[SPARSE] = f"{model.name} has KV heads and dense attention"
    if model.family == "mla":
        missing[SPARSE] = f"{model.name} has no indexer"
    if not setting.tier:
        missing[OFFLOAD] = "the tier's B/s are not given"
    if not setting.link:
        missing[SPLIT] = "the link's B/s are not given"
    return missing


def take(
    names: Iterable[str],
    model: ModelShape,
    hardware: Hardware,
    prompt: int,
    setting: Setting | None = None,
    shares: Efficiency | None = None,
    dtypes: Dtypes | None = None,
) -> Route:
    """These routes together; sparse attention brings latent rows with it, which it works on.

    Raises:
        PlanError: for a route that is not known, or not there for this model and setting.
    """
    names, setting, dtypes = tuple(names), setting or Setting(), dtypes or Dtypes()
    missing = _possible(model, setting)
    for name in names:
        if name not in ROUTES:
            raise PlanError(f"route {name!r} is not known. Known are {', '.join(ROUTES)}.")
        if name in missing:
            raise PlanError(f"{name}: {missing[name]}.")
    shape = stripped(model, LATENT in names, SPARSE in names)
    parallel = _parallel(shape, setting, CONTEXT in names)
    chunk = min(setting.chunk * parallel.pcp, prompt) if CHUNKING in names else prompt
    # A family that does not know the model's cache dtype has 16 bits.
    dtypes = dtypes if shape is model else replace(dtypes, kv="bf16", indexer=None)
    done = prefill(shape, hardware, parallel, prompt, chunk, shares, dtypes)
    caches = memory.caches(shape, dtypes.kv, dtypes.indexer, parallel)
    kv = float(memory.request_bytes(caches, prompt))
    peak = memory.named(memory.activations(shape, chunk, prompt, parallel=parallel), "activation peak").value
    size = memory.named(weights(model, dtypes.weights, parallel), "weights").value
    left = memory.left_for_kv(hardware.need("hbm_bytes").value, size, peak).value
    ttft, tpot = done.seconds, decode_step(shape, hardware, parallel, prompt, 1, shares, dtypes).seconds
    if SPLIT in names and setting.link:
        ttft += transfer(kv / shape.layers, shape.layers, setting.link, done.seconds, by_layer=True).exposed
    return Route(
        names,
        parallel.cards,
        ttft,
        # The last token is computed.
        kv / setting.tier + tpot if OFFLOAD in names and setting.tier else None,
        tpot,
        0.0 if SPLIT in names else max(step.seconds for step in done.chunks),
        kv,
        peak,
        size,
        kv <= left,
        _note(names, shape, parallel),
    )


def _note(names: tuple[str, ...], shape: ModelShape, parallel: Parallel) -> str:
    notes = []
    if shape.indexer_layers and LATENT not in names:
        notes.append("with it comes latent attention")
    if shape.indexer_layers and parallel.dsa_cp < parallel.tp:
        notes.append(f"each of {parallel.tp} ranks scores all keys; context parallelism (dsa_cp) shares that out")
    return "; ".join(notes)


def _parallel(shape: ModelShape, setting: Setting, context: bool) -> Parallel:
    """With context parallelism: tokens of the prompt over more ranks, and caches or sparse queries over those of ``tp``."""
    tp = setting.tp
    if not context:
        return Parallel(tp=tp)
    shared = {"gqa": max(1, tp // shape.kv_heads), "mla": tp, "dsa": 1, "v4": 1}[shape.family]
    return Parallel(tp=tp, pcp=setting.ranks, dcp=shared, dsa_cp=tp if shape.family in ("dsa", "v4") else 1)


def compare(
    model: ModelShape,
    hardware: Hardware,
    prompt: int = 1_000_000,
    setting: Setting | None = None,
    shares: Efficiency | None = None,
    dtypes: Dtypes | None = None,
) -> tuple[list[Route], dict[str, str]]:
    """None, each alone, all together; and why those are missing that are."""
    missing = _possible(model, setting or Setting())
    there = tuple(name for name in ROUTES if name not in missing)
    found = [
        take(names, model, hardware, prompt, setting, shares, dtypes) for names in ((), *((name,) for name in there), there)
    ]
    return found, missing
