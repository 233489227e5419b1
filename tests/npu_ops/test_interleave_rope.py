from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

from npu_ops.contract import ELEMENTWISE, ContractError
from npu_ops.interleave_rope import interleave_rope, random_angles
from npu_ops.rotary import rotary

OPS = ("interleave_rope",)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


@pytest.mark.parametrize("dtype", ELEMENTWISE, ids=str)
def test_matches_transformers(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, 64, generator=generator).to(dtype)
    cos, sin = random_angles(6, dtype, generator, magnitude=1.37)
    wide = [torch.cat((part, part), -1)[None].double() for part in (cos, sin)]
    q = x.double().transpose(0, 1)[None]
    wanted = apply_rotary_pos_emb_interleave(q, q, *wide)[0][0].transpose(0, 1)
    out = interleave_rope(x.to(device), cos.to(device), sin.to(device)).cpu()
    bound = ELEMENTWISE[dtype]
    torch.testing.assert_close(out.double(), wanted, atol=bound.atol, rtol=bound.rtol)


def test_products_are_those_of_the_plain_rotation(device: str) -> None:
    q, k = torch.randn(2, 5, 2, 64).to(device)
    cos, sin = (part.to(device) for part in random_angles(5, torch.float32, torch.Generator().manual_seed(1)))
    ours = (interleave_rope(q, cos, sin) * interleave_rope(k, cos.roll(1, 0), sin.roll(1, 0))).sum(-1)
    plain = (
        rotary(q, cos, sin, rotary_mode="interleave") * rotary(k, cos.roll(1, 0), sin.roll(1, 0), rotary_mode="interleave")
    ).sum(-1)
    torch.testing.assert_close(ours, plain)
    halves = rotary(q, cos, sin, rotary_mode="half")
    assert not torch.allclose(interleave_rope(q, cos, sin), halves)


def test_the_order_of_the_result(device: str) -> None:
    x = torch.arange(64.0, device=device).view(1, 1, 64)
    still, quarter = torch.ones(1, 32, device=device), torch.zeros(1, 32, device=device)
    assert interleave_rope(x, still, quarter).flatten().tolist() == [*range(0, 64, 2), *range(1, 64, 2)]
    assert interleave_rope(x, quarter, still).flatten().tolist() == [*(-n for n in range(1, 64, 2)), *range(0, 64, 2)]


def test_strides_change_nothing(device: str) -> None:
    x = torch.randn(3, 7, 64, device=device)
    # cos and sin side by side, as models keep them, and every second column.
    both = torch.randn(7, 128, device=device)
    for q, cos, sin in (
        (x.transpose(0, 1), *both[:, :64].chunk(2, -1)),
        (torch.stack((x, x + 1), -1)[..., 0].transpose(0, 1), both[:, 0:64:2], both[:, 64::2]),
    ):
        assert torch.equal(interleave_rope(q, cos, sin), interleave_rope(*(part.contiguous() for part in (q, cos, sin))))


def test_strides_past_2_to_31_elements(device: str) -> None:
    # Head 2 begins at element 2^31. The memory between the heads is never touched.
    rows = torch.randn(2, 3, 64).bfloat16().to(device)
    x = torch.empty_strided((2, 3, 64), (64, 2**30, 1), dtype=torch.bfloat16, device=device).copy_(rows)
    assert x[:, 2].data_ptr() - x.data_ptr() == 2 * 2**31
    angles = [part.to(device) for part in random_angles(2, torch.bfloat16, torch.Generator().manual_seed(2))]
    assert torch.equal(interleave_rope(x, *angles), interleave_rope(rows, *angles))


def test_bad_calls_say_what_to_do(device: str) -> None:
    x, cos = torch.ones(3, 2, 64, device=device), torch.ones(3, 32, device=device)
    with pytest.raises(ContractError, match=r"an x \[T, N, 64\] in bf16, fp16 or fp32 is required, got \(3, 2, 48\)"):
        interleave_rope(x[..., :48], cos, cos)
    with pytest.raises(ContractError, match=r"a cos \[3, 32\] in torch\.float32 is required, got \(3, 64\)"):
        interleave_rope(x, torch.ones(3, 64, device=device), cos)
    with pytest.raises(ContractError, match=r"a sin \[3, 32\] in torch\.float32 is required, got \(3, 32\) in torch\.float16"):
        interleave_rope(x, cos, cos.half())
