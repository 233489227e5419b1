"""Where the tokens of a request lie under decode context parallelism (DCP).

The ranks take turns, ``interleave`` tokens each: position ``p`` is on rank ``(p // interleave) % dcp``, there at
``(p // (dcp * interleave)) * interleave + p % interleave``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

import torch
from torch import Tensor

Number = TypeVar("Number", int, Tensor)


@dataclass(frozen=True)
class Shard:
    """This rank's place among those that share the KV cache; one rank owns all."""

    rank: int = 0
    dcp: int = 1
    interleave: int = 1


def owner(position: Number, dcp: int, interleave: int) -> Number:
    """The rank that holds a position."""
    return position // interleave % dcp


def local_position(position: Number, dcp: int, interleave: int) -> Number:
    """Where it lies among its owner's tokens of the request."""
    return position // (dcp * interleave) * interleave + position % interleave


@overload
def local_length(length: int, rank: int, dcp: int, interleave: int) -> int: ...
@overload
def local_length(length: Sequence[int], rank: int, dcp: int, interleave: int) -> list[int]: ...
@overload
def local_length(length: Tensor, rank: int | Tensor, dcp: int, interleave: int) -> Tensor: ...
def local_length(
    length: int | Sequence[int] | Tensor, rank: int | Tensor, dcp: int, interleave: int
) -> int | list[int] | Tensor:
    """How many of a request's first ``length`` tokens a rank holds; rank 0 holds the most. Tensors broadcast."""
    if isinstance(length, Tensor):
        rest = length % (dcp * interleave) - rank * interleave
        return length // (dcp * interleave) * interleave + rest.clamp(0, interleave)
    assert isinstance(rank, int)
    if isinstance(length, Sequence):
        return [local_length(each, rank, dcp, interleave) for each in length]
    own: int = length % (dcp * interleave) - rank * interleave
    return length // (dcp * interleave) * interleave + min(max(own, 0), interleave)


def rows_per_rank(lengths: Sequence[int], dcp: int, interleave: int) -> int:
    """Rows that every rank brings to an all-gather of requests of ``lengths``: those of rank 0, which has the most."""
    return sum(local_length(lengths, 0, dcp, interleave))


def global_order(lengths: Sequence[int], dcp: int, interleave: int) -> Tensor:
    """Index into all-gathered rows that lists them request by request, in the order of their positions.

    Each rank brings its rows of every request, one request after another, then padding to ``rows_per_rank``. Each request
    begins at a multiple of ``dcp * interleave``, as all chunks of a plan do.

    Returns:
        int32 [sum(lengths)], on the host; no element names padding.
    """
    lens, ranks = torch.tensor(lengths, dtype=torch.int64), torch.arange(dcp)[:, None]
    local = local_length(lens, ranks, dcp, interleave)
    first = ranks * rows_per_rank(lengths, dcp, interleave) + local.cumsum(1) - local
    request = torch.arange(len(lens)).repeat_interleave(lens)
    position = torch.arange(len(request)) - (lens.cumsum(0) - lens)[request]
    rows = first[owner(position, dcp, interleave), request] + local_position(position, dcp, interleave)
    return rows.int()
