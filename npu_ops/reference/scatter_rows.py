"""Semantics of npu_ops.scatter_rows in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def scatter_rows(rows: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    """See npu_ops.scatter_rows.scatter_rows."""
    real = slot_mapping >= 0
    cache.view(-1, cache.shape[-1])[slot_mapping[real]] = rows[real]
