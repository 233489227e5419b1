"""Triton kernels that Ascend's compiler refuses or makes slow; the check of our own kernels must see that."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def too_large(x: tl.tensor, y: tl.tensor) -> None:
    """One block that no unified buffer holds."""
    columns = tl.arange(0, 65536)
    tl.store(y + columns, tl.load(x + columns) + 1.0)


@triton.jit
def element_wise(x: tl.tensor, y: tl.tensor, index: tl.tensor) -> None:
    """A gather of single elements, which the vector unit does not have."""
    columns = tl.arange(0, 1024)
    tl.store(y + columns, tl.load(x + tl.load(index + columns)))


@triton.jit
def pointer_select(x: tl.tensor, y: tl.tensor, other: tl.tensor) -> None:
    """A choice between pointers, which the conversion to linalg does not know."""
    columns = tl.arange(0, 1024)
    source = tl.where(columns < 5, x + columns, other + columns)
    tl.store(y + columns, tl.load(source))
