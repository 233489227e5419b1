"""Seconds: of a prefill and its chunks, of a decode step, of moving a cache, each with what bounds it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from planner.figure import Figure, PlanError
from planner.hardware import Efficiency, Hardware, efficiency
from planner.model import ModelShape
from planner.parallel import Parallel, check
from planner.step import Dtypes, Step, Traffic, compute, traffic
from planner.work import Work

Bound = Literal["compute", "memory", "latency", "link"]
PARTS = ("indexer", "attention", "projections", "moe", "communication")


@dataclass(frozen=True)
class Term:
    """One op or collective of all layers, on one rank.

    Attributes:
        name: of the op or collective.
        seconds: in all layers.
        bound: what takes the longest; "latency" is a kernel that gives a row to one program.
        formula: with numbers.
        source: of the efficiency or the link.
    """

    name: str
    seconds: float
    bound: Bound
    formula: str
    source: str


@dataclass(frozen=True)
class Part:
    """One of the five parts of a step; its bound is that of most of its time."""

    name: str
    terms: tuple[Term, ...] = ()

    @property
    def seconds(self) -> float:
        """Its terms run one after the other."""
        return sum(term.seconds for term in self.terms)

    @property
    def bound(self) -> Bound | None:
        """None if it takes no time."""
        times: dict[Bound, float] = {}
        for term in self.terms:
            times[term.bound] = times.get(term.bound, 0.0) + term.seconds
        if not self.seconds:
            return None
        return max(times, key=times.__getitem__)

    def figures(self) -> list[Figure]:
        """The part and its terms."""
        whole = Figure(self.name, self.seconds, "s", " + ".join(term.name for term in self.terms), f"bound: {self.bound}")
        return [
            whole,
            *(Figure(f"{self.name}: {t.name}", t.seconds, "s", t.formula, f"{t.bound}; {t.source}") for t in self.terms),
        ]


@dataclass(frozen=True)
class StepTime:
    """A step: ``tokens`` new ones behind ``prior`` cached ones."""

    prior: float
    tokens: float
    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        """Nothing overlaps."""
        return sum(part.seconds for part in self.parts)

    def part(self, name: str) -> Part:
        """One of PARTS."""
        return self.parts[PARTS.index(name)]


@dataclass(frozen=True)
class Prefill:
    """All chunks of a prompt.

    Attributes:
        chunks: in order.
        parts: of all chunks together.
        seconds: until the last is done; pipeline stages work on chunks at the same time.
    """

    chunks: tuple[StepTime, ...]
    parts: tuple[Part, ...]
    seconds: float


def op_seconds(work: Work, hardware: Hardware, shares: Efficiency) -> tuple[float, Bound, str]:
    """Seconds of an op in one layer, its bound, and the source of the efficiency."""
    share = shares.of(work.op, work.dtype, work.heads)
    times: dict[Bound, float] = {
        "compute": work.flops / (hardware.peak(work.dtype).value * share.compute) if work.flops else 0.0,
        "memory": work.bytes / (hardware.need("hbm_bandwidth").value * share.memory),
        "latency": work.serial * share.serial,
    }
    bound = max(times, key=times.__getitem__)
    return times[bound], bound, share.source


def link_seconds(entry: Traffic, hardware: Hardware, shares: Efficiency) -> tuple[float, str]:
    """Seconds of a collective in one layer, and the source of its bandwidth: scale-up where that reaches all of a group."""
    if entry.span <= hardware.need("scale_up_cards").value:
        link = hardware.collective or hardware.need("scale_up")
    else:
        link = hardware.need("scale_out")
    return entry.bytes / link.value + shares.collective_latency, f"{link.value / 1e9:g} GB/s: {link.source} ({link.kind})"


def step_time(
    model: ModelShape, hardware: Hardware, parallel: Parallel, step: Step, shares: Efficiency, dtypes: Dtypes
) -> StepTime:
    """A step's five parts on one rank."""
    terms: dict[str, list[Term]] = {name: [] for name in PARTS}
    for work in compute(model, parallel, dtypes, step):
        seconds, bound, source = op_seconds(work, hardware, shares)
        formula = f"{work.count} layers x ({work.formula})"
        terms[work.part].append(Term(work.op, seconds * work.count, bound, formula, source))
    for entry in traffic(model, parallel, dtypes, step):
        seconds, source = link_seconds(entry, hardware, shares)
        formula = f"{entry.count} x {entry.formula}"
        terms["communication"].append(Term(entry.name, seconds * entry.count, "link", formula, source))
    parts = tuple(Part(name, tuple(found)) for name, found in terms.items())
    return StepTime(step.prior, step.requests * step.rows, parts)


def prefill(
    model: ModelShape,
    hardware: Hardware,
    parallel: Parallel | None = None,
    prompt: int = 1_000_000,
    chunk: int = 8192,
    shares: Efficiency | None = None,
    dtypes: Dtypes | None = None,
    cached: int = 0,
) -> Prefill:
    """A prompt in chunks, of which the first ``cached`` tokens are there already.

    Raises:
        PlanError: for an impossible division, or a figure of the hardware that is not known.
    """
    parallel, shares, dtypes = _defaults(model, hardware, parallel, shares, dtypes)
    if chunk < 1 or not 0 <= cached < prompt:
        raise PlanError(
            f"chunk = {chunk}, cached = {cached}: at least 1 token, and fewer cached than the {prompt} of the prompt."
        )
    chunks = tuple(
        step_time(model, hardware, parallel, Step(1, min(chunk, prompt - prior), prior), shares, dtypes)
        for prior in range(cached, prompt, chunk)
    )
    parts = tuple(_sum(name, (step.part(name) for step in chunks)) for name in PARTS)
    # A stage takes 1/pp of a chunk; the last chunk goes through the others alone.
    serial = sum(step.seconds for step in chunks) / parallel.pp
    return Prefill(chunks, parts, serial + chunks[-1].seconds * (parallel.pp - 1) / parallel.pp)


def _sum(name: str, parts: Iterable[Part]) -> Part:
    """Terms of one name and bound added up."""
    found: dict[tuple[str, Bound], Term] = {}
    for term in (term for part in parts for term in part.terms):
        key = term.name, term.bound
        old = found.get(key, replace(term, seconds=0.0, formula=""))
        found[key] = replace(term, seconds=old.seconds + term.seconds, formula=f"all chunks; the last: {term.formula}")
    return Part(name, tuple(found.values()))


def decode_step(
    model: ModelShape,
    hardware: Hardware,
    parallel: Parallel | None = None,
    context: float = 1_000_000,
    batch: int = 1,
    shares: Efficiency | None = None,
    dtypes: Dtypes | None = None,
    query_tokens: int = 1,
) -> StepTime:
    """One step of ``batch`` requests of ``context`` tokens each; ``query_tokens`` of each, with speculation more than one."""
    parallel, shares, dtypes = _defaults(model, hardware, parallel, shares, dtypes)
    step = Step(batch, query_tokens, context, decode=True)
    return step_time(model, hardware, parallel, step, shares, dtypes)


def _defaults(
    model: ModelShape, hardware: Hardware, parallel: Parallel | None, shares: Efficiency | None, dtypes: Dtypes | None
) -> tuple[Parallel, Efficiency, Dtypes]:
    parallel = parallel or Parallel()
    check(model, parallel)
    return parallel, shares or efficiency(hardware), dtypes or Dtypes()


@dataclass(frozen=True)
class Transfer:
    """A cache from prefill to decode.

    Attributes:
        bytes: of all layers.
        seconds: on the link.
        exposed: seconds after the prefill's end until it is all there.
        buffer: bytes that the receiver keeps ready beside its cache: what is under way at a time.
    """

    bytes: float
    seconds: float
    exposed: float
    buffer: float


def transfer(layer_bytes: float, layers: int, link: float, prefill_seconds: float = 0.0, by_layer: bool = False) -> Transfer:
    """A request's cache over a link of ``link`` B/s.

    By layer, each goes as soon as its last chunk is done in ``prefill_seconds / layers``: if the link keeps up, the last layer
    alone is exposed, else what it lags behind. Otherwise all goes after the prefill.
    """
    if link <= 0:
        raise PlanError(f"link = {link}: its B/s are required.")
    one, total = layer_bytes / link, layers * layer_bytes
    if not by_layer:
        return Transfer(total, layers * one, layers * one, total)
    lag = max(0.0, (layers - 1) * (one - prefill_seconds / layers))
    return Transfer(total, layers * one, one + lag, layer_bytes)


@dataclass(frozen=True)
class BreakEven:
    """Loading a prefix from a tier against computing it again.

    Attributes:
        reload: seconds.
        recompute: seconds.
        bandwidth: B/s at which both take as long; a faster tier is worth it.
        tokens: shortest prefix, in whole chunks, that loads faster than it computes; None if there is none up to the prompt.
    """

    reload: float
    recompute: float
    bandwidth: float
    tokens: int | None

    @property
    def worth(self) -> bool:
        """Whether loading is faster."""
        return self.reload < self.recompute


def offload_break_even(done: Prefill, token_bytes: float, link: float) -> BreakEven:
    """For the prompt of a prefill, whose caches take ``token_bytes`` a token and card, over ``link`` B/s of the card."""
    if link <= 0:
        raise PlanError(f"link = {link}: the B/s of the tier are required.")
    tokens = sum(step.tokens for step in done.chunks)
    share = done.seconds / sum(step.seconds for step in done.chunks)
    computed, seen, first = 0.0, 0.0, None
    for step in done.chunks:
        computed, seen = computed + step.seconds * share, seen + step.tokens
        if first is None and seen * token_bytes / link < computed:
            first = round(seen)
    size = tokens * token_bytes
    return BreakEven(size / link, done.seconds, size / done.seconds, first)
