"""The sections of a plan that choose: the six routes to a long prompt, and the fewest cards that reach a target."""

from __future__ import annotations

import math

from planner import routes, search
from planner.figure import Figure
from planner.hardware import Hardware
from planner.memory_sections import divided
from planner.model import ModelShape
from planner.parts import Bars, PlanRequest, Section
from planner.time_sections import Setting, link_of

RANKS = 4  # of context parallelism, beside those of tensor parallelism, where a route has it
SHORT = {
    routes.CHUNKING: "chunking",
    routes.CONTEXT: "context parallel",
    routes.LATENT: "latent attention",
    routes.SPARSE: "sparse attention",
    routes.OFFLOAD: "offload",
    routes.SPLIT: "disaggregation",
}


def smallest(model: ModelShape, hardware: Hardware, request: PlanRequest) -> search.Candidate:
    """The fewest cards for the request's targets.

    Raises:
        PlanError: if no division reaches them; the message has the nearest.
    """
    setting = Setting.of(model, hardware, request.parallel, request)
    return search.smallest(
        model,
        hardware,
        request.prompt,
        request.ttft or math.inf,
        request.tpot or math.inf,
        output=request.output,
        batch=request.concurrency,
        chunk=request.chunk,
        shares=setting.shares,
        dtypes=setting.dtypes,
    )


def smallest_section(request: PlanRequest, found: search.Candidate) -> Section:
    """What was asked and what reaches it."""
    asked = [("TTFT", request.ttft), ("TPOT", request.tpot)]
    targets = " and ".join(f"{name} of at most {seconds:g} s" for name, seconds in asked if seconds)
    division = divided(found.parallel)
    figures = (
        Figure("smallest: cards", found.parallel.cards, "cards", division, "searched: powers of two, up to 128 cards"),
        Figure("smallest: time to the first token", found.ttft, "s", f"as in Prefill, with {division}", "planner/timing.py"),
        Figure("smallest: decode step", found.tpot, "s", f"as in Decode, with {division}", "planner/timing.py"),
        Figure(
            "smallest: requests that fit", found.requests, "requests", f"as in Memory, with {division}", "planner/memory.py"
        ),
    )
    return Section(f"The fewest cards with a {targets}", figures, ("Of as many cards, the division with the shortest TTFT.",))


def _name(names: tuple[str, ...]) -> str:
    if not names:
        return "none of them"
    return SHORT[names[0]] if len(names) == 1 else "all together"


def routes_section(setting: Setting) -> tuple[Section, tuple[Bars, Bars]]:
    """Each route alone and all together: times, and bytes of a card."""
    request, hardware = setting.request, setting.hardware
    tier = request.offload or "host"
    known = hardware.figures()
    chosen = routes.Setting(
        tp=setting.parallel.tp,
        ranks=RANKS,
        chunk=request.chunk,
        link=link_of(setting, "remote").value if request.link_gbps or "scale_out" in known else None,
        tier=link_of(setting, tier).value if request.offload or "host_link" in known else None,
    )
    found, missing = routes.compare(setting.model, hardware, request.prompt, chosen, setting.shares, setting.dtypes)
    figures: list[Figure] = []
    notes = [
        "Without any of them: keys and values for each head, all tokens seen, the prompt in one step, no other ranks, no other "
        f"tier. Tensor parallelism of {chosen.tp} throughout; context parallelism adds {RANKS} ranks to each."
    ]
    for route in found:
        name = _name(route.names)
        on = f"{route.cards} cards"
        figures += [
            Figure(f"{name}: TTFT", route.ttft, "s", f"prefill on {on}", "planner/routes.py"),
            Figure(f"{name}: decode step", route.tpot, "s", f"one request on {on}", "planner/routes.py"),
            Figure(f"{name}: wait of a decode", route.stall, "s", "the longest step of another prompt", "planner/routes.py"),
            Figure(f"{name}: KV on a card", route.kv, "B", f"{request.prompt:,} tokens in blocks", "planner/memory.py"),
            Figure(f"{name}: activations", route.activations, "B", "activation peak", "planner/memory.py"),
        ]
        if route.again is not None:
            figures.append(Figure(f"{name}: TTFT when cached", route.again, "s", "reload + a decode step", "planner/routes.py"))
        if not route.fits:
            notes.append(f"{name}: does not fit on a card of {known['hbm_bytes'].value / 1e9:.0f} GB.")
        if route.note:
            notes.append(f"{name}: {route.note}.")
    notes += [f"{SHORT[name]} is left out: {reason}." for name, reason in missing.items()]
    fits = {True: "", False: " ×"}
    bars = (
        Bars(
            f"Six routes to {request.prompt:,} tokens: time to the first token",
            "s",
            tuple((_name(route.names) + fits[route.fits], {"TTFT": route.ttft}) for route in found),
            "of a prompt that is not cached; × does not fit on a card",
        ),
        Bars(
            f"Six routes to {request.prompt:,} tokens: memory of a card",
            "B",
            tuple(
                (_name(route.names), {"weights": route.weights, "activations": route.activations, "KV": route.kv})
                for route in found
            ),
        ),
    )
    return Section("Six routes, alone and together", tuple(figures), tuple(notes)), bars
