"""Which layers' indexers a quantised checkpoint wants in C8 form.

ModelSlim writes ``quant_model_description.json`` beside the weights, a flat object from tensor names to types. A layer whose
indexer was calibrated for int8 keys has ``model.layers.3.self_attn.indexer.quant_type`` set to ``INT8_DYNAMIC``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "quant_model_description.json"
INT8 = "INT8_DYNAMIC"
_INDEXER = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:[^.]+\.)*indexer\.quant_type$")


def read_description(folder: Path) -> Mapping[str, Any]:
    """The object of a checkpoint's description; empty if it has none.

    Raises:
        ValueError: if the file is no JSON object.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        description = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}. Write it again, or remove it.") from None
    if not isinstance(description, dict):
        raise ValueError(f"{path}: an object is required, got {type(description).__name__}. Write it again, or remove it.")
    return description


def c8_layers(description: Mapping[str, Any]) -> frozenset[int] | None:
    """Layers whose indexer is int8; None if the description says nothing of indexers, so that all may be."""
    types = {int(match[1]): kind for name, kind in description.items() if (match := _INDEXER.search(name))}
    return frozenset(layer for layer, kind in types.items() if kind == INT8) if types else None
