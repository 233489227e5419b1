"""Merging attention over disjoint parts of the keys into attention over all of them, by their log-sum-exps.

Ascend op: ``torch_npu.npu_attention_update``. The formula is that of online softmax (Milakov and Gimelshein, 2018) as
FlashAttention uses it (Dao et al., 2022): ``L = log sum_i exp(lse_i)``, ``out = sum_i out_i exp(lse_i - L)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from npu_ops.contract import ELEMENTWISE, OpCase, OpContract, Tolerance, register, require
from npu_ops.reference import attention_update as reference

OP = "attention_update"
# CANN merges head dims of 8 to 512 in steps of 8.
MAX_DIM = 512


def attention_update(lse: Sequence[Tensor], local_out: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the partial results of one query over disjoint sets of keys.

    A row of a partial that saw no key is empty: its LSE is -inf (or +inf, as some kernels write it). An empty row is
    left out whatever its output holds, NaN included. Where every partial is empty, the output is 0 and the LSE -inf.

    Args:
        lse: n >= 1 tensors [T, N] fp32, natural logarithm; any strides.
        local_out: n tensors [T, N, D], each bf16, fp16 or fp32; D a multiple of 8 up to 512; any strides.

    Returns:
        The output [T, N, D] in the dtype of ``local_out[0]``, summed in fp32 and rounded once, and its LSE [T, N] fp32.

    Raises:
        ContractError: if the lists differ in length or are empty, or a shape or dtype does not fit.
    """
    require(len(lse) == len(local_out) > 0, OP, "as many LSEs as outputs, at least one,",
            f"{len(lse)} and {len(local_out)}", "Pass both results of every partial attention.")  # fmt: skip
    shape = local_out[0].shape
    require(len(shape) == 3, OP, "outputs [T, N, D]", tuple(shape), "Pack the tokens of all requests.")
    require(shape[2] % 8 == 0 and 8 <= shape[2] <= MAX_DIM, OP, f"a head dim that is a multiple of 8 up to {MAX_DIM}",
            shape[2], "Pad the heads.")  # fmt: skip
    for part_lse, part_out in zip(lse, local_out, strict=True):
        require(part_out.shape == shape and part_out.dtype in ELEMENTWISE, OP,
                f"outputs of shape {tuple(shape)} in bf16, fp16 or fp32",
                f"{tuple(part_out.shape)} in {part_out.dtype}", "Give each partial the same query rows.")  # fmt: skip
        require(part_lse.shape == shape[:2] and part_lse.dtype == torch.float32, OP,
                f"LSEs of shape {tuple(shape[:2])} in torch.float32", f"{tuple(part_lse.shape)} in {part_lse.dtype}",
                "Pass the LSE as the attention returned it; a transposed view will do.")  # fmt: skip
    return _contract.op(lse, local_out)  # type: ignore[no-any-return]


def _fake(lse: Sequence[Tensor], local_out: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    first = local_out[0]
    out = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    return out, torch.empty(first.shape[:2], dtype=torch.float32, device=first.device)


# Number of partials, then [T, N, D].
_SHAPES = {
    "one": (1, 5, 2, 64),
    "pair": (2, 33, 4, 128),
    "odd": (3, 7, 3, 80),
    "many": (9, 4, 2, 192),
    "empty": (2, 0, 4, 64),
}


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """Random partials; a third of their rows is empty and holds NaN; the first row is empty in all of them."""
    generator = torch.Generator().manual_seed(seed)
    for name, (count, tokens, heads, dim) in _SHAPES.items():
        lse = torch.randn(count, tokens, heads, generator=generator) * 10
        out = torch.randn(count, tokens, heads, dim, generator=generator)
        empty = torch.rand(count, tokens, heads, generator=generator) < 1 / 3
        empty[:, :1] = True
        sign = torch.where(torch.rand(lse.shape, generator=generator) < 0.5, math.inf, -math.inf)
        lse, out = torch.where(empty, sign, lse), out.masked_fill(empty[..., None], math.nan)
        yield OpCase(name, (list(lse.to(device).unbind()), list(out.to(dtype).to(device).unbind())))
    turned = torch.randn(2, 3, 6, generator=generator).to(device)  # [n, N, T], as head-major kernels return it
    wide = torch.randn(2, 6, 3, 160, generator=generator).to(dtype).to(device)[..., 32:128]
    yield OpCase("strided", ([part.T for part in turned], list(wide.unbind())))
    far = [torch.full((2, 1), value, device=device) for value in (-3e4, 3e4)]
    yield OpCase("far", (far, [torch.ones(2, 1, 64, dtype=dtype, device=device) * sign for sign in (1, -1)]))
    mixed = torch.randn(3, 4, 2, 64, generator=generator).to(device)
    yield OpCase("mixed", (list(mixed[:2, ..., 0].unbind()), [mixed[0].to(dtype), mixed[1]]))


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor[] lse, Tensor[] local_out) -> (Tensor, Tensor)",
        reference=reference.attention_update,
        fake=_fake,
        cases=_cases,
        # exp and log differ in the last places between devices, and an LSE of some tens leaves fewer of them.
        tolerance={**ELEMENTWISE, torch.float32: Tolerance(5e-6, 2e-5)},
    )
)
