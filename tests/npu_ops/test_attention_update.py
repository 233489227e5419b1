from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.attention.ops.merge_attn_states import _merge_attn_states_torch as merge_of_vllm

from npu_ops.attention_update import attention_update
from npu_ops.contract import ELEMENTWISE, ContractError

OPS = ("attention_update",)


def partials(count: int, tokens: int, heads: int, dim: int, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    lse = (torch.randn(count, tokens, heads) * 5).to(device)
    return list(lse.unbind()), list(torch.randn(count, tokens, heads, dim).to(device).unbind())


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


@pytest.mark.parametrize("dtype", ELEMENTWISE, ids=str)
def test_two_partials_match_vllm(device: str, dtype: torch.dtype) -> None:
    lse, out = partials(2, 9, 3, 64, device)
    lse[0][2], lse[1][5] = -math.inf, math.inf
    out = [part.to(dtype) for part in out]
    wanted, wanted_lse = torch.empty(9, 3, 64, dtype=dtype), torch.empty(3, 9)
    first, second = ((part.cpu(), part_lse.cpu().T.contiguous()) for part, part_lse in zip(out, lse, strict=True))
    merge_of_vllm(wanted, *first, *second, wanted_lse)
    merged, total = attention_update(lse, out)
    bound = ELEMENTWISE[dtype]
    torch.testing.assert_close(merged.cpu().float(), wanted.float(), atol=bound.atol, rtol=bound.rtol)
    torch.testing.assert_close(total.cpu(), wanted_lse.T, atol=1e-5, rtol=1e-5)


def test_many_partials_match_logaddexp(device: str) -> None:
    lse, out = partials(40, 5, 2, 64, device)
    merged, total = attention_update(lse, out)
    wanted_lse, wanted = lse[0].double(), out[0].double()
    for part_lse, part in zip(lse[1:], out[1:], strict=True):
        both = torch.logaddexp(wanted_lse, part_lse.double())
        wanted = wanted * (wanted_lse - both).exp()[..., None] + part * (part_lse - both).exp()[..., None]
        wanted_lse = both
    torch.testing.assert_close(merged.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total.double(), wanted_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("empty", [math.inf, -math.inf])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 3.0])
def test_empty_partial_is_ignored_whatever_it_holds(device: str, empty: float, garbage: float) -> None:
    (lse, blank), (out, waste) = partials(2, 4, 2, 64, device)
    blank[:], waste[:] = empty, garbage
    for order in ([0, 1], [1, 0]):
        merged, total = attention_update([(lse, blank)[i] for i in order], [(out, waste)[i] for i in order])
        assert torch.equal(merged, out)
        assert torch.equal(total, lse)


@pytest.mark.parametrize("signs", [[1], [-1], [1, -1], [-1, -1, -1]])
def test_all_partials_empty(device: str, signs: list[int]) -> None:
    lse = [torch.full((3, 2), sign * math.inf, device=device) for sign in signs]
    merged, total = attention_update(lse, [torch.full((3, 2, 64), math.nan, device=device) for _ in signs])
    assert torch.equal(merged, torch.zeros_like(merged))
    assert torch.equal(total, torch.full_like(total, -math.inf))


def test_base_two_lse_is_another_result(device: str) -> None:
    # A kernel that returns base 2 must be converted: the same partials merged under the wrong base differ visibly.
    lse, out = partials(2, 6, 2, 64, device)
    merged, _ = attention_update(lse, out)
    wrong, _ = attention_update([part / math.log(2) for part in lse], out)
    right, _ = attention_update([part / math.log(2) * math.log(2) for part in lse], out)
    torch.testing.assert_close(right, merged, atol=1e-5, rtol=1e-5)
    assert (wrong - merged).abs().max() > 1e-2


@given(count=st.integers(2, 7), cut=st.integers(1, 6), values=st.integers(0, 2**31))
def test_merging_is_associative_and_commutative(device: str, count: int, cut: int, values: int) -> None:
    torch.manual_seed(values)
    lse, out = partials(count, 4, 2, 64, device)
    cut = min(cut, count - 1)
    merged, total = attention_update(lse, out)
    sides = [attention_update(lse[part], out[part]) for part in (slice(cut, None), slice(None, cut))]
    again, again_total = attention_update([side[1] for side in sides], [side[0] for side in sides])
    torch.testing.assert_close(again, merged, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again_total, total, atol=1e-5, rtol=1e-5)


def test_bad_calls_say_what_to_do(device: str) -> None:
    (lse, _), (out, _) = partials(2, 4, 2, 64, device)
    with pytest.raises(ContractError, match=r"as many LSEs as outputs, at least one, is required, got 0 and 0"):
        attention_update([], [])
    with pytest.raises(ContractError, match=r"as many LSEs as outputs, at least one, is required, got 1 and 2"):
        attention_update([lse], [out, out])
    with pytest.raises(ContractError, match=r"LSEs of shape \(4, 2\) in torch\.float32 is required, got \(2, 4\)"):
        attention_update([lse.T], [out])
    with pytest.raises(
        ContractError, match=r"LSEs of shape \(4, 2\) in torch\.float32 is required, got \(4, 2\) in torch\.float16"
    ):
        attention_update([lse.half()], [out])
    with pytest.raises(
        ContractError, match=r"outputs of shape \(4, 2, 64\) in bf16, fp16 or fp32 is required, got \(3, 2, 64\)"
    ):
        attention_update([lse, lse], [out, out[:3]])
    with pytest.raises(
        ContractError, match=r"a head dim that is a multiple of 8 up to 512 is required, got 63\. Pad the heads"
    ):
        attention_update([lse], [out[..., :63]])
