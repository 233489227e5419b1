from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from npu_ops.contract import ELEMENTWISE, ContractError
from npu_ops.hadamard_rotation import WIDTH, hadamard_rotation

OPS = ("hadamard_rotation",)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


@pytest.mark.parametrize("dtype", ELEMENTWISE, ids=str)
def test_matches_products_of_kronecker(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, WIDTH).to(dtype)
    matrix = functools.reduce(torch.kron, [torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)] * 7)
    wanted = x.double() @ matrix / WIDTH**0.5
    bound = ELEMENTWISE[dtype]
    torch.testing.assert_close(hadamard_rotation(x.to(device)).cpu().double(), wanted, atol=bound.atol, rtol=bound.rtol)


def test_rotated_rows_keep_their_products_and_return(device: str) -> None:
    query, key = torch.randn(2, 7, WIDTH).to(device)
    turned = [hadamard_rotation(x) for x in (query, key)]
    torch.testing.assert_close(turned[0] @ turned[1].T, query @ key.T, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hadamard_rotation(turned[0]), query, atol=1e-5, rtol=1e-5)


def test_an_outlier_is_spread_evenly(device: str) -> None:
    x = torch.zeros(1, WIDTH, device=device)
    x[0, 3] = 64
    assert hadamard_rotation(x).abs().unique().cpu().tolist() == pytest.approx([64 / WIDTH**0.5])


def test_bad_calls_say_what_to_do(device: str) -> None:
    for x in (torch.ones(2, 64, device=device), torch.ones(2, WIDTH, dtype=torch.int8, device=device)):
        with pytest.raises(ContractError, match=r"an x \[\.\.\., 128\] in bf16, fp16 or fp32 is required, got \(2, \d+\) in"):
            hadamard_rotation(x)
