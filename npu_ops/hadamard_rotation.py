"""The rotation that spreads outliers over a row of the indexer's queries or keys before it is quantised.

Rows rotated alike keep their products. Ascend op: ``torch_npu.npu_transpose_batchmatmul`` with a matrix of signs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.contract import ELEMENTWISE, OpCase, OpContract, register, require
from npu_ops.reference import hadamard_rotation as reference

OP = "hadamard_rotation"
WIDTH = 128


def hadamard_rotation(x: Tensor) -> Tensor:
    """``x @ H / sqrt(128)`` with Sylvester's symmetric Hadamard matrix H; its own inverse.

    Args:
        x: [..., 128] bf16, fp16 or fp32; any strides.

    Returns:
        The shape and dtype of ``x``; accumulated in fp32. On NPUs and GPUs, 16 bits are rounded once more before a last factor
        of 1 / sqrt(2).

    Raises:
        ContractError: if the width or dtype does not fit.
    """
    require(x.dim() >= 1 and x.shape[-1] == WIDTH and x.dtype in ELEMENTWISE, OP,
            f"an x [..., {WIDTH}] in bf16, fp16 or fp32", f"{tuple(x.shape)} in {x.dtype}",
            "Pass whole rows of the indexer.")  # fmt: skip
    return _contract.op(x)  # type: ignore[no-any-return]


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    generator = torch.Generator().manual_seed(seed)
    for name, shape in {"none": (0, 4), "row": (), "queries": (9, 64), "odd": (37,)}.items():
        x = torch.randn(*shape, WIDTH + 16, generator=generator).to(dtype).to(device)
        yield OpCase(name, (x[..., 16:] if x.numel() else x[..., 16:].contiguous(),))
    outlier = torch.zeros(3, WIDTH, dtype=dtype, device=device)
    outlier[0, 5], outlier[1, 127], outlier[2] = 30000.0, -30000.0, 300.0  # in fp16 no sum of 128 may come first
    yield OpCase("outliers", (outlier,))


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor x) -> Tensor",
        reference=reference.hadamard_rotation,
        fake=lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
        cases=_cases,
        tolerance=ELEMENTWISE,
    )
)
