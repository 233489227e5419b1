"""The experts of each token and their weights, from the router's logits.

Covers plain softmax routing (Qwen3-MoE), group-limited routing (DeepSeek-V2, arXiv:2405.04434, and its aux-loss-free form with
a correction bias, DeepSeek-V3, arXiv:2412.19437, and Kimi-K2). Ascend op: ``torch_npu.npu_moe_gating_top_k``. There a sigmoid
always normalises the weights and a softmax never does; here ``renorm`` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from npu_ops.contract import ELEMENTWISE, OpCase, OpContract, register, require
from npu_ops.reference import moe_gating_top_k as reference

OP = "moe_gating_top_k"
SOFTMAX, SIGMOID = 0, 1
# CANN sorts a row of experts in one piece, each group padded to whole vectors.
MAX_EXPERTS, VECTOR = 2048, 32


def moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """Choose ``k`` experts a row by score, best first; of equal scores, and equal groups, the lower id comes first.

    Args:
        x: router logits [T, E] bf16, fp16 or fp32; any strides.
        k: experts to choose of each row.
        bias: [E], one of the same dtypes: added to the scores for the choice of groups and experts, not to the weights.
        k_group: groups that may supply experts.
        group_count: groups of E / group_count neighbouring experts; 1 for no groups.
        group_select_mode: a group counts by its best expert (0) or by the sum of its two best (1), bias included.
        renorm: 1 divides the weights of a row by their sum + eps, 0 leaves them.
        norm_type: scores are the softmax (0) or the sigmoid (1) of the logits.
        routed_scaling_factor: factor of the weights.
        eps: added to the sum.

    Returns:
        Weights [T, k] in fp32 and ids int32 [T, k], computed in fp32. A row with NaN gets ids within [0, E), perhaps one of
        them twice, and any weights.

    Raises:
        ContractError: if a shape, dtype or number does not fit.
    """
    require(x.dim() == 2 and x.dtype in ELEMENTWISE, OP, "logits [T, E] in bf16, fp16 or fp32",
            f"{x.dtype} {tuple(x.shape)}", "Pass the router's output, a row to a token.")  # fmt: skip
    experts = x.shape[1]
    if bias is not None:
        require(bias.shape == (experts,) and bias.dtype in ELEMENTWISE, OP, f"a bias [{experts}] in bf16, fp16 or fp32",
                f"{bias.dtype} {tuple(bias.shape)}", "Pass one correction to an expert, or None.")  # fmt: skip
    require(group_count >= 1 and experts % group_count == 0 and experts // group_count > 2, OP,
            "a group_count that divides the experts into groups of at least 3", f"{group_count} for {experts} experts",
            "Pass 1 for routing without groups.")  # fmt: skip
    padded = group_count * (-(-experts // group_count // VECTOR) * VECTOR)
    require(padded <= MAX_EXPERTS, OP, f"at most {MAX_EXPERTS} experts, each group padded to a multiple of {VECTOR},",
            padded, "Use fewer experts or larger groups.")  # fmt: skip
    require(1 <= k_group <= group_count, OP, f"a k_group of 1 to {group_count}", k_group, "Keep at most all groups.")
    require(1 <= k <= experts // group_count * k_group, OP, f"a k of 1 to {experts // group_count * k_group}", k,
            "Keep as many groups as the chosen experts need.")  # fmt: skip
    for name, number in (("group_select_mode", group_select_mode), ("renorm", renorm), ("norm_type", norm_type)):
        require(number in (0, 1), OP, f"a {name} of 0 or 1", number, "Other modes are not supported.")
    return _contract.op(  # type: ignore[no-any-return]
        x, k, bias=bias, k_group=k_group, group_count=group_count, group_select_mode=group_select_mode, renorm=renorm,
        norm_type=norm_type, routed_scaling_factor=routed_scaling_factor, eps=eps,
    )  # fmt: skip


# T, E, k, and the options; a bias is made where ``bias`` is True.
_SHAPES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "none": (0, 8, 2, {}),
    "one": (1, 3, 3, {"renorm": 1}),
    "qwen3": (9, 128, 8, {"renorm": 1}),
    "plain": (7, 60, 4, {"routed_scaling_factor": 1.5}),
    "deepseek-v2": (9, 160, 6, {"group_count": 8, "k_group": 3, "routed_scaling_factor": 16.0}),
    "deepseek-v3": (9, 256, 8, {"bias": True, "group_count": 8, "k_group": 4, "group_select_mode": 1, "renorm": 1,
                                "norm_type": 1, "routed_scaling_factor": 2.5}),
    "kimi-k2": (5, 384, 8, {"bias": True, "renorm": 1, "norm_type": 1, "routed_scaling_factor": 2.827}),
    "sigmoid": (5, 33, 5, {"norm_type": 1}),
    "odd": (13, 15, 4, {"bias": True, "group_count": 5, "k_group": 2, "group_select_mode": 1, "eps": 0.5, "renorm": 1}),
    "all-groups": (4, 24, 24, {"bias": True, "group_count": 3, "k_group": 3, "norm_type": 1}),
}  # fmt: skip


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    generator = torch.Generator().manual_seed(seed)
    for name, (tokens, experts, k, options) in _SHAPES.items():
        x = torch.randn(tokens, experts, generator=generator).to(dtype).to(device)
        bias = torch.randn(experts, generator=generator).to(dtype).to(device) if "bias" in options else None
        yield OpCase(name, (x, k), options | {"bias": bias})
    tied = torch.zeros(4, 32)
    tied[1, ::2], tied[2, 20:] = 1.0, 1.0
    # exp() underflows to exactly 0 for all but one expert, and the others are a tie again.
    tied[3] = -1e4
    tied[3, 17] = 1e4
    groups = {"group_count": 4, "k_group": 2, "group_select_mode": 1}
    yield OpCase("ties", (tied.to(dtype).to(device), 6), groups)
    yield OpCase("strided", (torch.randn(6, 32, generator=generator).to(dtype).to(device)[:, 8:24], 4), {"renorm": 1})


def _fake(x: Tensor, k: int, **options: Any) -> tuple[Tensor, Tensor]:
    weights = torch.empty((x.shape[0], k), dtype=torch.float32, device=x.device)
    return weights, torch.empty((x.shape[0], k), dtype=torch.int32, device=x.device)


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor x, int k, *, Tensor? bias=None, int k_group=1, int group_count=1, int group_select_mode=0,"
        " int renorm=0, int norm_type=0, float routed_scaling_factor=1.0, float eps=1e-20) -> (Tensor, Tensor)",
        reference=reference.moe_gating_top_k,
        fake=_fake,
        cases=_cases,
        tolerance=ELEMENTWISE,
    )
)
