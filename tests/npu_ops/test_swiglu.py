from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from npu_ops.contract import ELEMENTWISE, ContractError
from npu_ops.swiglu import swiglu

OPS = ("swiglu",)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


@pytest.mark.parametrize("dtype", ELEMENTWISE, ids=str)
def test_matches_pytorch(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(9, 2 * 130, device=device).to(dtype)
    wanted = F.silu(x[:, :130].double()) * x[:, 130:].double()
    bound = ELEMENTWISE[dtype]
    torch.testing.assert_close(swiglu(x).double(), wanted, atol=bound.atol, rtol=bound.rtol)


def test_bad_calls_say_what_to_do(device: str) -> None:
    with pytest.raises(ContractError, match=r"an input \[\.\.\., 2H\] is required, got \(2, 3\)\. Join gate and up"):
        swiglu(torch.ones(2, 3, device=device))
    with pytest.raises(ContractError, match=r"bf16, fp16 or fp32 input is required, got torch\.int32"):
        swiglu(torch.ones(2, 4, dtype=torch.int32, device=device))
