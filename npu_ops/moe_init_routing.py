"""Sorting the tokens by expert: one row for each token and chosen expert, the rows of an expert together.

Ascend op: ``torch_npu.npu_moe_init_routing_v2`` with counts of tokens and gather indices (expert_tokens_num_type 1,
row_idx_type 0).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from npu_ops.contract import EXACT, OpCase, OpContract, register, require
from npu_ops.reference import moe_init_routing as reference

OP = "moe_init_routing"
MAX_EXPERTS = 10240  # CANN's limit


def moe_init_routing(
    x: Tensor, expert_idx: Tensor, *, expert_num: int, active_expert_range: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy row ``t`` of ``x`` once for each of its active experts; rows are sorted by expert, then by ``t``, then by rank.

    Args:
        x: [T, H] bf16, fp16 or fp32; any strides.
        expert_idx: int32 [T, K], ids within [0, expert_num); any strides.
        expert_num: experts of all ranks.
        active_expert_range: [first, last): the experts of this rank. Those of other ranks get no rows.

    Returns:
        - rows [T * K, H], the dtype of ``x``. Those past the sum of the counts may hold anything.
        - for choice ``t * K + k`` the number of its row, int32 [T * K]; -1 if the expert is not active.
        - rows of each active expert, int64 [last - first].

    Raises:
        ContractError: if a shape, dtype or range does not fit. The ids are device data and are not checked.
    """
    require(x.dim() == 2 and x.dtype in EXACT, OP, "rows [T, H] in bf16, fp16 or fp32", f"{x.dtype} {tuple(x.shape)}",
            "Flatten the tokens.")  # fmt: skip
    right = expert_idx.dim() == 2 and expert_idx.shape[0] == x.shape[0] and expert_idx.dtype == torch.int32
    require(right, OP, f"an int32 expert_idx [{x.shape[0]}, K]", f"{expert_idx.dtype} {tuple(expert_idx.shape)}",
            "Pass the ids of moe_gating_top_k for the same tokens.")  # fmt: skip
    require(1 <= expert_num <= MAX_EXPERTS, OP, f"1 to {MAX_EXPERTS} experts", expert_num, "Count the experts of all ranks.")
    active = list(active_expert_range)
    require(len(active) == 2 and 0 <= active[0] < active[-1] <= expert_num, OP,
            f"an active_expert_range [first, last) within [0, {expert_num})", active,
            "Pass [0, expert_num] without expert parallelism.")  # fmt: skip
    return _contract.op(  # type: ignore[no-any-return]
        x, expert_idx, expert_num=expert_num, active_expert_range=active
    )


# T, H, K, experts, active range.
_SHAPES = {
    "none": (0, 64, 2, 4, (0, 4)),
    "one": (1, 1, 1, 3, (0, 3)),
    "odd": (37, 80, 3, 7, (0, 7)),
    "wide": (19, 7168, 8, 256, (0, 256)),
    "first-rank": (33, 64, 4, 16, (0, 4)),
    "last-rank": (33, 64, 4, 16, (11, 16)),
    "one-expert": (40, 48, 2, 8, (5, 6)),
    "long": (700, 2, 2, 6, (1, 5)),
}


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """Distinct experts a row; then every choice on one expert, and none on the active ones."""
    generator = torch.Generator().manual_seed(seed)
    for name, (tokens, width, k, experts, active) in _SHAPES.items():
        x = torch.randn(tokens, 2 * width, generator=generator).to(dtype)
        ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k].int()
        options = {"expert_num": experts, "active_expert_range": list(active)}
        rows = x[:, :width] if tokens else torch.empty(0, width, dtype=dtype)  # opcheck cannot copy an empty view
        yield OpCase(name, (rows.to(device), ids.to(device)), options)
    x = torch.randn(9, 32, generator=generator).to(dtype).to(device)
    ids = torch.full((9, 2), 3, dtype=torch.int32, device=device)
    for name, active in (("all-on-one", (0, 8)), ("only-that", (3, 4)), ("none-active", (4, 8))):
        yield OpCase(name, (x, ids), {"expert_num": 8, "active_expert_range": list(active)})


def _fake(
    x: Tensor, expert_idx: Tensor, *, expert_num: int, active_expert_range: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    first, last = active_expert_range
    choices = expert_idx.shape[0] * expert_idx.shape[1]
    rows = torch.empty((choices, x.shape[1]), dtype=x.dtype, device=x.device)
    row_idx = torch.empty(choices, dtype=torch.int32, device=x.device)
    return rows, row_idx, torch.empty(last - first, dtype=torch.int64, device=x.device)


def _defined(args: tuple[Any, ...], results: list[Tensor]) -> list[Tensor]:
    rows, row_idx, counts = results
    return [rows[: int(counts.sum())], row_idx, counts]


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor x, Tensor expert_idx, *, int expert_num, int[] active_expert_range) -> (Tensor, Tensor, Tensor)",
        reference=reference.moe_init_routing,
        fake=_fake,
        cases=_cases,
        tolerance=EXACT,
        defined=_defined,
    )
)
