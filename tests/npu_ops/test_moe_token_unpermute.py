"""The op, and the four ops of a layer of experts together against a dense loop over all experts in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from npu_ops.contract import ELEMENTWISE, ContractError
from npu_ops.grouped_matmul import grouped_matmul
from npu_ops.moe_gating_top_k import moe_gating_top_k
from npu_ops.moe_init_routing import moe_init_routing
from npu_ops.moe_token_unpermute import moe_token_unpermute
from npu_ops.swiglu import swiglu

OPS = ("moe_token_unpermute",)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


@given(tokens=st.integers(1, 9), k=st.integers(1, 5), width=st.sampled_from([1, 40, 1100]), absent=st.integers(0, 9))
@pytest.mark.parametrize("dtype", ELEMENTWISE, ids=str)
def test_matches_a_product_with_a_sparse_matrix(
    device: str, dtype: torch.dtype, tokens: int, k: int, width: int, absent: int
) -> None:
    indices = torch.randperm(tokens * k).int()
    indices[indices < absent] = -1
    rows, probs = torch.randn(tokens * k, width).to(dtype), torch.rand(tokens, k)
    matrix = torch.zeros(tokens, tokens * k, dtype=torch.float64)
    for choice, row in enumerate(indices.tolist()):
        if row >= 0:
            matrix[choice // k, row] = probs.flatten()[choice]
    wanted = matrix @ rows.double()
    rows[:absent], probs[(indices < 0).view(tokens, k)] = math.nan, math.nan
    got = moe_token_unpermute(rows.to(device), indices.to(device), probs.to(device))
    bound = ELEMENTWISE[dtype]
    torch.testing.assert_close(got.double().cpu(), wanted, atol=bound.atol, rtol=bound.rtol)


def test_a_tokens_nan_stays_its_own(device: str) -> None:
    rows = torch.ones(8, 8, device=device)
    rows[0], rows[1], rows[4:] = math.inf, math.nan, math.nan
    # Token 0 has the first two rows; the others share a rank's worth of absent experts.
    indices = torch.tensor([0, 1, 2, -1, -1, 3, -1, -1], dtype=torch.int32, device=device)
    out = moe_token_unpermute(rows, indices, torch.full((4, 2), 0.5, device=device))
    assert out[0].isnan().all()
    assert out[1:].tolist() == [[0.5] * 8, [0.5] * 8, [0.0] * 8]


def dense(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Every expert on every token, weighted by a matrix that is 0 where an expert was not chosen."""
    share = torch.zeros(x.shape[0], w13.shape[0], dtype=torch.float64).scatter_(1, ids.long(), weights.double())
    out = torch.zeros_like(x, dtype=torch.float64)
    for expert in range(w13.shape[0]):
        gate, up = (x.double() @ w13[expert].double().T).chunk(2, -1)
        out += share[:, expert, None] * (F.silu(gate) * up @ w2[expert].double().T)
    return out


def layer(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
          experts: int, first: int) -> torch.Tensor:  # fmt: skip
    """The experts ``first`` and following, whose weights these are, through the ops."""
    active = [first, first + len(w13)]
    rows, row_idx, counts = moe_init_routing(x, ids, expert_num=experts, active_expert_range=active)
    hidden = swiglu(grouped_matmul(rows, w13.transpose(1, 2), counts))
    return moe_token_unpermute(grouped_matmul(hidden, w2.transpose(1, 2), counts), row_idx, weights)


ROUTES = {
    "spread": lambda tokens: torch.rand(tokens, 12).argsort(1)[:, :3],
    "three experts for all": lambda tokens: torch.tensor([[7, 2, 11]]).expand(tokens, 3),
    "half the experts idle": lambda tokens: torch.rand(tokens, 6).argsort(1)[:, :3] * 2,
}


@pytest.mark.parametrize("tokens", [0, 1, 45])
@pytest.mark.parametrize("ranks", [1, 2, 3, 12])
@pytest.mark.parametrize("route", ROUTES)
def test_ops_together_are_the_experts(device: str, route: str, ranks: int, tokens: int) -> None:
    x, weights = torch.randn(tokens, 40), torch.rand(tokens, 3)
    w13, w2 = torch.randn(12, 2 * 24, 40) / 6, torch.randn(12, 40, 24) / 5
    ids = ROUTES[route](tokens).int()
    given = [t.to(device) for t in (weights, ids)]
    parts = zip(w13.to(device).chunk(ranks), w2.to(device).chunk(ranks), strict=True)
    outs = [layer(x.to(device), *part, *given, 12, rank * (12 // ranks)) for rank, part in enumerate(parts)]
    total = torch.stack(outs).sum(0).double().cpu()
    torch.testing.assert_close(total, dense(x, w13, w2, weights, ids), atol=2e-6, rtol=1e-5)


def test_no_row_depends_on_its_neighbours(device: str) -> None:
    # A padding row of NaN, and the order of the tokens, change no other token's result by a bit.
    x, logits = torch.randn(30, 32, device=device), torch.randn(30, 8, device=device)
    w13, w2 = torch.randn(8, 2 * 16, 32, device=device), torch.randn(8, 32, 16, device=device)

    def run(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return layer(x, w13, w2, *moe_gating_top_k(logits, 2, renorm=1), 8, 0)

    alone = run(x, logits)
    order = torch.randperm(30, device=device)
    torch.testing.assert_close(run(x[order], logits[order]), alone[order], rtol=1e-5, atol=1e-5)
    poisoned = [torch.cat((t, torch.full_like(t[:3], math.nan))) for t in (x, logits)]
    torch.testing.assert_close(run(*poisoned)[:30], alone, rtol=1e-5, atol=1e-5)


def test_bad_calls_say_what_to_do(device: str) -> None:
    rows, probs = torch.zeros(8, 16, device=device), torch.zeros(4, 2, device=device)
    indices = torch.zeros(8, dtype=torch.int32, device=device)
    for wrong in (rows.int(), rows[:7]):
        with pytest.raises(ContractError, match=r"rows \[8, H\] in bf16, fp16 or fp32 is required, got torch\."):
            moe_token_unpermute(wrong, indices, probs)
    for wrong in (probs.half(), torch.zeros(1, 513, device=device)):
        with pytest.raises(ContractError, match=r"fp32 probs \[T, K\] with a K of 1 to 512 is required, got torch\.float"):
            moe_token_unpermute(rows, indices, wrong)
    for index in (indices.long(), indices[:7]):
        with pytest.raises(ContractError, match=r"int32 sorted_indices \[8\] is required, got torch\.int"):
            moe_token_unpermute(rows, index, probs)
