"""One matrix product for each group of rows, the groups packed: the projections of all experts of a layer.

Ascend op: ``torch_npu.npu_grouped_matmul`` with one tensor each for x, weight and result (split_item 2, group_type 0), the
group list holding sizes (group_list_type 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from npu_ops.contract import ELEMENTWISE, OpCase, OpContract, Tolerance, register, require
from npu_ops.reference import grouped_matmul as reference

OP = "grouped_matmul"
# CANN's limits: groups of one call, and the innermost dim of x and of weight.
MAX_GROUPS, INNER_LIMIT = 1024, 65536
# 16-bit results are rounded once; in fp32 the order of the sums shows.
TOLERANCE: Mapping[torch.dtype, Tolerance] = {**ELEMENTWISE, torch.float32: Tolerance(1e-5, 1e-5)}


def grouped_matmul(x: Tensor, weight: Tensor, group_list: Tensor) -> Tensor:
    """Multiply the rows of group ``g``, which follow those of group ``g - 1``, by ``weight[g]``.

    Args:
        x: [R, K] bf16, fp16 or fp32; any strides. Rows past the sum of ``group_list`` are not read.
        weight: [G, K, M], the dtype of ``x``; each matrix contiguous or the transpose of a contiguous one.
        group_list: int64 [G], rows of each group; 0 is fine, the sum is at most R.

    Returns:
        [R, M], the dtype of ``x``; summed in fp32 and rounded once. Rows past the sum may hold anything.

    Raises:
        ContractError: if a shape, dtype or layout does not fit. The sizes are device data and are not checked.
    """
    require(x.dim() == 2 and x.dtype in ELEMENTWISE, OP, "rows [R, K] in bf16, fp16 or fp32", f"{x.dtype} {tuple(x.shape)}",
            "Flatten the rows.")  # fmt: skip
    right = weight.dim() == 3 and weight.shape[1] == x.shape[1] and weight.dtype == x.dtype
    require(right, OP, f"a weight [G, {x.shape[1]}, M] of {x.dtype}", f"{weight.dtype} {tuple(weight.shape)}",
            "Transpose weights that are stored [G, M, K]; the view will do.")  # fmt: skip
    dense = weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()
    require(dense, OP, "a weight of contiguous or transposed contiguous matrices", f"strides {weight.stride()}",
            "Copy the weight once, when it is loaded.")  # fmt: skip
    require(1 <= weight.shape[0] <= MAX_GROUPS and max(weight.shape[1:]) < INNER_LIMIT, OP,
            f"1 to {MAX_GROUPS} groups and dims below {INNER_LIMIT}", tuple(weight.shape), "Divide the weight.")  # fmt: skip
    require(group_list.shape == weight.shape[:1] and group_list.dtype == torch.int64, OP,
            f"an int64 group_list [{weight.shape[0]}]", f"{group_list.dtype} {tuple(group_list.shape)}",
            "Pass the counts of moe_init_routing.")  # fmt: skip
    return _contract.op(x, weight, group_list)  # type: ignore[no-any-return]


# Sizes of the groups, rows past them, K, M, and whether the matrices are stored transposed.
_SHAPES: dict[str, tuple[list[int], int, int, int, bool]] = {
    "none": ([0, 0, 0], 0, 16, 16, True),
    "one": ([1], 0, 1, 1, False),
    "odd": ([3, 0, 70, 1, 0, 37], 0, 77, 130, True),
    "untransposed": ([5, 130, 0], 0, 96, 72, False),
    "spare": ([0, 20, 0, 9, 0], 35, 64, 160, True),
    "only-spare": ([0, 0], 12, 32, 48, True),
    "one-expert": ([0, 0, 150, 0], 0, 128, 64, True),
    "decode": ([0, 1, 0, 0, 1, 1, 0, 1] * 4, 16, 256, 96, True),
}


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """Spare rows and the weights of empty groups hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    for name, (sizes, spare, k, m, transposed) in _SHAPES.items():
        rows = sum(sizes)
        x = torch.randn(rows + spare, k, generator=generator) / math.sqrt(k)
        weight = torch.randn(len(sizes), k, m, generator=generator)
        x[rows:], weight[torch.tensor(sizes) == 0] = math.nan, math.nan
        weight = weight.to(dtype).to(device)
        if transposed:
            weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
        yield OpCase(name, (x.to(dtype).to(device), weight, torch.tensor(sizes, device=device)))


def _fake(x: Tensor, weight: Tensor, group_list: Tensor) -> Tensor:
    return torch.empty((x.shape[0], weight.shape[2]), dtype=x.dtype, device=x.device)


def _defined(args: tuple[Any, ...], results: list[Tensor]) -> list[Tensor]:
    return [results[0][: int(args[2].sum())]]


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor x, Tensor weight, Tensor group_list) -> Tensor",
        reference=reference.grouped_matmul,
        fake=_fake,
        cases=_cases,
        tolerance=TOLERANCE,
        defined=_defined,
    )
)
