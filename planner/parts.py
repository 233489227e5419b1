"""What a plan is made of: the request, sections of figures, and series for plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from planner.figure import Figure
from planner.parallel import Parallel


@dataclass(frozen=True)
class PlanRequest:
    """What is asked.

    Attributes:
        model: path of a config.json, or of its folder.
        hardware: a name of hardware.toml.
        prompt, output: tokens of a request.
        concurrency: requests at once.
        parallel: how the model is divided.
        fit: raise tensor parallelism from ``parallel.tp`` on, and use decode context parallelism, until the requests fit.
        kv_dtype, weight_dtype: of what is stored.
        efficiency: a profile of hardware.toml: the shares of peak that ops reach.
        chunk: tokens of a prefill step.
        disaggregate: prefill and decode on instances of their own, ``link_gbps`` (Gb/s) between them.
        offload: a tier for KV that is not in use.
        ttft, tpot: seconds to reach, for the smallest configuration.
    """

    model: str
    hardware: str = "910C"
    prompt: int = 131072
    output: int = 1024
    concurrency: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    fit: bool = True
    kv_dtype: str = "bf16"
    weight_dtype: str = "bf16"
    efficiency: str = "best"
    chunk: int = 8192
    disaggregate: bool = False
    link_gbps: float | None = None
    offload: str | None = None
    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True)
class Section:
    """Figures that belong together, and what to know about them."""

    title: str
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lines:
    """Named lines over prompt lengths, in one unit; ``log`` is of the unit's axis, that of lengths always is."""

    title: str
    unit: str
    lines: Mapping[str, tuple[tuple[float, float], ...]]
    note: str = ""
    log: bool = True


@dataclass(frozen=True)
class Bars:
    """Labelled bars, each of named parts that add up to it, in one unit."""

    title: str
    unit: str
    rows: tuple[tuple[str, Mapping[str, float]], ...]
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """The answer."""

    title: str
    request: PlanRequest
    sections: tuple[Section, ...]
    command: str
    lines: tuple[Lines, ...] = field(default=())
    bars: tuple[Bars, ...] = field(default=())

    def figures(self) -> Iterator[Figure]:
        """Of all sections."""
        return (figure for section in self.sections for figure in section.figures)
