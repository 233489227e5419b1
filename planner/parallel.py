"""placeholder"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parallel:
    """placeholder"""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    dcp: int = 1
    pcp: int = 1
    dsa_cp: int = 1
    ep: bool = False
