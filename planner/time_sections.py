"""The sections of a plan that count seconds: prefill, decode, a cache on its way, and a cache kept elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from planner import memory, timing
from planner.figure import Figure, PlanError
from planner.hardware import Efficiency, Hardware, Sourced, efficiency
from planner.memory_sections import LENGTHS
from planner.model import ModelShape
from planner.parallel import Parallel
from planner.parts import Bars, Lines, PlanRequest, Section
from planner.step import Dtypes

# Products of what is stored: 4-bit experts are multiplied in fp8, and read here as a byte, which is more than they take.
PRODUCTS = {"fp4": "fp8"}
INDEXER = {"c8": "int8"}
BITS = 8
ASSUMED = "not measured"  # so hardware.toml ends the source of a share that is no measurement
LINKS = {"host": "host_link", "remote": "scale_out"}


@dataclass(frozen=True)
class Setting:
    """What every step of a plan is timed with."""

    model: ModelShape
    hardware: Hardware
    parallel: Parallel
    request: PlanRequest
    shares: Efficiency
    dtypes: Dtypes

    @classmethod
    def of(cls, model: ModelShape, hardware: Hardware, parallel: Parallel, request: PlanRequest) -> Setting:
        """With the request's dtypes and efficiencies."""
        kv, weights = request.kv_dtype, request.weight_dtype
        dtypes = Dtypes(PRODUCTS.get(weights, weights), kv, INDEXER.get(kv, kv))
        return cls(model, hardware, parallel, request, efficiency(hardware, request.efficiency), dtypes)

    def prefill(self, prompt: int, cached: int = 0) -> timing.Prefill:
        """A prompt of this length."""
        chunk = min(self.request.chunk, prompt)
        return timing.prefill(self.model, self.hardware, self.parallel, prompt, chunk, self.shares, self.dtypes, cached)

    def decode(self, context: float) -> timing.StepTime:
        """A step of all requests, each with this context."""
        batch = self.request.concurrency
        return timing.decode_step(self.model, self.hardware, self.parallel, context, batch, self.shares, self.dtypes)


def _parts(prefix: str, parts: Iterable[timing.Part]) -> list[Figure]:
    """Figures of the parts that take time, with what bounds them, and of their terms."""
    figures = []
    for part in parts:
        if not part.seconds:
            continue
        whole, *terms = part.figures()
        figures.append(replace(whole, name=f"{prefix}: {part.name}", formula=f"{part.bound}-bound: {whole.formula}"))
        by_name: dict[str, list[Figure]] = {}
        for term in terms:
            by_name.setdefault(f"{prefix}: {term.name}", []).append(term)
        for name, found in by_name.items():
            figures += [replace(t, name=f"{name} ({at})" if len(found) > 1 else name) for at, t in enumerate(found, start=1)]
    return figures


def prefill_section(setting: Setting, done: timing.Prefill) -> Section:
    """Seconds of the whole prompt, its first and last chunk, and each part."""
    request, pp = setting.request, setting.parallel.pp
    names = " + ".join(part.name for part in done.parts if part.seconds)
    formula = names if pp == 1 else f"({names}) / {pp} stages + the last chunk's way through the other {pp - 1}"
    first, last = done.chunks[0], done.chunks[-1]
    figures = [
        Figure("time to the first token", done.seconds, "s", formula, "sum of the parts below; nothing overlaps"),
        Figure(
            "prompt tokens a second",
            request.prompt / done.seconds,
            "tokens/s",
            f"{request.prompt:,} / {done.seconds:.4g} s",
            "time to the first token",
        ),
        Figure("first chunk", first.seconds, "s", f"{first.tokens:,.0f} tokens behind {first.prior:,.0f}", "its five parts"),
        Figure("last chunk", last.seconds, "s", f"{last.tokens:,.0f} tokens behind {last.prior:,.0f}", "its five parts"),
        *_parts("prefill", done.parts),
    ]
    notes = [f"{len(done.chunks)} chunks of at most {request.chunk:,} tokens, one request alone on the cards."]
    if request.concurrency > 1:
        turns = -(-request.concurrency // setting.parallel.dp)
        formula = f"{turns} x {done.seconds:.4g} s"
        figures.insert(
            1, Figure("the last request's first token", turns * done.seconds, "s", formula, "one prompt after the other")
        )
    if setting.model.indexer_layers:
        notes.append(
            "Sparse attention reads a fixed number of tokens, but the indexer scores every pair: it grows with the square of "
            "the length and decides a long prompt's time."
        )
        if setting.parallel.tp > setting.parallel.dsa_cp:
            notes.append("Tensor parallelism repeats the indexer on every rank; --dsa-cp divides its rows among them.")
    notes.append(
        f"Shares of peak that ops reach are those of the profile {request.efficiency!r}; --explain names each one's source."
    )
    guessed = sum(term.seconds for part in done.parts for term in part.terms if ASSUMED in term.source)
    if guessed:
        share = guessed / sum(part.seconds for part in done.parts)
        notes.append(f"{share:.0%} of this time rests on shares that are assumed: no measurement of those ops is known here.")
    return Section("Prefill", tuple(figures), tuple(notes))


def decode_section(setting: Setting, ttft: float) -> Section:
    """Seconds of a step behind the whole prompt."""
    request = setting.request
    step = setting.decode(request.prompt)
    every = ttft + request.output * step.seconds
    formula = " + ".join(part.name for part in step.parts if part.seconds)
    figures = (
        Figure("decode step", step.seconds, "s", formula, "sum of the parts below; nothing overlaps"),
        Figure(
            "output tokens a second",
            request.concurrency / step.seconds,
            "tokens/s",
            f"{request.concurrency} / {step.seconds:.4g} s",
            "decode step",
        ),
        Figure(
            "a whole answer", every, "s", f"{ttft:.4g} s + {request.output:,} x {step.seconds:.4g} s", "prefill, then decode"
        ),
        *_parts("decode", step.parts),
    )
    note = f"{request.concurrency} request(s) with {request.prompt:,} cached tokens each; without speculative decoding."
    return Section("Decode", figures, (note,))


def link_of(setting: Setting, tier: str) -> Sourced:
    """Bandwidth of a card to a tier, or to the other instance: the request's, else the hardware's.

    Raises:
        PlanError: if neither has one.
    """
    given = setting.request.link_gbps
    if given is not None:
        return Sourced(given * 1e9 / BITS, "datasheet", f"--link-gbps {given:g}")
    if tier not in LINKS:
        raise PlanError(f"--offload {tier}: its bandwidth is required as --link-gbps. Known without are {', '.join(LINKS)}.")
    return setting.hardware.need(LINKS[tier])


def _card_cache(setting: Setting) -> tuple[float, int, str]:
    """Bytes of the prompt's cache on a card, its layers, and the formula."""
    found = memory.caches(setting.model, setting.request.kv_dtype, parallel=setting.parallel)
    total = sum(cache.size(setting.request.prompt) for cache in found)
    layers = -(-setting.model.layers // setting.parallel.pp)
    return total, layers, f"{total:,.0f} B"


def transfer_section(setting: Setting, done: timing.Prefill) -> Section:
    """A prompt's cache from the instance that prefills to the one that decodes, after it or layer by layer."""
    link = link_of(setting, "remote")
    total, layers, formula = _card_cache(setting)
    after = timing.transfer(total / layers, layers, link.value)
    # The last chunk is what the transfer can hide behind: earlier chunks' rows have gone by then.
    during = timing.transfer(total / layers, layers, link.value, done.seconds, by_layer=True)
    source = f"{link.source} ({link.kind})"
    rate = f"{link.value / 1e9:g} GB/s"
    figures = (
        Figure("link of a card", link.value, "B/s", rate, source),
        Figure("one layer's transfer", total / layers / link.value, "s", f"{total / layers:,.0f} B / {rate}", source),
        Figure("transfer after prefill", after.exposed, "s", f"{formula} / {rate}", source),
        Figure("transfer by layer, exposed", during.exposed, "s", "last layer + what the link lags behind prefill", source),
        Figure("buffer of decode, whole", after.buffer, "B", formula, "the whole cache is on its way"),
        Figure("buffer of decode, by layer", during.buffer, "B", f"{formula} / {layers} layers", "one layer is on its way"),
    )
    note = "Each card sends its own part. By layer, all but the last layer travels while prefill computes."
    return Section("Prefill and decode apart", figures, (note,))


def offload_section(setting: Setting, done: timing.Prefill, tier: str) -> Section:
    """Loading the prompt's cache from a tier, or computing it again."""
    link = link_of(setting, tier)
    total, _, formula = _card_cache(setting)
    found = timing.offload_break_even(done, total / setting.request.prompt, link.value)
    source = f"{link.source} ({link.kind})"
    figures = [
        Figure(f"reload from {tier}", found.reload, "s", f"{formula} / {link.value / 1e9:g} GB/s", source),
        Figure("recompute", found.recompute, "s", "time to the first token", "Prefill"),
        Figure("break-even bandwidth", found.bandwidth, "B/s", f"{formula} / {found.recompute:.4g} s", "reload = recompute"),
    ]
    if found.tokens is not None:
        figures.append(Figure("break-even prefix", found.tokens, "tokens", "first chunk whose reload is faster", "by chunks"))
    note = f"Loading is {'faster' if found.worth else 'slower'} than computing the whole prompt again."
    return Section(f"Offload to {tier}", tuple(figures), (note,))


def prefill_lines(setting: Setting, done: timing.Prefill) -> Lines:
    """Time to the first token against length, and its parts; a longer prompt begins with a shorter one's chunks."""
    chunk, pp = min(setting.request.chunk, setting.request.prompt), setting.parallel.pp
    full = min(setting.request.prompt, LENGTHS[-1]) // chunk
    chunks = list(done.chunks[:full])
    if LENGTHS[-1] > full * chunk:
        chunks += setting.prefill(LENGTHS[-1], full * chunk).chunks
    lines: dict[str, list[tuple[float, float]]] = {}
    for length in LENGTHS:
        count = length // chunk
        if not count:
            continue
        through = chunks[count - 1].seconds * (pp - 1) / pp
        values = {"all": sum(step.seconds for step in chunks[:count]) / pp + through}
        values |= {name: sum(step.part(name).seconds for step in chunks[:count]) for name in timing.PARTS}
        for name, value in values.items():
            lines.setdefault(name, []).append((count * chunk, value))
    shown = {name: tuple(points) for name, points in lines.items() if any(y for _, y in points)}
    return Lines("Time to the first token against length", "s", shown, f"chunks of {setting.request.chunk:,} tokens")


def chunk_bars(done: timing.Prefill) -> Bars:
    """Some of the whole chunks, by part."""
    last = max(len(done.chunks) - 2, 0)
    chosen = sorted({round(last * share) for share in (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)})
    rows = tuple(
        (f"behind {done.chunks[at].prior:,.0f}", {part.name: part.seconds for part in done.chunks[at].parts}) for at in chosen
    )
    return Bars("A chunk against its context", "s", rows, "tokens that are cached before the chunk")


def step_bars(setting: Setting) -> Bars:
    """A decode step by part, against its context."""
    lengths = [length for length in LENGTHS if length >= 1 << 14][::2]
    steps = {length: setting.decode(length) for length in lengths}
    rows = tuple((f"behind {at:,}", {part.name: part.seconds for part in step.parts}) for at, step in steps.items())
    return Bars("A decode step against its context", "s", rows, f"{setting.request.concurrency} request(s)")
