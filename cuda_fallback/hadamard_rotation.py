"""The rotation of the indexer's rows, by cuBLAS: a matrix of +-1/8, exact in every type, and what is left of 1 / sqrt(128)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def hadamard_rotation(x: Tensor) -> Tensor:
    """See npu_ops.hadamard_rotation.hadamard_rotation."""
    return (x @ _matrix(x.shape[-1], x.dtype, x.device)).mul_(0.5**0.5)


@functools.cache
def _matrix(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """H / 8: Sylvester's doubling, from 1 up."""
    matrix = torch.full((1, 1), 0.125, device=device)
    while matrix.shape[0] < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix.to(dtype)
