"""One number of a plan, with the formula that gave it and where the formula comes from."""

from __future__ import annotations

from dataclasses import dataclass


class PlanError(ValueError):
    """A plan that cannot be made; the message lists what is known."""


@dataclass(frozen=True)
class Figure:
    """A number that can be traced.

    Attributes:
        name: what it is.
        value: the number, in ``unit``.
        unit: "B", "s", "tokens", "FLOP", "1" and so on.
        formula: the arithmetic with its numbers, as "2 B x (512 + 64)".
        source: a paper, a key of config.json, a fact; "unsourced" if there is none.
    """

    name: str
    value: float
    unit: str
    formula: str
    source: str
