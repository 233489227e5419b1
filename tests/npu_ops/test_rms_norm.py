from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from npu_ops.contract import ELEMENTWISE, ContractError
from npu_ops.rms_norm import add_rms_norm, rms_norm

OPS = ("rms_norm", "add_rms_norm")


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


@pytest.mark.parametrize("dtype", ELEMENTWISE, ids=str)
def test_matches_pytorch(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 7, 96, device=device).to(dtype)
    residual, gamma = torch.randn_like(x), torch.randn(96, device=device).to(dtype)
    bound = ELEMENTWISE[dtype]

    def oracle(value: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(value, (96,), gamma.double(), eps=1e-5).float()

    torch.testing.assert_close(rms_norm(x, gamma, epsilon=1e-5).float(), oracle(x.double()), atol=bound.atol, rtol=bound.rtol)
    normed, total = add_rms_norm(x, residual, gamma, epsilon=1e-5)
    exact = x.double() + residual.double()
    torch.testing.assert_close(normed.float(), oracle(exact), atol=bound.atol, rtol=bound.rtol)
    torch.testing.assert_close(total, exact.to(dtype), atol=0, rtol=0)


def test_sum_of_large_fp16_is_normalised_before_it_is_rounded(device: str) -> None:
    x = torch.full((1, 64), 40000.0, dtype=torch.float16, device=device)
    normed, total = add_rms_norm(x, x, torch.ones(64, dtype=torch.float16, device=device))
    assert torch.isinf(total).all()
    torch.testing.assert_close(normed, torch.ones_like(normed))


def test_bad_calls_say_what_to_do(device: str) -> None:
    x, gamma = torch.ones(2, 64, device=device), torch.ones(64, device=device)
    with pytest.raises(
        ContractError, match=r"rms_norm: gamma of shape \(64,\) is required, got \(32,\)\. Pass the layer's own"
    ):
        rms_norm(x, gamma[:32])
    with pytest.raises(ContractError, match=r"bf16, fp16 or fp32 input is required, got torch\.float64\. Cast the input"):
        rms_norm(x.double(), gamma)
    with pytest.raises(ContractError, match=r"gamma of torch\.float32 or torch\.float32 is required, got torch\.float16"):
        rms_norm(x, gamma.half())
    with pytest.raises(ContractError, match=r"add_rms_norm: a residual of shape \(2, 64\) and torch\.float32 is required"):
        add_rms_norm(x, x[:1], gamma)
