from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_ops.contract import ContractError
from npu_ops.grouped_matmul import TOLERANCE, grouped_matmul

OPS = ("grouped_matmul",)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


@given(sizes=st.lists(st.integers(0, 70), min_size=1, max_size=5), spare=st.integers(0, 9), k=st.integers(1, 90),
       m=st.integers(1, 150), transposed=st.booleans())  # fmt: skip
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_matches_a_dense_product_in_double(
    device: str, dtype: torch.dtype, sizes: list[int], spare: int, k: int, m: int, transposed: bool
) -> None:
    x = (torch.randn(sum(sizes) + spare, k) / math.sqrt(k)).to(dtype)
    weight = torch.randn(len(sizes), k, m).to(dtype)
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    # Each row times all matrices at once, of which its own is picked: no loop over groups and no slices.
    wanted = torch.einsum("rk,gkm->rgm", x[: len(group)].double(), weight.double())[torch.arange(len(group)), group]
    weight = weight.to(device)
    weight = weight.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weight
    got = grouped_matmul(x.to(device), weight, torch.tensor(sizes, device=device))
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(got[: len(group)].double().cpu(), wanted, atol=bound.atol, rtol=bound.rtol)


def test_strided_rows_and_sizes(device: str) -> None:
    x, weight = torch.randn(12, 96, device=device), torch.randn(2, 32, 48, device=device)
    sizes = torch.tensor([5, -9, 7, -9], device=device)
    got = grouped_matmul(x[:, 32:64], weight, sizes[::2])
    torch.testing.assert_close(got, torch.cat((x[:5, 32:64] @ weight[0], x[5:, 32:64] @ weight[1])), atol=1e-5, rtol=1e-5)


def test_weights_past_2_to_31_elements(device: str) -> None:
    weight = torch.empty(33, 8192, 8192, dtype=torch.bfloat16, device=device).transpose(1, 2)  # 2^31 is matrix 32
    weight[0], weight[32] = 0, 0
    weight[32, 5, 8191] = 2.0
    x = torch.zeros(2, 8192, dtype=torch.bfloat16, device=device)
    x[1, 5] = 3.0
    sizes = torch.tensor([1] + [0] * 31 + [1], device=device)
    out = grouped_matmul(x, weight, sizes)
    assert not out[0].any()
    assert out[1].nonzero().tolist() == [[8191]]
    assert out[1, 8191] == 6


def test_bad_calls_say_what_to_do(device: str) -> None:
    x, weight = torch.zeros(6, 8, device=device), torch.zeros(3, 8, 4, device=device)
    sizes = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(ContractError, match=r"rows \[R, K\] in bf16, fp16 or fp32 is required, got torch\.float32 \(2, 3, 8\)"):
        grouped_matmul(x.view(2, 3, 8), weight, sizes)
    with pytest.raises(ContractError, match=r"a weight \[G, 8, M\] of torch\.float32 is required, got .*Transpose weights"):
        grouped_matmul(x, weight.transpose(1, 2), sizes)
    with pytest.raises(ContractError, match=r"a weight \[G, 8, M\] of torch\.float32 is required, got torch\.float16"):
        grouped_matmul(x, weight.half(), sizes)
    with pytest.raises(ContractError, match=r"contiguous or transposed contiguous matrices is required, got strides"):
        grouped_matmul(x, torch.zeros(3, 8, 8, device=device)[:, :, :4], sizes)
    with pytest.raises(ContractError, match=r"1 to 1024 groups and dims below 65536 is required, got \(1025, 8, 4\)"):
        grouped_matmul(x, torch.zeros(1025, 8, 4, device=device), sizes)
    with pytest.raises(ContractError, match=r"1 to 1024 groups and dims below 65536 is required, got \(1, 8, 65536\)"):
        grouped_matmul(x, torch.zeros(1, 8, 65536, device=device), sizes)
    for wrong in (sizes.int(), sizes[:2]):
        with pytest.raises(ContractError, match=r"an int64 group_list \[3\] is required, got torch\.int"):
            grouped_matmul(x, weight, wrong)
