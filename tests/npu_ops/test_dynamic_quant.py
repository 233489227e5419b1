from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from npu_ops.contract import EXACT, ContractError
from npu_ops.dynamic_quant import dynamic_quant

OPS = ("dynamic_quant",)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_matches_numpy(device: str, dtype: torch.dtype) -> None:
    x = (torch.randn(33, 3, 128) * 10.0 ** torch.arange(-16, 17)[:, None, None].div(8)).to(dtype)
    rows = x.float().numpy()
    scale = (np.abs(rows).max(-1) / np.float32(127)).astype(np.float32)
    got, got_scale = dynamic_quant(x.to(device))
    assert got.cpu().numpy().tolist() == np.rint(rows / scale[..., None]).astype(np.int8).tolist()
    assert got_scale.cpu().numpy().tolist() == scale.tolist()


def test_what_comes_back_is_within_half_a_step(device: str) -> None:
    x = torch.randn(50, 128, device=device)
    quantised, scale = dynamic_quant(x)
    assert quantised.abs().amax(-1).eq(127).all()
    error = (quantised.float() * scale[:, None] - x).abs()
    assert (error <= scale[:, None] * 0.5001).all()


def test_bad_calls_say_what_to_do(device: str) -> None:
    with pytest.raises(ContractError, match=r"bf16, fp16 or fp32 input is required, got torch\.int32"):
        dynamic_quant(torch.ones(2, 4, dtype=torch.int32, device=device))
    with pytest.raises(ContractError, match=r"D at least 1 is required, got \(2, 0\)"):
        dynamic_quant(torch.ones(2, 0, device=device))
