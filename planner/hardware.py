"""Devices and what ops reach on them, from hardware.toml."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

from planner.figure import PlanError

Kind = Literal["datasheet", "measured", "unsourced"]
PEAKS = {"bf16": "bf16_flops", "fp8": "fp8_flops", "int8": "int8_ops"}
ANY = "any"


@dataclass(frozen=True)
class Sourced:
    """A figure in FLOP/s, B, B/s, s or cards, and where it comes from."""

    value: float
    kind: Kind
    source: str


@dataclass(frozen=True)
class Hardware:
    """A device. What is None is not known; ``need`` says so.

    Attributes:
        name: as in hardware.toml.
        aliases: other names.
        like: a device with the same cores, whose shares of peak hold here too; "" for none.
        scale_up: B/s of one card in one direction to the ``scale_up_cards`` near it; likewise the other links.
        collective: what collectives were seen to get of ``scale_up``.
        collective_latency: seconds that one takes beside its bytes.
        others: figures that no formula needs.
    """

    name: str
    aliases: tuple[str, ...] = ()
    like: str = ""
    bf16_flops: Sourced | None = None
    fp8_flops: Sourced | None = None
    int8_ops: Sourced | None = None
    hbm_bytes: Sourced | None = None
    hbm_bandwidth: Sourced | None = None
    scale_up: Sourced | None = None
    scale_up_cards: Sourced | None = None
    collective: Sourced | None = None
    collective_latency: Sourced | None = None
    scale_out: Sourced | None = None
    host_link: Sourced | None = None
    others: tuple[tuple[str, Sourced], ...] = ()

    def figures(self) -> dict[str, Sourced]:
        """All that is known, by name."""
        named = {name: figure for name, figure in vars(self).items() if isinstance(figure, Sourced)}
        return named | dict(self.others)

    def need(self, name: str) -> Sourced:
        """A figure that a formula cannot do without.

        Raises:
            PlanError: if it is not known.
        """
        known = self.figures()
        if name not in known:
            raise PlanError(
                f"{self.name}: {name} is not known, and hardware.toml makes nothing up. Known are {', '.join(known)}."
            )
        return known[name]

    def peak(self, dtype: str) -> Sourced:
        """Dense FLOP/s of products in ``dtype``."""
        if dtype not in PEAKS:
            raise PlanError(f"products in {dtype!r} are not known. Known are {', '.join(PEAKS)}.")
        return self.need(PEAKS[dtype])


@dataclass(frozen=True)
class Share:
    """Shares of peak FLOP/s and of HBM bandwidth that an op reaches, and seconds that one key of a row takes at least."""

    compute: float
    memory: float
    serial: float = 0.0
    source: str = "unsourced"


@dataclass(frozen=True)
class Efficiency:
    """Shares by op, dtype of the products and query heads.

    Attributes:
        shares: by (op, dtype, heads), heads 0 for any number.
        default: of ops that are not there. Where only half of an entry was measured (nan), the other half is this one's, or the
            bandwidth of a copy.
        collective_latency: seconds that a collective takes beside moving its bytes.
    """

    shares: tuple[tuple[tuple[str, str, int], Share], ...] = ()
    default: Share = Share(1.0, 1.0, source="the roofline itself")
    collective_latency: float = 0.0

    def of(self, op: str, dtype: str = "bf16", heads: int = 0) -> Share:
        """The entry of the nearest number of heads."""
        found = [(key[2], share) for key, share in self.shares if key[:2] == (op, dtype)]
        if not found:
            return self.default
        measured, share = min(found, key=lambda entry: abs(math.log2(max(entry[0], 1) / max(heads, 1))))
        compute = self.default.compute if math.isnan(share.compute) else share.compute
        memory = share.memory
        if math.isnan(memory):
            memory = self.of("copy").memory if op != "copy" else self.default.memory
        apart = f", taken for {heads}" if measured and heads and measured != heads else ""
        return replace(share, compute=compute, memory=memory, source=share.source + apart)


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("planner").joinpath("hardware.toml").read_text())


def names() -> list[str]:
    """Devices that can be loaded."""
    return [name for name in _table() if name != "efficiency"]


def load(name: str) -> Hardware:
    """A device by its name or an alias, in any case.

    Raises:
        PlanError: for any other name.
    """
    for key in names():
        entry = _table()[key]
        if name.lower() in (key.lower(), *(alias.lower() for alias in entry.get("aliases", ()))):
            return _hardware(key, entry)
    raise PlanError(f"hardware {name!r} is not known. Known are {', '.join(names())}; planner/hardware.toml takes others.")


def _hardware(name: str, entry: dict[str, Any]) -> Hardware:
    figures = {key: Sourced(**value) for key, value in entry.items() if isinstance(value, dict)}
    for key, figure in figures.items():
        if figure.kind not in get_args(Kind) or not figure.source:
            raise PlanError(f"hardware.toml, {name}, {key}: a source and a kind of {', '.join(get_args(Kind))} are required.")
    known = Hardware.__dataclass_fields__
    others = tuple((key, figure) for key, figure in figures.items() if key not in known)
    named: dict[str, Any] = {key: figure for key, figure in figures.items() if key in known}
    return Hardware(name, tuple(entry.get("aliases", ())), entry.get("like", ""), others=others, **named)


def profiles() -> list[str]:
    """Sets of efficiencies."""
    return sorted({entry["profile"] for entry in _table()["efficiency"]})


def efficiency(hardware: Hardware, profile: str = "best") -> Efficiency:
    """What was measured on the device, else on the one it is like, else for the profile "best", else the default's shares.

    Raises:
        PlanError: for an unknown profile.
    """
    if profile not in profiles():
        raise PlanError(f"profile {profile!r} is not known. Known are {', '.join(profiles())}.")
    found: dict[tuple[str, str, int], Share] = {}
    default = Efficiency().default
    for wanted in dict.fromkeys((profile, "best")):
        for device in filter(None, (hardware.name, hardware.like, ANY)):
            # An op measured here at any number of heads hides what was measured elsewhere.
            hidden = {key[:2] for key in found}
            for entry in _table()["efficiency"]:
                if (entry["profile"], entry["hardware"]) != (wanted, device):
                    continue
                key = (entry["op"], entry.get("dtype", "bf16"), entry.get("heads", 0))
                if device == ANY:
                    default = _share(entry, hardware, key[1])
                elif key[:2] not in hidden:
                    found[key] = _share(entry, hardware if entry.get("same_on_like") else load(device), key[1])
    latency = hardware.collective_latency.value if hardware.collective_latency else 0.0
    return Efficiency(tuple(found.items()), default, latency)


def _share(entry: dict[str, Any], of: Hardware, dtype: str) -> Share:
    """Of the peaks of a device, the one that it was measured on as a rule."""
    compute = entry["flops"] / of.peak(dtype).value if "flops" in entry else entry.get("peak", math.nan)
    memory = entry["bandwidth"] / of.need("hbm_bandwidth").value if "bandwidth" in entry else entry.get("memory", math.nan)
    return Share(compute, memory, entry.get("serial", 0.0), entry["source"])
