"""A matrix of its own for each head: how MLA takes queries into the latent space, and attention's result out of it.

Ascend op: ``torch_npu.npu_transpose_batchmatmul`` with ``perm_x1`` and ``perm_y`` of (1, 0, 2).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.contract import ELEMENTWISE, OpCase, OpContract, Tolerance, register, require
from npu_ops.reference import transpose_batchmatmul as reference

OP = "transpose_batchmatmul"
# CANN's kernel wants whole lines of 16 elements, and rows that 16 bits can count.
LINE = 16
MAX_WIDTH = 65520


def transpose_batchmatmul(input: Tensor, weight: Tensor) -> Tensor:
    """``input[:, n] @ weight[n]`` for each head n.

    Args:
        input: [T, N, K] bf16, fp16 or fp32; any strides; K a multiple of 16 up to 65,520.
        weight: [N, K, M], the dtype of ``input``; contiguous; M likewise.

    Returns:
        [T, N, M], the dtype of ``input``; accumulated in fp32.

    Raises:
        ContractError: if a shape or dtype does not fit, or the weight is not contiguous.
    """
    require(input.dim() == 3 and input.dtype in ELEMENTWISE, OP, "an input [T, N, K] in bf16, fp16 or fp32",
            f"{tuple(input.shape)} in {input.dtype}", "Pack the tokens, and view the heads apart.")  # fmt: skip
    require(weight.dim() == 3 and weight.shape[:2] == input.shape[1:] and weight.dtype == input.dtype, OP,
            f"a weight [{input.shape[1]}, {input.shape[2]}, M] in {input.dtype}", f"{tuple(weight.shape)} in {weight.dtype}",
            "Pass one matrix to a head.")  # fmt: skip
    require(all(LINE <= width <= MAX_WIDTH and width % LINE == 0 for width in weight.shape[1:]), OP,
            f"K and M that are multiples of {LINE} from {LINE} to {MAX_WIDTH}", f"{weight.shape[1]} and {weight.shape[2]}",
            "Pad the matrices with zeros, or split them.")  # fmt: skip
    require(weight.is_contiguous(), OP, "a contiguous weight", f"strides {weight.stride()}",
            "Lay the matrices out once, when they are loaded.")  # fmt: skip
    return _contract.op(input, weight)  # type: ignore[no-any-return]


# T, N, K, M.
_SHAPES = {
    "none": (0, 2, 128, 512),
    "one": (1, 1, 16, 16),
    "absorb": (5, 4, 128, 512),
    "values": (17, 3, 512, 128),
    "many-heads": (2, 128, 512, 128),  # N * K past 65,535, where Ascend's op ends
}


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """Rows are slices of wider heads; the sums are scaled to be around 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, (tokens, heads, inner, width) in _SHAPES.items():
        x = torch.randn(tokens, heads, inner + 64, generator=generator).to(dtype).to(device)[..., :inner]
        if not tokens:  # opcheck cannot copy an empty view
            x = x.clone(memory_format=torch.contiguous_format)
        weight = torch.randn(heads, inner, width, generator=generator) * inner**-0.5
        yield OpCase(name, (x, weight.to(dtype).to(device)))


def _fake(input: Tensor, weight: Tensor) -> Tensor:
    return torch.empty(*input.shape[:2], weight.shape[2], dtype=input.dtype, device=input.device)


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor input, Tensor weight) -> Tensor",
        reference=reference.transpose_batchmatmul,
        fake=_fake,
        cases=_cases,
        # Sums of up to 512 products around 1 in size, in another order; 16 bit: one rounding of such a sum.
        tolerance={
            torch.float32: Tolerance(5e-6, 2e-5),
            torch.float16: Tolerance(2e-3, 4e-3),
            torch.bfloat16: Tolerance(1.6e-2, 1.6e-2),
        },
    )
)
