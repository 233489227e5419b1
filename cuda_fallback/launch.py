"""What every kernel of this package shares: how it is launched, and how a tile finds its request on the device."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Multiprocessors of an H200; the shapes of launches follow it where there is no GPU (Triton's interpreter).
INTERPRETED_SMS = 132


def launch(kernel: Any, grid: tuple[int, ...], tensor: Tensor, *args: Any, **options: Any) -> None:
    """Run ``kernel`` over ``grid`` on the device of ``tensor``; an empty grid, which CUDA refuses, is no work."""
    if 0 in grid:
        return
    # The index of a CPU tensor is -1, which changes nothing.
    with torch.cuda.device(tensor.get_device()):
        kernel[grid](*args, **options)


def multiprocessors(tensor: Tensor) -> int:
    """How many programs the device of ``tensor`` runs side by side, at the least."""
    return _multiprocessors(tensor.get_device()) if tensor.is_cuda else INTERPRETED_SMS


@functools.cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def unit_stride(x: Tensor) -> Tensor:
    """``x`` with its last dim contiguous, as the kernels read it; a copy only where it is not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """View [..., D] as [rows, D] with unit stride in D; copies only where no view can say it."""
    return unit_stride(x.reshape(x.shape[:-1].numel(), x.shape[-1]))


def row_warps(width: int) -> int:
    """Warps for a program that holds one row of ``width`` elements: 16 to a thread, so that loads stay wide."""
    return int(min(16, max(1, triton.next_power_of_2(width) // 512)))


def tile_bound(rows: int, requests: int, tile: int) -> int:
    """Tiles that ``find_tile`` may hand out for ``rows`` packed rows, known without the lengths of the requests."""
    return rows // tile + requests


@triton.jit
def find_tile(starts: tl.tensor, requests: tl.tensor, index: tl.tensor, TILE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Request of the ``index``-th tile of TILE rows, and the tile's first row within that request.

    ``starts`` [requests] holds the first packed row of each request. Request r gets the tiles from
    ``starts[r] // TILE + r`` up to its successor's: at least ``ceil(length / TILE)``, so the last may lie past its end.
    """
    low = 0
    high = requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // TILE + middle <= index:
            low = middle
        else:
            high = middle
    first = (index - tl.load(starts + low) // TILE - low) * TILE
    return low, first


@triton.jit
def copy_rows(
    source: tl.tensor,
    target: tl.tensor,
    source_rows: tl.tensor,
    target_rows: tl.tensor,
    live: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
) -> None:
    """Copy rows of WIDTH elements, ``stride`` apart, to a contiguous target; row indices are int64, ``live`` a mask."""
    columns = tl.arange(0, WIDTH_PADDED)
    mask = live[:, None] & (columns < WIDTH)[None, :]
    rows = tl.load(source + source_rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    tl.store(target + target_rows[:, None] * WIDTH + columns[None, :], rows, mask=mask)
