"""Attention of every query row over the keys that its indices name, on a paged latent cache (DSA; DeepSeek-AI, 2025).

Ascend op: ``torch_npu.npu_sparse_flash_attention`` in attention mode 2 (absorbed MLA: one latent row is key and value of all
heads) with layouts TND and PA_BSND. There the LSE comes as a maximum and a sum; here it is one tensor, as in
fused_infer_attention. All lengths are device tensors: nothing waits for the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from npu_ops.attention_limits import DTYPES, LATENT_DIM, ROPE_DIM, SPARSE_CAUSAL, SPARSE_NONE
from npu_ops.contract import OpCase, OpContract, Tolerance, register, require
from npu_ops.reference import sparse_flash_attention as reference

OP = "sparse_flash_attention"
# CANN: 32 bytes of 16-bit slots.
SLOTS = 16
# fp32: sums of up to 576 products; 16 bit: one rounding of values around 1, after fp32 sums.
TOLERANCE = {
    torch.float32: Tolerance(8e-6, 2e-5),
    torch.float16: Tolerance(2e-3, 4e-3),
    torch.bfloat16: Tolerance(1e-2, 2e-2),
}
__all__ = ["SPARSE_CAUSAL", "SPARSE_NONE", "TOLERANCE", "build_sparse_case", "sparse_flash_attention", "validate_sparse"]


def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    sparse_indices: Tensor,
    *,
    scale_value: float,
    query_rope: Tensor,
    key_rope: Tensor,
    block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    sparse_mode: int,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """``softmax(scale * (Q K^T + Q_rope K_rope^T)) K`` over the named keys; one latent row is key and value of all heads.

    A request with ``q`` rows and ``k`` keys is aligned at the right-down corner: row ``i`` sits at key position
    ``k - q + i``. ``sparse_mode`` 3 hides indices past that position, 0 only those that are no key (``>= k``).

    Args:
        query: [T, N, 512] bf16, fp16 or fp32, any strides. Rows past the last request are padding: output 0, LSE -inf.
        key: latent cache [blocks, block_size, 1, 512], the dtype of ``query``; contiguous; block_size a multiple of 16. It is
            the value too. Rows that are not named are not read; offsets are right past 2^31 elements.
        sparse_indices: int32 [T, 1, K]: key positions within the row's request, distinct and ascending, then -1 to the end.
        scale_value: factor on the scores.
        query_rope: [T, N, 64], the dtype of ``query``, any strides.
        key_rope: rope cache [blocks, block_size, 1, 64], the dtype of ``query``; contiguous.
        block_table: int32 [>= B, blocks of the longest request], any strides between rows.
        actual_seq_lengths_query: int32 [B], cumulative query lengths without a leading 0.
        actual_seq_lengths_kv: int32 [B], keys of each request; 0 is allowed.
        sparse_mode: 0 or 3, see above.
        return_softmax_lse: whether the second result is filled.

    Returns:
        The output [T, N, 512] in the dtype of ``query``, and the natural-log LSE [T, N] fp32 ([0] when not asked for). A row
        that sees no key has output 0 and LSE -inf.

    Raises:
        ContractError: if a shape or dtype does not fit. Indices, lengths and blocks are device data and are not checked.
    """
    tokens, heads = query.shape[:2] if query.dim() == 3 else (0, 0)
    right = query.shape == (tokens, heads, LATENT_DIM) and query_rope.shape == (tokens, heads, ROPE_DIM) and heads > 0
    require(right, OP, f"a query [T, N, {LATENT_DIM}] with a query_rope [T, N, {ROPE_DIM}]",
            f"{tuple(query.shape)} with {tuple(query_rope.shape)}",
            "Absorb the up-projection of the keys into the query.")  # fmt: skip
    dtypes = [x.dtype for x in (query, query_rope, key, key_rope)]
    require(len(set(dtypes)) == 1 and query.dtype in DTYPES, OP, "bf16, fp16 or fp32 alike in queries and caches",
            ", ".join(map(str, dtypes)), "Give all four tensors one dtype.")  # fmt: skip
    rows = (*key.shape[:2], 1)
    require(key.shape == (*rows, LATENT_DIM) and key_rope.shape == (*rows, ROPE_DIM), OP,
            f"caches [blocks, block_size, 1, {LATENT_DIM}] and [blocks, block_size, 1, {ROPE_DIM}]",
            f"{tuple(key.shape)} and {tuple(key_rope.shape)}", "View the layer's two cache regions in blocks.")  # fmt: skip
    require(key.is_contiguous() and key_rope.is_contiguous(), OP, "contiguous caches",
            f"strides {key.stride()} and {key_rope.stride()}",
            "Keep latent and rope parts in separate contiguous tensors.")  # fmt: skip
    validate_sparse(
        OP, tokens, key.shape[1], sparse_indices, block_table, actual_seq_lengths_query, actual_seq_lengths_kv, sparse_mode
    )
    return _contract.op(  # type: ignore[no-any-return]
        query, key, sparse_indices, scale_value=scale_value, query_rope=query_rope, key_rope=key_rope, block_table=block_table,
        actual_seq_lengths_query=actual_seq_lengths_query, actual_seq_lengths_kv=actual_seq_lengths_kv,
        sparse_mode=sparse_mode, return_softmax_lse=return_softmax_lse,
    )  # fmt: skip


def validate_sparse(
    op: str,
    tokens: int,
    block_size: int,
    indices: Tensor,
    block_table: Tensor,
    query_lengths: Tensor,
    key_lengths: Tensor,
    sparse_mode: int,
) -> None:
    """What attention over named keys requires beside its queries and caches."""
    right = indices.dim() == 3 and indices.shape[:2] == (tokens, 1) and indices.shape[2] > 0
    require(right and indices.dtype == torch.int32, op, f"int32 sparse_indices [{tokens}, 1, K]",
            f"{indices.dtype} {tuple(indices.shape)}", "Pass the indexer's result, one list to a token.")  # fmt: skip
    require(block_size > 0 and block_size % SLOTS == 0, op, f"a block_size that is a multiple of {SLOTS}", block_size,
            "Start vLLM with --block-size 128.")  # fmt: skip
    right = query_lengths.dim() == 1 and query_lengths.shape == key_lengths.shape and len(query_lengths) > 0
    require(right and query_lengths.dtype == key_lengths.dtype == torch.int32, op,
            "int32 actual_seq_lengths_query and actual_seq_lengths_kv [B]",
            f"{query_lengths.dtype} {tuple(query_lengths.shape)} and {key_lengths.dtype} {tuple(key_lengths.shape)}",
            "Pass one length of each kind to a request, on the device.")  # fmt: skip
    right = block_table.dim() == 2 and block_table.dtype == torch.int32 and block_table.shape[0] >= len(query_lengths)
    require(right and block_table.shape[1] > 0, op, f"an int32 block table of at least [{len(query_lengths)}, 1]",
            f"{block_table.dtype} {tuple(block_table.shape)}", "Pass the block table of the same requests.")  # fmt: skip
    require(sparse_mode in (SPARSE_NONE, SPARSE_CAUSAL), op, "sparse_mode 0 or 3", sparse_mode,
            "Use 3 for causal attention, 0 where the indices are causal already.")  # fmt: skip


def _fake(query: Tensor, *_: object, return_softmax_lse: bool = False, **__: object) -> tuple[Tensor, Tensor]:
    lse_shape = query.shape[:2] if return_softmax_lse else (0,)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return out, torch.empty(lse_shape, dtype=torch.float32, device=query.device)


# Batches as (query length, key length) pairs: decodes around a block edge; a chunk between requests without rows or keys, and
# one with more rows than keys; two prefills from the first key on.
_BATCHES = {
    "decodes": [(1, 1), (1, 15), (1, 16), (1, 17), (1, 130)],
    "holes": [(2, 5), (0, 0), (3, 0), (0, 9), (4, 40), (5, 3)],
    "prefill": [(20, 20), (9, 33)],
}
# Batch, heads, K, block size, mode, padding rows.
_SHAPES = {
    "decodes": ("decodes", 16, 64, 128, SPARSE_CAUSAL, 3),
    "holes": ("holes", 3, 7, 16, SPARSE_CAUSAL, 0),
    "one": ("holes", 1, 1, 16, SPARSE_NONE, 1),
    "odd": ("prefill", 20, 33, 48, SPARSE_CAUSAL, 2),
    "wide": ("decodes", 128, 40, 128, SPARSE_NONE, 0),
}


def build_sparse_case(
    name: str,
    batch: Sequence[tuple[int, int]],
    heads: int,
    count: int,
    block_size: int,
    options: dict[str, object],
    device: str,
    dtype: torch.dtype,
    seed: int,
    padding: int = 0,
) -> OpCase:
    """Random tensors for one batch of (query length, key length) pairs, each row with ``count`` indices.

    Some indices lie past the row's position, and past the request's keys; where a row has too few, -1 follows. Blocks are
    shuffled, spare columns of the table name block 0, and cache rows of no request hold NaN, as do padding queries.
    """
    generator = torch.Generator().manual_seed(seed)
    qlens, kvlens = [q for q, _ in batch], [k for _, k in batch]
    counts = [math.ceil(k / block_size) for k in kvlens]
    table = torch.zeros(len(batch), max(counts) + 1 + math.ceil(8 / block_size), dtype=torch.int32)
    caches = [torch.full((sum(counts) + 1, block_size, 1, width), math.nan, dtype=dtype) for width in (LATENT_DIM, ROPE_DIM)]
    ids = torch.randperm(sum(counts), generator=generator) + 1
    for row, blocks in enumerate(torch.split(ids, counts)):
        table[row, : len(blocks)] = blocks
        for cache in caches:
            rows = cache[blocks].flatten(0, 1)
            rows[: kvlens[row]] = torch.randn(kvlens[row], 1, cache.shape[3], generator=generator).to(dtype)
            cache[blocks] = rows.view(len(blocks), *cache.shape[1:])
    indices = torch.full((sum(qlens) + padding, 1, count), -1, dtype=torch.int32)
    keys = [kvlen for qlen, kvlen in batch for _ in range(qlen)]
    for picked, kvlen in zip(indices[:, 0], keys, strict=False):
        drawn = torch.randperm(kvlen + 8, generator=generator)[:count].sort().values
        picked[: len(drawn)] = drawn
    indices[sum(qlens) :] = 0
    query = torch.randn(sum(qlens) + padding, heads, LATENT_DIM + ROPE_DIM, generator=generator).to(dtype)
    query[sum(qlens) :] = math.nan
    latent, rope = query.to(device).tensor_split((LATENT_DIM,), -1)
    kwargs = {
        "scale_value": 192**-0.5,  # as before the absorption, when a head had 128 + 64 dims
        "query_rope": rope,
        "key_rope": caches[1].to(device),
        "block_table": table.to(device),
        "actual_seq_lengths_query": torch.tensor(qlens, device=device).cumsum(0).int(),
        "actual_seq_lengths_kv": torch.tensor(kvlens, dtype=torch.int32, device=device),
        "sparse_mode": SPARSE_CAUSAL,
        "return_softmax_lse": True,
        **options,
    }
    return OpCase(name, (latent, caches[0].to(device), indices.to(device)), kwargs)


def sparse_cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """The generated cases of every form of the op."""
    for turn, (name, (batch, heads, count, block_size, mode, padding)) in enumerate(_SHAPES.items()):
        options: dict[str, object] = {"sparse_mode": mode, "return_softmax_lse": name != "wide"}
        yield build_sparse_case(name, _BATCHES[batch], heads, count, block_size, options, device, dtype, seed + turn, padding)


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor query, Tensor key, Tensor sparse_indices, *, float scale_value, Tensor query_rope, Tensor key_rope,"
        " Tensor block_table, Tensor actual_seq_lengths_query, Tensor actual_seq_lengths_kv, int sparse_mode,"
        " bool return_softmax_lse=False) -> (Tensor, Tensor)",
        reference=reference.sparse_flash_attention,
        fake=_fake,
        cases=sparse_cases,
        tolerance=TOLERANCE,
    )
)
