"""Environment variables of the virtual NPU, in one place, and what their values mean."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_DEVICES = 64


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, the value when it is not set, and its meaning."""

    name: str
    default: str
    meaning: str


SWITCH = Variable("VIRTUAL_NPU", "0", "1: this process and its children use the virtual NPU wherever they ask for an NPU.")
COUNT = Variable("VIRTUAL_NPU_COUNT", "2", "Number of virtual devices, 1 to 64. ASCEND_RT_VISIBLE_DEVICES picks among them.")
MEMORY = Variable("VIRTUAL_NPU_MEMORY", "16GiB", "Memory of one device: bytes, or a number with KiB, MiB, GiB, KB, MB or GB.")
SOC = Variable("VIRTUAL_NPU_SOC", "A2", "Chip: A2, A3, 950, or CANN's own name of one, such as Ascend910B1.")
CANN = Variable("VIRTUAL_NPU_CANN", "9.1.0", "CANN version that torch_npu is told; it switches between code paths.")
CACHE = Variable("XDG_CACHE_HOME", "~/.cache", "The stand-in libraries are kept below it, in vllm-npu-parity/.")

VARIABLES: tuple[Variable, ...] = (SWITCH, COUNT, MEMORY, SOC, CANN)


@dataclass(frozen=True)
class Soc:
    """CANN's name of a chip, and how many cores it has."""

    name: str
    cube_cores: int
    vector_cores: int


SOCS: Mapping[str, Soc] = {
    "A2": Soc("Ascend910B3", 20, 40),
    "A3": Soc("Ascend910_9382", 24, 48),
    "950": Soc("Ascend950PR_9589", 32, 64),
}
UNITS: Mapping[str, int] = {
    "": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What the stand-in runtime is told once, before torch_npu is loaded."""

    devices: int
    memory: int
    soc: Soc
    cann: str

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read and check the variables.

        Raises:
            ValueError: for a value that means nothing, with the variable's name and what it takes.
        """
        soc = environ.get(SOC.name) or SOC.default
        if soc not in SOCS and not re.fullmatch(r"Ascend\w+", soc):
            raise ValueError(f"{SOC.name}: one of {', '.join(SOCS)} or a name such as Ascend910B1 is required, got {soc!r}")
        cann = environ.get(CANN.name) or CANN.default
        if not re.fullmatch(r"\d+\.\d+[\w.\-]{0,40}", cann):
            raise ValueError(f"{CANN.name}: a version such as {CANN.default} is required, got {cann!r}")
        return cls(
            devices=_visible(environ),
            memory=parse_bytes(environ.get(MEMORY.name) or MEMORY.default),
            soc=SOCS.get(soc) or Soc(soc, 20, 40),
            cann=cann,
        )


def parse_bytes(text: str) -> int:
    """``"16GiB"`` or ``"4096"`` as a number of bytes.

    Raises:
        ValueError: if it is neither.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in UNITS:
        raise ValueError(f"{MEMORY.name}: bytes or a size such as 512MiB is required, got {text!r}")
    return int(float(match[1]) * UNITS[match[2].upper()])


def _visible(environ: Mapping[str, str]) -> int:
    """Devices that the process sees. Like CANN, read the list up to the first entry that names no device."""
    text = environ.get(COUNT.name) or COUNT.default
    if not text.isdigit() or not 1 <= int(text) <= MAX_DEVICES:
        raise ValueError(f"{COUNT.name}: a number of 1 to {MAX_DEVICES} is required, got {text!r}")
    chosen = environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if chosen is None:
        return int(text)
    visible = 0
    for entry in chosen.split(","):
        if not entry.strip().isdigit() or int(entry) >= int(text):
            break
        visible += 1
    return visible
