from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_ops.contract import EXACT, ContractError
from npu_ops.moe_init_routing import moe_init_routing

OPS = ("moe_init_routing",)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


@given(choices=st.lists(st.tuples(*[st.integers(0, 6)] * 3), max_size=12), first=st.integers(0, 6), count=st.integers(1, 7))
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_matches_sorting_a_list(
    device: str, dtype: torch.dtype, choices: list[tuple[int, ...]], first: int, count: int
) -> None:
    last = min(first + count, 7)
    x = torch.randn(len(choices), 10).to(dtype)
    ids = torch.tensor(choices, dtype=torch.int32).view(len(choices), 3)
    options = {"expert_num": 7, "active_expert_range": [first, last]}
    rows, row_idx, counts = (r.cpu() for r in moe_init_routing(x.to(device), ids.to(device), **options))
    flat = [(expert, place) for place, expert in enumerate(expert for token in choices for expert in token)]
    wanted = sorted((expert, place) for expert, place in flat if first <= expert < last)
    assert counts.tolist() == [sum(expert == active for expert, _ in wanted) for active in range(first, last)]
    places = {place: row for row, (_, place) in enumerate(wanted)}
    assert row_idx.tolist() == [places.get(place, -1) for _, place in flat]
    for row, (_, place) in enumerate(wanted):
        assert torch.equal(rows[row], x[place // 3])


def test_ranks_share_the_rows(device: str) -> None:
    # The rows of two ranks are those of one, in the same order.
    x = torch.randn(70, 24, device=device)
    ids = torch.rand(70, 16, device=device).argsort(1)[:, :4].int()
    rows, row_idx, counts = moe_init_routing(x, ids, expert_num=16, active_expert_range=[0, 16])
    parts = [moe_init_routing(x, ids, expert_num=16, active_expert_range=[*half]) for half in ((0, 5), (5, 16))]
    assert torch.equal(torch.cat([part[2] for part in parts]), counts)
    assert torch.equal(torch.cat([part[0][: int(part[2].sum())] for part in parts]), rows)
    offset = int(parts[0][2].sum())
    second = torch.where(parts[1][1] < 0, -1, parts[1][1] + offset)
    assert torch.equal(torch.maximum(parts[0][1], second), row_idx)


def test_rows_past_2_to_31_elements(device: str) -> None:
    # Two choices of 32,769 tokens of 32,768 elements: the last rows begin past element 2^31. All but a few tokens are
    # another rank's, so most of the memory is never touched.
    x = torch.empty(32_769, 65_536, dtype=torch.bfloat16, device=device)[:, :32_768]
    x[-1], x[0] = torch.randn(2, 32_768).bfloat16().to(device)
    ids = torch.full((32_769, 1), 9, dtype=torch.int32, device=device)
    ids[-1], ids[0] = 2, 1
    rows, row_idx, counts = moe_init_routing(x, ids, expert_num=10, active_expert_range=[1, 4])
    assert counts.tolist() == [1, 1, 0]
    assert row_idx[[0, 1, -1]].tolist() == [0, -1, 1]
    assert torch.equal(rows[:2], x[[0, -1]])


def test_bad_calls_say_what_to_do(device: str) -> None:
    x, ids = torch.zeros(4, 8, device=device), torch.zeros(4, 2, dtype=torch.int32, device=device)

    def bad(x: torch.Tensor = x, ids: torch.Tensor = ids, experts: int = 8, active: tuple[int, ...] = (0, 8)) -> None:
        moe_init_routing(x, ids, expert_num=experts, active_expert_range=active)

    with pytest.raises(ContractError, match=r"rows \[T, H\] in bf16, fp16 or fp32 is required, got torch\.int32 \(4, 2\)"):
        bad(x=ids)
    with pytest.raises(ContractError, match=r"an int32 expert_idx \[4, K\] is required, got torch\.int64 \(4, 2\)"):
        bad(ids=ids.long())
    with pytest.raises(ContractError, match=r"an int32 expert_idx \[4, K\] is required, got torch\.int32 \(3, 2\)"):
        bad(ids=ids[:3])
    with pytest.raises(ContractError, match=r"1 to 10240 experts is required, got 0"):
        bad(experts=0)
    for active in ((0, 9), (3, 3), (-1, 4), (0,)):
        with pytest.raises(ContractError, match=r"an active_expert_range \[first, last\) within \[0, 8\) is required, got \["):
            bad(active=active)
