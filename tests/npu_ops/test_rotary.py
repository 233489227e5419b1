from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_pairs
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

from npu_ops.contract import ELEMENTWISE, ContractError
from npu_ops.rotary import rotary

OPS = ("rotary",)


def angles(positions: torch.Tensor, rotated: int) -> torch.Tensor:
    """[T, rotated / 2] in fp64."""
    return positions[:, None].double() * 10000.0 ** (-torch.arange(0, rotated, 2).double() / rotated)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


@pytest.mark.parametrize("dtype", ELEMENTWISE, ids=str)
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_matches_transformers(device: str, mode: str, dtype: torch.dtype) -> None:
    x = torch.randn(6, 3, 96).to(dtype)
    angle = angles(torch.tensor([0, 1, 7, 4095, 131072, 1048577]), 64)
    cos, sin = angle.cos().float(), angle.sin().float()
    part = x[None, ..., :64].double()
    if mode == "half":
        wide = [torch.cat((side, side), -1)[None].double() for side in (cos, sin)]
        wanted = rotate_halves(part, part, *wide, unsqueeze_dim=2)[0]
    else:
        wanted = rotate_pairs(part, sin[None].double(), cos[None].double())
    out = rotary(x.to(device), cos.to(device), sin.to(device), rotary_mode=mode).cpu()
    bound = ELEMENTWISE[dtype]
    torch.testing.assert_close(out[..., :64].double(), wanted[0], atol=bound.atol, rtol=bound.rtol)
    assert torch.equal(out[..., 64:], x[..., 64:])


def test_angle_zero_changes_nothing_and_modes_differ(device: str) -> None:
    x = torch.randn(2, 2, 64, device=device, dtype=torch.bfloat16)
    angle = angles(torch.tensor([0, 5]), 64)
    cos, sin = angle.cos().float().to(device), angle.sin().float().to(device)
    half, pairs = (rotary(x, cos, sin, rotary_mode=mode) for mode in ("half", "interleave"))
    assert torch.equal(half[0], x[0])
    assert torch.equal(pairs[0], x[0])
    assert not torch.allclose(half[1], pairs[1])


def test_rotation_keeps_lengths_and_relative_angles(device: str) -> None:
    q, k = torch.randn(2, 1, 1, 64, dtype=torch.float32).unbind()

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        angle = angles(torch.tensor([position]), 64)
        return rotary(x.to(device), angle.cos().float().to(device), angle.sin().float().to(device)).cpu()

    torch.testing.assert_close(at(q, 1_048_577).norm(), q.norm())
    torch.testing.assert_close((at(q, 1_048_577) * at(k, 1_048_570)).sum(), (at(q, 7) * at(k, 0)).sum(), atol=1e-4, rtol=1e-4)


def test_bad_calls_say_what_to_do(device: str) -> None:
    x, cos = torch.ones(3, 2, 64, device=device), torch.ones(3, 32, device=device)
    with pytest.raises(
        ContractError, match=r"a rotary_mode of \('half', 'interleave'\) is required, got 'neox'\. Use \"half\""
    ):
        rotary(x, cos, cos, rotary_mode="neox")
    with pytest.raises(ContractError, match=r"a cos \[3, R/2\] with R at most 64 is required, got \(3, 33\)"):
        rotary(x, torch.ones(3, 33, device=device), cos)
    with pytest.raises(ContractError, match=r"a cos \[3, R/2\] with R at most 64 is required, got \(2, 32\)"):
        rotary(x, cos[:2], cos[:2])
    with pytest.raises(ContractError, match=r"with R at most 894 is required, got \(3, 448\)"):
        rotary(torch.ones(3, 1, 1024, device=device), torch.ones(3, 448, device=device), torch.ones(3, 448, device=device))
    with pytest.raises(ContractError, match=r"cos and sin of one shape in torch\.float32 or torch\.float32 is required"):
        rotary(x, cos, cos.half())
    with pytest.raises(ContractError, match=r"an input \[T, N, D\] in bf16, fp16 or fp32 is required, got \(3, 128\)"):
        rotary(x.flatten(1), cos, cos)
