"""A whole plan: the request's model and hardware read, the figures that answer it, what to plot, and the command line."""

from __future__ import annotations

from dataclasses import replace

from planner import command, hardware, memory, memory_sections, model, route_sections, time_sections
from planner.figure import Figure
from planner.hardware import Hardware
from planner.model import ModelShape
from planner.parallel import Parallel
from planner.parts import Bars, Lines, Plan, PlanRequest, Section
from planner.time_sections import Setting
from planner.weights import PRECISIONS

__all__ = ["KV_DTYPES", "OFFLOAD_TIERS", "WEIGHT_DTYPES", "Bars", "Lines", "Plan", "PlanRequest", "Section", "make_plan"]

KV_DTYPES = ("bf16", "fp8", "c8")
WEIGHT_DTYPES = tuple(PRECISIONS)
OFFLOAD_TIERS = ("host", "remote", "nvme")
# By what the name of a hardware's figure has in it; links and bandwidths are the rest.
UNITS = {"flops": "FLOP/s", "bf16": "FLOP/s", "ops": "OP/s", "bytes": "B", "cards": "cards"}


def make_plan(request: PlanRequest) -> Plan:
    """The answer to a request.

    Raises:
        PlanError: for a model, hardware, dtype or division that is not known; the message lists those that are.
    """
    shape, device = model.read_model(request.model), hardware.load(request.hardware)
    fastest = route_sections.smallest(shape, device, request) if request.ttft or request.tpot else None
    given = None if fastest is None or not request.fit else fastest.parallel
    parallel = given or memory_sections.least_parallel(shape, device, request)
    card = memory_sections.card(shape, device, request, parallel)
    setting = Setting.of(shape, device, parallel, request)
    done = setting.prefill(request.prompt)
    sections = [
        memory_sections.cache_section(shape, request),
        memory_sections.card_section(shape, device, request, parallel, card),
        time_sections.prefill_section(setting, done),
        time_sections.decode_section(setting, done.seconds),
    ]
    if fastest:
        sections.append(route_sections.smallest_section(request, fastest))
    if request.disaggregate:
        sections.append(time_sections.transfer_section(setting, done))
    if request.offload:
        sections.append(time_sections.offload_section(setting, done, request.offload))
    routes, route_bars = route_sections.routes_section(setting)
    sections += [routes, _hardware_section(device)]
    cards = f"{parallel.cards} x {device.name}" if parallel.cards > 1 else f"one {device.name}"
    return Plan(
        title=f"{shape.name} on {cards}: {request.prompt:,} tokens",
        request=replace(request, parallel=parallel, fit=False),
        sections=tuple(sections),
        command=_command(shape, device, parallel, request),
        lines=(time_sections.prefill_lines(setting, done), memory_sections.memory_lines(shape, device, request, parallel)),
        bars=(time_sections.chunk_bars(done), time_sections.step_bars(setting), *route_bars),
    )


def _command(shape: ModelShape, device: Hardware, parallel: Parallel, request: PlanRequest) -> str:
    """The command line, what stands in its way as comments above it."""
    length = request.prompt + request.output
    offload = None
    if request.offload:
        found = memory.caches(shape, request.kv_dtype)
        offload = request.offload, float(request.concurrency * memory.request_bytes(found, length))
    line = command.serve(
        request.model,
        shape,
        device.name,
        parallel,
        max_len=length,
        requests=request.concurrency,
        chunk=request.chunk,
        kv_dtype=request.kv_dtype,
        disaggregate=request.disaggregate,
        offload=offload,
    )
    told = command.obstacles(shape, parallel, max_len=length, kv_dtype=request.kv_dtype, disaggregate=request.disaggregate)
    return "\n".join([*(f"# {obstacle}" for obstacle in told), line])


def _hardware_section(device: Hardware) -> Section:
    figures = []
    for name, known in device.figures().items():
        unit = next((unit for key, unit in UNITS.items() if key in name), "B/s")
        figures.append(Figure(f"hardware: {name}", known.value, unit, known.kind, f"{known.kind}: {known.source}"))
    note = "Peaks are those of dense products, links one direction of one card."
    return Section(f"What is known of {device.name}", tuple(figures), (note,))
