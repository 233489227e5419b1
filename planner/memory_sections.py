"""The sections of a plan that count bytes: the cache of the prompt, and one card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner import memory
from planner.figure import Figure, PlanError
from planner.hardware import Hardware
from planner.model import ModelShape
from planner.parallel import Parallel, check
from planner.parts import Lines, PlanRequest, Section

BLOCK_SIZE = 128  # tokens; the one size that prefill has on every device (docs/architecture.md)
LENGTHS = tuple(1 << power for power in range(12, 21))  # of plots: 4K to 1M


@dataclass(frozen=True)
class Card:
    """Memory of one card under a division of the model.

    Attributes:
        weights, workspace, activations: figures of memory.py; ``activations`` includes what leaves the workspace.
        left: for KV.
        fit: requests of prompt and output that fit.
        tokens: vLLM's "KV cache size".
    """

    weights: list[Figure]
    workspace: list[Figure]
    activations: list[Figure]
    left: Figure
    fit: Figure
    tokens: Figure | None

    @property
    def used(self) -> float:
        """Bytes of everything but KV."""
        latent = sum(figure.value for figure in self.workspace if figure.name == "workspace latent rows")
        return self.weights[-1].value + self.activations[-1].value + latent


def card(model: ModelShape, hardware: Hardware, request: PlanRequest, parallel: Parallel) -> Card:
    """Weights, workspace and activations of a card, and the requests for which the rest is enough."""
    length = request.prompt + request.output
    seats = -(-request.concurrency // parallel.dp)
    weights = memory.weights(model, request.weight_dtype, parallel)
    workspace = memory.workspace(model, length, seats, BLOCK_SIZE, parallel)
    activations = memory.activations(model, request.chunk, length, seats, BLOCK_SIZE, parallel)
    latent = sum(figure.value for figure in workspace if figure.name == "workspace latent rows")
    left = memory.left_for_kv(hardware.need("hbm_bytes").value, weights[-1].value, activations[-1].value, latent)
    found = memory.caches(model, request.kv_dtype, parallel=parallel)
    fit = memory.requests_that_fit(found, left.value, length, BLOCK_SIZE)
    tokens = memory.kv_tokens(found, left.value, length, BLOCK_SIZE) if left.value > 0 else None
    return Card(weights, workspace, activations, left, fit, tokens)


def least_parallel(model: ModelShape, hardware: Hardware, request: PlanRequest) -> Parallel:
    """The division that is asked for, or the one on the fewest cards with which the requests fit; if none does, the largest.

    Raises:
        PlanError: if the model cannot be divided so.
    """
    if not request.fit:
        check(model, request.parallel)
        return request.parallel
    possible: list[Parallel] = []
    refused: PlanError | None = None
    for parallel in _larger(request.parallel):
        try:
            check(model, parallel)
        except PlanError as error:
            refused = refused or error
            continue
        if card(model, hardware, request, parallel).fit.value * parallel.dp >= request.concurrency:
            return parallel
        possible.append(parallel)
    if not possible and refused:
        raise refused
    return possible[-1]


def _larger(parallel: Parallel) -> Iterator[Parallel]:
    """Tensor parallelism doubled; for each the cache whole, then divided among as many ranks as may be."""
    for step in range(11):
        tp = parallel.tp << step
        yield replace(parallel, tp=tp)
        if parallel.dcp == 1:
            yield from (replace(parallel, tp=tp, dcp=1 << shift) for shift in range(1, tp.bit_length()))


def divided(parallel: Parallel) -> str:
    """TP 8, DCP 2: what is more than one."""
    sizes = {name.upper().replace("_", "-"): size for name, size in vars(parallel).items() if name != "ep" and size > 1}
    return ", ".join([f"{name} {size}" for name, size in sizes.items()] + ["EP"] * parallel.ep) or "one card"


def cache_section(model: ModelShape, request: PlanRequest) -> Section:
    """The cache of one prompt in the whole model, whatever number of cards it is on."""
    names = {"KV of the rank": "KV of the prompt", "KV that does not grow": "KV of windows and compressors"}
    found = memory.kv_bytes(model, request.kv_dtype, tokens=request.prompt)
    figures = [replace(figure, name=names.get(figure.name, figure.name)) for figure in found]
    whole = memory.named(figures, "KV of the prompt")
    formula = f"{whole.value:,.0f} B / {request.prompt:,} tokens"
    per_token = Figure("KV of a token", whole.value / request.prompt, "B", formula, "KV of the prompt, over its tokens")
    return Section("KV cache of one prompt, whole model", (*figures, per_token), tuple(_cache_notes(model, request, figures)))


def _cache_notes(model: ModelShape, request: PlanRequest, figures: list[Figure]) -> list[str]:
    if model.family not in ("mla", "dsa"):
        return []
    layer, every = (memory.named(figures, f"latent rows: {part}").value / 1e9 for part in ("one layer", "all layers"))
    notes = [
        f"{layer:.2f} GB is one layer. Each of the {model.layers} layers has rows of its own: {every:.1f} GB. Figures of a "
        "whole model that look like one layer's have forgotten the layers.",
        "Tensor parallelism does not divide latent rows: all heads read the same one, so every rank keeps all of them. "
        "Decode context parallelism (--dcp) and pipeline parallelism divide them.",
    ]
    if model.family == "dsa":
        notes.append("Indexer keys are on every rank, under decode context parallelism too: ranks must pick the same tokens.")
    if request.kv_dtype == "bf16":
        half = (model.kv_lora + model.rope_dim) * model.layers * request.prompt / 1e9
        notes.append(f"{half:.1f} GB, half of the latent rows, would be one byte an element: no 16-bit cache.")
    return notes


def card_section(model: ModelShape, hardware: Hardware, request: PlanRequest, parallel: Parallel, found: Card) -> Section:
    """What one card holds, and what it has left."""
    cache = [
        replace(figure, name=figure.name.replace("KV of the rank", "KV of a card"))
        for figure in memory.kv_bytes(model, request.kv_dtype, parallel=parallel, tokens=request.prompt)
        if figure.name == "KV of the rank"
    ]
    seats = -(-request.concurrency // parallel.dp)
    activations = [figure for figure in found.activations if figure.name not in {f.name for f in found.workspace}]
    why = "the fewest on which the requests fit" if request.fit else "as asked"
    figures = [
        Figure("cards", parallel.cards, "cards", divided(parallel), why),
        *found.weights,
        *found.workspace,
        *(replace(figure, name=_of_step(figure.name)) for figure in activations),
        found.left,
        *cache,
        *memory.blocks(request.prompt, BLOCK_SIZE, seats, parallel),
        found.fit,
        *([found.tokens] if found.tokens else []),
    ]
    return Section("Memory of one card", tuple(figures), tuple(_card_notes(hardware, request, parallel, found)))


def _of_step(name: str) -> str:
    return name if name == "activation peak" else f"activations: {name}"


def _card_notes(hardware: Hardware, request: PlanRequest, parallel: Parallel, found: Card) -> list[str]:
    notes = []
    size, length = hardware.need("hbm_bytes").value, request.prompt + request.output
    if found.left.value <= 0:
        notes.append(f"DOES NOT FIT: weights, activations and workspace take more than vLLM's share of {size / 1e9:.0f} GB.")
    elif found.fit.value * parallel.dp < request.concurrency:
        notes.append(f"DOES NOT FIT: {request.concurrency} request(s) of {length:,} tokens at once were asked for.")
    if latent := next((figure for figure in found.workspace if figure.name == "workspace latent rows"), None):
        up = sum(figure.value for figure in found.workspace if figure.name.startswith("up-projected"))
        notes.append(
            f"The workspace's latent rows take {latent.value / 1e6:.0f} MB. 131,072 of them would take 151 MB (144 MiB); the "
            f"288 MB that is often quoted is twice that. Up-projected, for this card's heads, they take {up / 1e9:.2f} GB."
        )
    notes.append(
        f"A card's {size / 1e9:.0f} GB are decimal, {size / 2**30:.1f} GiB; vLLM takes {memory.UTILIZATION:.0%} of them "
        "(--gpu-memory-utilization) and counts in GiB."
    )
    return notes


def memory_lines(model: ModelShape, hardware: Hardware, request: PlanRequest, parallel: Parallel) -> Lines:
    """Memory of one card against the prompt's length."""
    lines: dict[str, list[tuple[float, float]]] = {}
    seats = -(-request.concurrency // parallel.dp)
    found = memory.caches(model, request.kv_dtype, parallel=parallel)
    for length in LENGTHS:
        filled = card(model, hardware, replace(request, prompt=length), parallel)
        cache = seats * memory.request_bytes(found, length + request.output, BLOCK_SIZE)
        other = filled.used - filled.weights[-1].value
        values = {
            "weights": filled.weights[-1].value,
            "activations, workspace": other,
            "KV": cache,
            "all of it": filled.used + cache,
            "what vLLM takes of the card": hardware.need("hbm_bytes").value * memory.UTILIZATION,
        }
        for name, value in values.items():
            lines.setdefault(name, []).append((length, value))
    fixed = {name: tuple(points) for name, points in lines.items()}
    return Lines("Memory of one card against length", "B", fixed, f"{seats} request(s), cache in {request.kv_dtype}", log=False)
