"""Values and rules of MLA's ops beside attention: the rope of its queries, its cache write, its projections by head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npu_ops.reference import interleave_rope, kv_rmsnorm_rope_cache, transpose_batchmatmul
from npu_ops.virtual_npu.rules import FLOATS, rule, unless
from npu_ops.virtual_npu.rules import values as numbers
from npu_ops.virtual_npu.values import refuse, value

ROPE_DOC = "torch_npu doc of npu_interleave_rope"
CACHE_DOC = "torch_npu doc of npu_kv_rmsnorm_rope_cache_v2; CANN ops-transformer, posembedding/kv_rms_norm_rope_cache"
BMM_DOC = "CANN ops-nn, aclnnTransposeBatchMatMul for A2 and A3"
ROPE, LATENT, LINE = 64, 512, 16
NARROW = (torch.float16, torch.bfloat16)
HEADS_FIRST = [1, 0, 2]


@value("npu::npu_interleave_rope")
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbours of x [B, N, S, 64] rotated by cos and sin [B, 1, S or 1, 64], left as two halves."""
    batch, heads, length, width = x.shape
    rows = x.transpose(1, 2).reshape(-1, heads, width)
    angles = (_half(part.expand(batch, 1, length, width)[:, 0].reshape(-1, width)) for part in (cos, sin))
    return interleave_rope.interleave_rope(rows, *angles).view(batch, length, heads, width).transpose(1, 2).contiguous()


def _half(part: Tensor) -> Tensor:
    """The angles of the pairs; the op takes them twice, once for each half of the result."""
    first, second = part.chunk(2, -1)
    if not torch.equal(first, second):
        raise NotImplementedError("the virtual NPU rotates by angles whose two halves are equal, and these are not")
    return first


@value("npu::npu_kv_rmsnorm_rope_cache_v2")
def npu_kv_rmsnorm_rope_cache_v2(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Rope and latent rows [B, 1, S, width] of kv [B, 1, S, 576], after both went to the slots ``index`` of paged caches."""
    op = "npu_kv_rmsnorm_rope_cache_v2"
    refuse(op, **others)
    if cache_mode not in ("PA", "PA_BNSD") or not is_output_kv:
        raise NotImplementedError(f"{op}: the virtual NPU computes cache_mode PA_BNSD with is_output_kv, got {cache_mode!r}")
    cos, sin = (_half(part.reshape(-1, ROPE)) for part in (cos, sin))
    rope, latent = kv_rmsnorm_rope_cache.kv_rmsnorm_rope_cache(
        kv.reshape(-1, kv.shape[-1]), gamma, cos, sin, index, k_cache, ckv_cache, epsilon=epsilon
    )
    return tuple(rows.view(*kv.shape[:3], -1) for rows in (rope, latent))  # type: ignore[return-value]


@value("npu::npu_transpose_batchmatmul")
def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    """``input[:, b] @ weight[b]`` of input [M, B, K] or, by perm_x1, [B, M, K], as [M, B, N]."""
    refuse("npu_transpose_batchmatmul", bias=bias, scale=scale, batch_split_factor=(batch_split_factor or 1) - 1)
    heads_second = list(perm_x1 or ()) == HEADS_FIRST
    return transpose_batchmatmul.transpose_batchmatmul(input if heads_second else input.transpose(0, 1), weight)


# ---- rules ----------------------------------------------------------------------------------------------------------------


def _described(*tensors: Tensor) -> list[str]:
    return [f"{x.dtype} {list(x.shape)}" for x in tensors]


@rule("x [B, N, S, 64] in fp16 or bf16, cos and sin [B, 1, S or 1, 64] likewise", ROPE_DOC, "npu_interleave_rope")
def _rope_tensors(c: Any) -> object:
    right = c.x.dim() == 4 and c.x.shape[3] == ROPE and c.x.dtype in NARROW
    batch, _, length, _ = c.x.shape if right else (0, 0, 0, 0)
    sizes = {(batch, 1, length, ROPE), (batch, 1, 1, ROPE)}
    right = right and all(tuple(x.shape) in sizes and x.dtype == c.x.dtype for x in (c.cos, c.sin))
    return unless(right and c.cos.shape == c.sin.shape, _described(c.x, c.cos, c.sin))


@rule("contiguous tensors", ROPE_DOC, "npu_interleave_rope")
def _rope_contiguous(c: Any) -> object:
    given = (c.x, c.cos, c.sin)
    return unless(all(x.is_contiguous() for x in given), [x.stride() for x in given])


@rule(
    "kv [B, 1, S, 576], gamma [512], cos and sin [B, 1, S, 64], all in fp16 or bf16", CACHE_DOC, "npu_kv_rmsnorm_rope_cache_v2"
)
def _cache_rows(c: Any) -> object:
    given = (c.kv, c.gamma, c.cos, c.sin)
    right = c.kv.dim() == 4 and c.kv.shape[1] == 1 and c.kv.shape[3] == LATENT + ROPE and c.gamma.shape == (LATENT,)
    right = right and all(x.shape == (*c.kv.shape[:3], ROPE) for x in (c.cos, c.sin))
    return unless(right and c.kv.dtype in NARROW and len({x.dtype for x in given}) == 1, _described(*given))


@rule("contiguous caches [blocks, block_size, 1, 64] and [blocks, block_size, 1, 512] in the dtype of kv", CACHE_DOC,
      "npu_kv_rmsnorm_rope_cache_v2")  # fmt: skip
def _cache_pages(c: Any) -> object:
    caches = (c.k_cache, c.ckv_cache)
    right = all(x.dim() == 4 and x.dtype == c.kv.dtype and x.is_contiguous() for x in caches)
    right = right and c.k_cache.shape[2:] == (1, ROPE) and c.ckv_cache.shape[2:] == (1, LATENT)
    return unless(right and c.k_cache.shape[:2] == c.ckv_cache.shape[:2], [*_described(*caches), *(x.stride() for x in caches)])


@rule("a block_size that is a multiple of 16, and at least B * ceil(S / block_size) blocks", CACHE_DOC,
      "npu_kv_rmsnorm_rope_cache_v2")  # fmt: skip
def _cache_blocks(c: Any) -> object:
    blocks, block_size = c.k_cache.shape[:2]
    needed = c.kv.shape[0] * -(-c.kv.shape[2] // block_size)
    return unless(block_size % LINE == 0 and blocks >= needed, f"{blocks} of {block_size} for {list(c.kv.shape)}")


@rule("one int64 slot to a row, from -1 to blocks * block_size and, unless -1, distinct", CACHE_DOC,
      "npu_kv_rmsnorm_rope_cache_v2")  # fmt: skip
def _cache_slots(c: Any) -> object:
    if c.index.dtype != torch.int64 or c.index.shape != (c.kv.shape[0] * c.kv.shape[2],):
        return _described(c.index, c.kv)
    kept = [slot for slot in numbers(c.index) or () if slot != -1]
    room = c.k_cache.shape[0] * c.k_cache.shape[1]
    right = len(set(kept)) == len(kept) and all(0 <= slot < room for slot in kept)
    return unless(right, f"{sorted(kept)[:2]} to {sorted(kept)[-4:]} of {room}")


@rule("a 3-D input and weight in one dtype that agree in batch and inner dim", BMM_DOC, "npu_transpose_batchmatmul")
def _bmm_tensors(c: Any) -> object:
    given = (c.input, c.weight)
    right = all(x.dim() == 3 and x.dtype in FLOATS for x in given) and c.input.dtype == c.weight.dtype
    batch = c.input.shape[1] if list(c.perm_x1 or ()) == HEADS_FIRST else c.input.shape[0]
    return unless(right and (batch, c.input.shape[2]) == tuple(c.weight.shape[:2]), _described(*given))


@rule("perm_x1 of (0, 1, 2) or (1, 0, 2), perm_x2 of (0, 1, 2), perm_y of (1, 0, 2)", BMM_DOC, "npu_transpose_batchmatmul")
def _bmm_orders(c: Any) -> object:
    orders = [None if x is None else list(x) for x in (c.perm_x1, c.perm_x2, c.perm_y)]
    right = orders[0] in ([0, 1, 2], HEADS_FIRST) and orders[1] == [0, 1, 2] and orders[2] == HEADS_FIRST
    return unless(right, orders)


@rule("at most 65535 elements to a row of the input (with its heads, if they come second), and a weight whose last two dims "
      "are multiples of 16", BMM_DOC, "npu_transpose_batchmatmul")  # fmt: skip
def _bmm_sizes(c: Any) -> object:
    row = c.input.shape[2] * (c.input.shape[1] if list(c.perm_x1 or ()) == HEADS_FIRST else 1)
    right = row <= 65535 and all(size % LINE == 0 for size in c.weight.shape[1:]) and c.weight.shape[2] < 65536
    return unless(right, _described(c.input, c.weight))
