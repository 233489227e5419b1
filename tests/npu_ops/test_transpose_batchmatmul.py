from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from npu_ops.contract import ContractError, all_contracts
from npu_ops.transpose_batchmatmul import transpose_batchmatmul

OPS = ("transpose_batchmatmul",)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "inner", "width"), [(3, 128, 512), (5, 512, 128), (128, 512, 128)])
def test_matches_einsum_in_fp64(device: str, dtype: torch.dtype, heads: int, inner: int, width: int) -> None:
    x, weight = torch.randn(7, heads, inner).to(dtype), (torch.randn(heads, inner, width) * inner**-0.5).to(dtype)
    out = transpose_batchmatmul(x.to(device), weight.to(device))
    bound = all_contracts()["transpose_batchmatmul"].tolerance[dtype]
    wanted = torch.einsum("tnk,nkm->tnm", x.double(), weight.double())
    torch.testing.assert_close(out.cpu().double(), wanted, atol=bound.atol, rtol=bound.rtol)
    assert out.is_contiguous()


def test_each_head_meets_its_own_matrix(device: str) -> None:
    x = torch.ones(2, 3, 16, device=device)
    weight = torch.arange(3.0, device=device).view(3, 1, 1).expand(3, 16, 16).contiguous()
    assert transpose_batchmatmul(x, weight)[:, :, 0].tolist() == [[0.0, 16.0, 32.0]] * 2


def test_strides_change_nothing(device: str) -> None:
    x, weight = torch.randn(3, 5, 64, device=device), torch.randn(3, 64, 32, device=device)
    strided = x.transpose(0, 1)
    torch.testing.assert_close(transpose_batchmatmul(strided, weight), transpose_batchmatmul(strided.contiguous(), weight))
    columns = torch.stack((x, x + 1), -1)[..., 0].transpose(0, 1)
    torch.testing.assert_close(transpose_batchmatmul(columns, weight), transpose_batchmatmul(strided.contiguous(), weight))


def test_bad_calls_say_what_to_do(device: str) -> None:
    x = torch.ones(2, 3, 32, device=device)
    with pytest.raises(ContractError, match=r"a weight \[3, 32, M\] in torch\.float32 is required, got \(2, 32, 16\)"):
        transpose_batchmatmul(x, torch.ones(2, 32, 16, device=device))
    for inner, width in ((32, 20), (32, 0), (0, 32), (16, 65536), (65536, 16)):
        text = rf"K and M that are multiples of 16 from 16 to 65520 is required, got {inner} and {width}\."
        with pytest.raises(ContractError, match=text):
            transpose_batchmatmul(torch.ones(2, 1, inner, device=device), torch.ones(1, inner, width, device=device))
    with pytest.raises(ContractError, match=r"a contiguous weight is required, got strides \(512, 1, 32\)"):
        transpose_batchmatmul(x, torch.ones(3, 16, 32, device=device).transpose(1, 2))
    with pytest.raises(ContractError, match=r"an input \[T, N, K\] in bf16, fp16 or fp32 is required, got \(2, 96\)"):
        transpose_batchmatmul(x.flatten(1), torch.ones(3, 32, 16, device=device))
