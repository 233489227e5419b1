"""Attention over packed tokens with a paged or contiguous KV (FIA), for prefill, decode and anything between.

Ascend op: ``torch_npu.npu_fused_infer_attention_score_v2`` with input layout TND; names and meanings are its own.
Two arguments are ours: ``query_start_loc`` and ``seq_lens`` repeat the lengths as device tensors, because CUDA kernels
read them there without waiting for the host, while Ascend's op wants host lists. An argument of Ascend's op that is
not here is not supported; the compressed 2048 x 2048 mask is made by the Ascend mapping itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from npu_ops.attention_limits import (
    BLOCK_SIZES,
    DTYPES,
    HEAD_DIMS,
    LATENT_DIM,
    MHA_DIMS,
    OP,
    ROPE_DIM,
    SPARSE_BAND,
    SPARSE_CAUSAL,
    SPARSE_NONE,
    validate_cache,
    validate_latent,
    validate_latent_rows,
    validate_lengths,
    validate_mask,
    validate_tensors,
)
from npu_ops.contract import OpCase, OpContract, Tolerance, register
from npu_ops.reference import fused_infer_attention as reference

# CANN's spelling of "no limit" for pre_tokens and next_tokens.
UNLIMITED = 2147483647
__all__ = [
    "BLOCK_SIZES", "DTYPES", "HEAD_DIMS", "SPARSE_BAND", "SPARSE_CAUSAL", "SPARSE_NONE", "UNLIMITED", "build_case",
    "build_latent_case", "fused_infer_attention",
]  # fmt: skip


def fused_infer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    actual_seq_qlen: Sequence[int],
    actual_seq_kvlen: Sequence[int],
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_query_heads: int,
    num_key_value_heads: int,
    softmax_scale: float,
    block_table: Tensor | None = None,
    block_size: int = 0,
    sparse_mode: int = 0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    learnable_sink: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of every request's new tokens over its keys: ``softmax(scale * Q K^T + mask) V``.

    A request with ``q`` query rows and ``k`` keys is aligned at the right-down corner: row ``i`` sits at key position
    ``p = k - q + i``. ``sparse_mode`` 0 lets it see every key, 3 the keys ``j <= p`` (causal), 4 the band
    ``p - pre_tokens <= j <= p + next_tokens``; both ends are included, so a sliding window of ``W`` tokens (itself
    among them) is ``pre_tokens = W - 1, next_tokens = 0``.

    With ``query_rope`` and ``key_rope`` the call is the absorbed form of multi-head latent attention: the cache holds one
    latent row of 512 to a token, which is key and value of every head, beside a rope part of 64, and the scores are
    ``scale * (Q K^T + Q_rope K_rope^T)``. It wants paged keys in blocks of 16 or 128, one KV head, at most 128 query heads,
    at most 16 query rows to a request, sparse_mode 0 or 3 and no sink. The other form of MLA, keys of 192 with values of
    128 for every head, is plain attention over contiguous keys.

    Args:
        query: [T, N, D] bf16, fp16 or fp32; D one of 64, 80, 96, 128, 192, 256, or 512 with rope parts; any strides.
            Rows past the last request are padding: their output is 0, their LSE -inf.
        key: paged [blocks, block_size, N_kv, D] or contiguous packed [T_kv, N_kv, D], the dtype of ``query``; contiguous.
        value: the shape and dtype of ``key``, or [T_kv, N_kv, 128] for keys of 192; contiguous. With rope parts ``key`` itself.
        actual_seq_qlen: B host ints, cumulative query lengths without a leading 0 (Ascend's TND rule).
        actual_seq_kvlen: B host ints; paged: keys of each request; contiguous: cumulative without a leading 0.
        query_start_loc: int32 [B + 1] on the device, cumulative query lengths with a leading 0.
        seq_lens: int32 [B] on the device, keys of each request, paged or not.
        num_query_heads: N, at most 256.
        num_key_value_heads: N_kv; divides N, at most 64 query heads to one.
        softmax_scale: factor on Q K^T, usually D ** -0.5.
        block_table: int32 [>= B, >= blocks of the longest request], or None for contiguous keys.
        block_size: tokens of a block, 16..256 in steps of 16; 0 for contiguous keys.
        sparse_mode: 0 none, 3 right-down causal, 4 band.
        pre_tokens: keys before the row's own position that it sees; like ``next_tokens`` read for sparse_mode 4 only.
        next_tokens: keys after it that it sees.
        learnable_sink: [N], one extra logit to each head that takes part in the softmax and has no value.
        query_rope: [T, N, 64] in the dtype of ``query``, any strides; only together with ``key_rope``.
        key_rope: [blocks, block_size, 1, 64] in the dtype of ``key``; contiguous.
        return_softmax_lse: whether the second result is filled.

    Returns:
        The output [T, N, D of ``value``] in the dtype of ``query``, and the natural-log LSE [T, N] fp32 (the sink is part
        of it; [0] when not asked for). A row that sees no key gives output 0; its LSE is -inf, or the sink's logit.

    Raises:
        ContractError: for whatever CANN would refuse, on every device.
    """
    if latent := query_rope is not None or key_rope is not None:
        validate_latent(query, key, value, query_rope, key_rope, num_query_heads, num_key_value_heads, block_table, block_size)
    else:
        validate_tensors(query, key, value, num_query_heads, num_key_value_heads)
        validate_mask(sparse_mode, pre_tokens, next_tokens, learnable_sink, query, num_query_heads)
    validate_lengths(query, actual_seq_qlen, actual_seq_kvlen, query_start_loc, seq_lens)
    if latent:
        validate_latent_rows(sparse_mode, learnable_sink, actual_seq_qlen)
    validate_cache(key, block_table, block_size, actual_seq_kvlen)
    return _contract.op(  # type: ignore[no-any-return]
        query, key, value, actual_seq_qlen=actual_seq_qlen, actual_seq_kvlen=actual_seq_kvlen,
        query_start_loc=query_start_loc, seq_lens=seq_lens, num_query_heads=num_query_heads,
        num_key_value_heads=num_key_value_heads, softmax_scale=softmax_scale, block_table=block_table,
        block_size=block_size, sparse_mode=sparse_mode, pre_tokens=pre_tokens, next_tokens=next_tokens,
        learnable_sink=learnable_sink, query_rope=query_rope, key_rope=key_rope, return_softmax_lse=return_softmax_lse,
    )  # fmt: skip


def _fake(query: Tensor, key: Tensor, value: Tensor, *, return_softmax_lse: bool = False, **_: object) -> tuple[Tensor, Tensor]:
    lse_shape = query.shape[:2] if return_softmax_lse else (0,)
    out = torch.empty((*query.shape[:2], value.shape[-1]), dtype=query.dtype, device=query.device)
    return out, torch.empty(lse_shape, dtype=torch.float32, device=query.device)


# Batches as (query length, key length) pairs: one decode; decodes around a block edge; one prefill; a chunk with
# context; decode and prefill mixed with a one-token tail; a request with no keys between two others.
_BATCHES = {
    "decode": [(1, 1)],
    "decodes": [(1, 15), (1, 16), (1, 17), (1, 130)],
    "prefill": [(33, 33)],
    "chunk": [(7, 40), (16, 16)],
    "mixed": [(1, 50), (1, 3), (20, 20), (5, 64), (1, 33)],
    "holes": [(2, 5), (0, 0), (3, 0), (0, 9), (4, 4)],
}
# Head counts, head dim and block size (0 for contiguous keys) that each batch is seen with in turn.
_SHAPES = [(4, 2, 64, 16), (3, 3, 80, 48), (8, 1, 96, 0), (4, 4, 128, 256), (2, 1, 192, 16), (6, 2, 256, 0)]
_MASKS: list[dict[str, int]] = [
    {"sparse_mode": SPARSE_CAUSAL},
    {"sparse_mode": SPARSE_NONE},
    {"sparse_mode": SPARSE_BAND, "pre_tokens": 6, "next_tokens": 0},
]


def build_case(
    name: str,
    batch: Sequence[tuple[int, int]],
    shape: tuple[int, int, int, int],
    options: dict[str, object],
    device: str,
    dtype: torch.dtype,
    seed: int,
    value_dim: int = 0,
) -> OpCase:
    """Random tensors for one batch of (query length, key length) pairs; ``options`` are further keyword arguments.

    ``shape`` is (query heads, KV heads, head dim, block size or 0 for contiguous keys); contiguous values may have a
    ``value_dim`` of their own. Blocks are shuffled, the table has
    spare columns that name block 0, and cache rows that belong to no request hold NaN, so that reading one is seen.
    """
    heads, kv_heads, dim, block_size = shape
    generator = torch.Generator().manual_seed(seed)
    qlens, kvlens = [q for q, _ in batch], [k for _, k in batch]

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    query, table = normal(sum(qlens), heads, dim), None
    if block_size:
        counts = [math.ceil(k / block_size) for k in kvlens]
        ids = torch.randperm(sum(counts), generator=generator) + 1
        table = torch.zeros(len(batch), max(counts) + 2, dtype=torch.int32)
        key = torch.full((sum(counts) + 1, block_size, kv_heads, dim), math.nan, dtype=dtype)
        value = key.clone()
        for row, (count, blocks) in enumerate(zip(counts, torch.split(ids, counts), strict=True)):
            table[row, :count] = blocks
            for cache in (key, value):
                rows = cache[blocks].flatten(0, 1)
                rows[: kvlens[row]] = normal(kvlens[row], kv_heads, dim)
                cache[blocks] = rows.view(count, block_size, kv_heads, dim)
        table = table.to(device)
    else:
        key, value = normal(sum(kvlens), kv_heads, dim), normal(sum(kvlens), kv_heads, value_dim or dim)
    qsum, ksum = torch.tensor(qlens).cumsum(0).tolist(), torch.tensor(kvlens).cumsum(0).tolist()
    kwargs = {
        "actual_seq_qlen": qsum,
        "actual_seq_kvlen": kvlens if block_size else ksum,
        "query_start_loc": torch.tensor([0, *qsum], dtype=torch.int32, device=device),
        "seq_lens": torch.tensor(kvlens, dtype=torch.int32, device=device),
        "num_query_heads": heads,
        "num_key_value_heads": kv_heads,
        "softmax_scale": dim**-0.5,
        "block_table": table,
        "block_size": block_size,
        "return_softmax_lse": True,
        **options,
    }
    return OpCase(name, (query.to(device), key.to(device), value.to(device)), kwargs)


def build_latent_case(
    name: str,
    batch: Sequence[tuple[int, int]],
    heads: int,
    block_size: int,
    options: dict[str, object],
    device: str,
    dtype: torch.dtype,
    seed: int,
) -> OpCase:
    """The same for the absorbed form of MLA; the two parts of a query are views of one tensor, as a model may have them."""
    shape = (heads, 1, LATENT_DIM + ROPE_DIM, block_size)
    whole = build_case(name, batch, shape, options, device, dtype, seed)
    (query, query_rope), (key, key_rope) = (x.split((LATENT_DIM, ROPE_DIM), -1) for x in whole.args[:2])
    latent = key.contiguous()
    # Scaled as before the absorption, when a head had 128 + 64 dims.
    parts = {"query_rope": query_rope, "key_rope": key_rope.contiguous(), "softmax_scale": MHA_DIMS[0] ** -0.5}
    return OpCase(name, (query, latent, latent), {**whole.kwargs, **parts, **options})


# Decodes around block edges; several rows that see one more key each, between empty requests; all heads of a large model;
# rows of mode 0, which see every key.
_LATENT: list[tuple[str, list[tuple[int, int]], int, int, int]] = [
    ("decodes", [(1, 15), (1, 16), (1, 17), (1, 127), (1, 128), (1, 129)], 16, 128, SPARSE_NONE),
    ("rows", [(2, 5), (0, 0), (3, 0), (0, 9), (4, 4), (16, 33), (3, 2)], 3, 16, SPARSE_CAUSAL),
    ("one-head", [(1, 1), (1, 40)], 1, 16, SPARSE_CAUSAL),
    ("wide", [(1, 70), (2, 20)], 128, 128, SPARSE_CAUSAL),
    ("all-keys", [(3, 20), (0, 0), (1, 9)], 2, 128, SPARSE_NONE),
]


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    sinks = torch.linspace(-2.0, 2.0, 16)
    for turn, (name, batch) in enumerate((n, b) for n, b in _BATCHES.items() for _ in range(3)):
        shape, mask = _SHAPES[turn % len(_SHAPES)], _MASKS[turn % 3]
        options: dict[str, object] = dict(mask)
        if turn % 2:
            options["learnable_sink"] = sinks[: shape[0]].to(device)
        label = f"{name}-h{shape[0]}k{shape[1]}d{shape[2]}b{shape[3]}-mask{mask['sparse_mode']}{'-sink' if turn % 2 else ''}"
        yield build_case(label, batch, shape, options, device, dtype, seed + turn)
    for mode, name in ((SPARSE_CAUSAL, "chunk"), (SPARSE_NONE, "holes")):
        shape = (4, 4, MHA_DIMS[0], 0)
        options = {"sparse_mode": mode}
        yield build_case(f"mha-{name}-mask{mode}", _BATCHES[name], shape, options, device, dtype, seed, MHA_DIMS[1])
    for name, batch, heads, block_size, mode in _LATENT:
        label = f"latent-{name}-h{heads}b{block_size}-mask{mode}"
        yield build_latent_case(label, batch, heads, block_size, {"sparse_mode": mode}, device, dtype, seed)


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor query, Tensor key, Tensor value, *, SymInt[] actual_seq_qlen, SymInt[] actual_seq_kvlen,"
        " Tensor query_start_loc, Tensor seq_lens, int num_query_heads, int num_key_value_heads, float softmax_scale,"
        " Tensor? block_table=None, int block_size=0, int sparse_mode=0, int pre_tokens=2147483647,"
        " int next_tokens=2147483647, Tensor? learnable_sink=None, Tensor? query_rope=None, Tensor? key_rope=None,"
        " bool return_softmax_lse=False) -> (Tensor, Tensor)",
        reference=reference.fused_infer_attention,
        fake=_fake,
        cases=_cases,
        # fp32: sums of up to 576 products; 16 bit: one rounding of values around 1, after fp32 sums.
        tolerance={
            torch.float32: Tolerance(8e-6, 2e-5),
            torch.float16: Tolerance(2e-3, 4e-3),
            torch.bfloat16: Tolerance(1e-2, 2e-2),
        },
    )
)
