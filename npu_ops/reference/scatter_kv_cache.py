"""Semantics of npu_ops.scatter_kv_cache in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def scatter_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See npu_ops.scatter_kv_cache.scatter_kv_cache."""
    real = slot_mapping >= 0
    slots = slot_mapping[real]
    key_cache.view(-1, *key_cache.shape[2:])[slots] = key[real]
    value_cache.view(-1, *value_cache.shape[2:])[slots] = value[real]
