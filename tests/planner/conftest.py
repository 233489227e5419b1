"""What the planner's tests share."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.model import ModelShape, read_model

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
WORDS = re.compile(r"\b(B|layers|rows|blocks)\b")


@pytest.fixture
def shape() -> Callable[..., ModelShape]:
    """Shape of a public configuration by name, with changes to its keys."""
    return lambda name, **changes: read_model(json.loads((CONFIGS / f"{name}.json").read_text()) | changes)


@pytest.fixture
def evaluate() -> Callable[[str], Any]:
    """The value of a figure's formula that has numbers in it and no names."""

    def value(formula: str) -> Any:
        text = WORDS.sub("", re.sub(r"(?<=\d),(?=\d{3})", "", formula)).replace(" x ", " * ")
        return eval(text, {"__builtins__": {}}, {"ceil": math.ceil, "floor": math.floor, "min": min, "max": max})

    return value
