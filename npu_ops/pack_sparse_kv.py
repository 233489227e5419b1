"""Latent rows of a sparse attention's cache as int8, in the bytes that CANN's quantised kernel reads (C8).

A row is 656 bytes: 512 int8, one fp32 scale to each tile of 128 of them (symmetric), and 64 rope elements as they are:

    bytes 0 to 511: the quantised latent; 512 to 639: rope, 16 bits each; 640 to 655: the four scales.

Ascend op: ``torch_npu.npu_dynamic_block_quant`` for the latent (tiles of 1 x 128, int8); the rest is views of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.attention_limits import LATENT_DIM, ROPE_DIM
from npu_ops.contract import ELEMENTWISE, EXACT, OpCase, OpContract, register, require
from npu_ops.reference import pack_sparse_kv as reference

PACK, UNPACK = "pack_sparse_kv", "unpack_sparse_kv"
TILE = 128
WIDTH = LATENT_DIM + 2 * ROPE_DIM + 4 * (LATENT_DIM // TILE)


def pack_sparse_kv(latent: Tensor, rope: Tensor) -> Tensor:
    """Each tile as ``round(x / scale)`` with ``scale = max(absmax / 127, 1e-30)``, half to even; the rope part as it is.

    Args:
        latent: [T, 512] bf16, fp16 or fp32; any strides.
        rope: [T, 64], the dtype of ``latent``; any strides. fp32 is rounded to bf16.

    Returns:
        int8 [T, 656]. A tile of zeros unpacks to zeros, a tile with NaN to NaN; its int8 may be anything.

    Raises:
        ContractError: if a shape or dtype does not fit.
    """
    require(latent.dim() == 2 and latent.shape[1] == LATENT_DIM and latent.dtype in ELEMENTWISE, PACK,
            f"a latent [T, {LATENT_DIM}] in bf16, fp16 or fp32", f"{latent.dtype} {tuple(latent.shape)}",
            "Pass the normalised latent rows.")  # fmt: skip
    require(rope.shape == (latent.shape[0], ROPE_DIM) and rope.dtype == latent.dtype, PACK,
            f"a rope [{latent.shape[0]}, {ROPE_DIM}] in {latent.dtype}", f"{rope.dtype} {tuple(rope.shape)}",
            "Pass the rotated rows of the same tokens.")  # fmt: skip
    return _contract.op(latent, rope)  # type: ignore[no-any-return]


def unpack_sparse_kv(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Latent rows ``int8 * scale``, and rope rows, of what ``pack_sparse_kv`` made: plain PyTorch on every device.

    Args:
        rows: int8 [..., 656]; any strides.
        dtype: bf16, fp16 or fp32, of the results; the dtype of the rope bytes too, which are bf16 for fp32.

    Returns:
        Latent [..., 512] and rope [..., 64].

    Raises:
        ContractError: if a shape or dtype does not fit.
    """
    require(rows.dim() >= 1 and rows.shape[-1] == WIDTH and rows.dtype == torch.int8, UNPACK, f"int8 rows [..., {WIDTH}]",
            f"{rows.dtype} {tuple(rows.shape)}", "Pass rows, or the cache, of packed keys.")  # fmt: skip
    require(dtype in ELEMENTWISE, UNPACK, "a dtype of bf16, fp16 or fp32", dtype, "Pass that of the query.")
    return reference.unpack_sparse_kv(rows, dtype)


def _rows(tokens: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tiles of very different sizes, some of zeros, in slices of a fused projection."""
    whole = torch.randn(tokens, 32 + LATENT_DIM + ROPE_DIM, generator=generator)
    sizes = torch.tensor([0.01, 1.0, 100.0, 0.0]).repeat_interleave(TILE)
    latent = whole[:, 32 : 32 + LATENT_DIM] * sizes.roll(TILE * tokens)
    return latent.to(dtype), whole.to(dtype)[:, 32 + LATENT_DIM :]


_SIZES = {"none": 0, "one": 1, "odd": 37, "many": 130}


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    generator = torch.Generator().manual_seed(seed)
    for name, tokens in _SIZES.items():
        latent, rope = _rows(tokens, dtype, generator)
        if not tokens:  # opcheck cannot copy an empty view
            rope = rope.clone(memory_format=torch.contiguous_format)
        yield OpCase(name, (latent.to(device), rope.to(device)))


_contract = register(
    OpContract(
        name=PACK,
        stem=PACK,
        schema="(Tensor latent, Tensor rope) -> Tensor",
        reference=reference.pack_sparse_kv,
        fake=lambda latent, rope: torch.empty((latent.shape[0], WIDTH), dtype=torch.int8, device=latent.device),
        cases=_cases,
        tolerance=EXACT,
        # The rope bytes are those of the dtype, which the comparison with a call in fp32 does not have: see the test by bytes.
        defined=lambda args, results: [results[0][:, :LATENT_DIM], results[0][:, LATENT_DIM + 2 * ROPE_DIM :]],
    )
)
