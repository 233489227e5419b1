"""A whole plan: the request's model and hardware read, the figures that answer it, what to plot, and the command line."""

from __future__ import annotations

from planner import command, hardware, memory_sections
from planner.model import read_model
from planner.parts import Bars, Lines, Plan, PlanRequest, Section
from planner.weights import PRECISIONS

__all__ = ["KV_DTYPES", "OFFLOAD_TIERS", "WEIGHT_DTYPES", "Bars", "Lines", "Plan", "PlanRequest", "Section", "make_plan"]

KV_DTYPES = ("bf16", "fp8", "c8")
WEIGHT_DTYPES = tuple(PRECISIONS)
OFFLOAD_TIERS = ("host", "remote", "nvme")


def make_plan(request: PlanRequest) -> Plan:
    """The answer to a request.

    Raises:
        PlanError: for a model, hardware, dtype or division that is not known; the message lists those that are.
    """
    model, device = read_model(request.model), hardware.load(request.hardware)
    parallel = memory_sections.least_parallel(model, device, request)
    card = memory_sections.card(model, device, request, parallel)
    sections = (
        memory_sections.cache_section(model, request),
        memory_sections.card_section(model, device, request, parallel, card),
    )
    return Plan(model.name, request, sections, "")
