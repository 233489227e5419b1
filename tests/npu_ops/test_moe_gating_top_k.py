from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from npu_ops.contract import ContractError
from npu_ops.moe_gating_top_k import moe_gating_top_k

OPS = ("moe_gating_top_k",)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


def routed(router: torch.nn.Module, experts: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """Logits, weights and ids of a router of transformers, whose weight is the identity: the logits are the hidden states."""
    with torch.no_grad():
        router.weight.copy_(torch.eye(experts))
        return tuple(router(torch.randn(tokens, experts)))


def assert_equal_choice(got: tuple[torch.Tensor, ...], weights: torch.Tensor, ids: torch.Tensor) -> None:
    """The same experts with the same weights; transformers leaves their order open."""
    got_weights, got_ids = (x.cpu() for x in got)
    assert torch.equal(got_ids.sort(1).values.long(), ids.sort(1).values)
    torch.testing.assert_close(got_weights.gather(1, got_ids.argsort(1)), weights.gather(1, ids.argsort(1)))
    assert got_weights.is_contiguous()


@pytest.mark.parametrize("renorm", [0, 1])
def test_matches_transformers_qwen3(device: str, renorm: int) -> None:
    config = Qwen3MoeConfig(num_experts=128, num_experts_per_tok=8, norm_topk_prob=bool(renorm), hidden_size=128)
    logits, weights, ids = routed(Qwen3MoeTopKRouter(config), 128, 50)
    assert_equal_choice(moe_gating_top_k(logits.to(device), 8, renorm=renorm), weights, ids)


@pytest.mark.parametrize("renorm", [0, 1])
def test_matches_transformers_deepseek_v3(device: str, renorm: int) -> None:
    config = DeepseekV3Config(n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4, hidden_size=256,
                              norm_topk_prob=bool(renorm), routed_scaling_factor=2.5)  # fmt: skip
    router = DeepseekV3TopkRouter(config)
    # Larger than the spread of the scores, of either sign: it decides which groups come first.
    router.e_score_correction_bias.copy_(torch.randn(256))
    logits, weights, ids = routed(router, 256, 50)
    got = moe_gating_top_k(
        logits.to(device), 8, bias=router.e_score_correction_bias.to(device), k_group=4, group_count=8, group_select_mode=1,
        renorm=renorm, norm_type=1, routed_scaling_factor=2.5,
    )  # fmt: skip
    assert_equal_choice(got, weights, ids)


def test_matches_transformers_deepseek_v2(device: str) -> None:
    config = DeepseekV2Config(n_routed_experts=160, num_experts_per_tok=6, n_group=8, topk_group=3, hidden_size=160,
                              topk_method="group_limited_greedy", routed_scaling_factor=16.0)  # fmt: skip
    logits, weights, ids = routed(DeepseekV2TopkRouter(config), 160, 50)
    got = moe_gating_top_k(logits.to(device), 6, k_group=3, group_count=8, routed_scaling_factor=16.0)
    assert_equal_choice(got, weights, ids)


def best(scores: list[float], count: int) -> list[int]:
    """Indices of the ``count`` best, of equal ones the first."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:count]


@pytest.mark.parametrize("norm_type", [0, 1])
@pytest.mark.parametrize("mode", [0, 1])
def test_ties_in_lists_of_python(device: str, mode: int, norm_type: int) -> None:
    # Few distinct logits and corrections, all exact in binary: equal scores, and equal sums of groups, abound.
    logits = torch.randint(0, 3, (60, 24)).float()
    bias = torch.randint(0, 3, (24,)) / 4
    options = {"k_group": 2, "group_count": 6, "group_select_mode": mode, "norm_type": norm_type}
    weights, ids = moe_gating_top_k(logits.to(device), 5, bias=bias.to(device), **options)
    probs = logits.softmax(-1) if norm_type == 0 else logits.sigmoid()
    for row, got, got_weights in zip(probs, ids.tolist(), weights.cpu(), strict=True):
        choice = (row + bias).tolist()
        # In fp32, as the sums of two scores are compared there.
        groups = [torch.tensor(sorted(choice[g : g + 4])[-1 - mode :]).sum().item() for g in range(0, 24, 4)]
        kept = best(groups, 2)
        wanted = best([score if index // 4 in kept else -math.inf for index, score in enumerate(choice)], 5)
        assert got == wanted
        torch.testing.assert_close(got_weights, row[wanted])


def test_only_the_choice_sees_the_bias(device: str) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]], device=device)
    weights, ids = moe_gating_top_k(logits, 1, bias=torch.tensor([0.0, 0.0, 0.0, 9.0], device=device), norm_type=1)
    assert ids.tolist() == [[3]]
    assert weights.tolist() == [[0.5]]


def test_a_nan_stays_in_its_row(device: str) -> None:
    logits = torch.randn(6, 40, device=device)
    clean = moe_gating_top_k(logits, 4, group_count=5, k_group=2, norm_type=1)
    poisoned = logits.clone()
    poisoned[1], poisoned[4, 7] = math.nan, math.nan
    weights, ids = moe_gating_top_k(poisoned, 4, group_count=5, k_group=2, norm_type=1)
    rows = [0, 2, 3, 5]
    assert torch.equal(weights[rows], clean[0][rows])
    assert torch.equal(ids[rows], clean[1][rows])
    assert bool(((ids >= 0) & (ids < 40)).all())


def test_bad_calls_say_what_to_do(device: str) -> None:
    logits = torch.zeros(2, 24, device=device)

    def bad(**options: Any) -> None:
        moe_gating_top_k(options.pop("x", logits), options.pop("k", 2), **options)

    with pytest.raises(ContractError, match=r"logits \[T, E\] in bf16, fp16 or fp32 is required, got torch\.int64"):
        bad(x=logits.long())
    with pytest.raises(ContractError, match=r"a bias \[24\] in bf16, fp16 or fp32 is required, got torch\.float32 \(23,\)"):
        bad(bias=torch.zeros(23, device=device))
    for groups in (5, 12, 0):
        with pytest.raises(ContractError, match=rf"into groups of at least 3 is required, got {groups} for 24 experts"):
            bad(group_count=groups)
    with pytest.raises(ContractError, match=r"at most 2048 experts, each group padded to a multiple of 32, is required"):
        bad(x=torch.zeros(1, 300, device=device), group_count=100)
    with pytest.raises(ContractError, match=r"a k_group of 1 to 4 is required, got 5"):
        bad(group_count=4, k_group=5)
    with pytest.raises(ContractError, match=r"a k of 1 to 12 is required, got 13\. Keep as many groups"):
        bad(group_count=4, k_group=2, k=13)
    for name in ("group_select_mode", "renorm", "norm_type"):
        with pytest.raises(ContractError, match=rf"a {name} of 0 or 1 is required, got 2"):
            bad(**{name: 2})
