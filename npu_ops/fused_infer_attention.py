"""Attention over packed tokens with a paged or contiguous KV (FIA), for prefill, decode and anything between.

Ascend op: ``torch_npu.npu_fused_infer_attention_score_v2`` with input layout TND; names and meanings are its own.
Two arguments are ours: ``query_start_loc`` and ``seq_lens`` repeat the lengths as device tensors, because CUDA kernels
read them there without waiting for the host, while Ascend's op wants host lists. An argument of Ascend's op that is
not here is not supported; the compressed 2048 x 2048 mask is made by the Ascend mapping itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from npu_ops.contract import OpCase, OpContract, Tolerance, register, require
from npu_ops.reference import fused_infer_attention as reference

OP = "fused_infer_attention"

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BLOCK_SIZES = tuple(range(16, 257, 16))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# CANN: at most 64 query heads to a KV head, at most 256 query heads, at most 4096 lengths.
MAX_HEAD_RATIO, MAX_HEADS, MAX_REQUESTS = 64, 256, 4096
# CANN's spelling of "no limit" for pre_tokens and next_tokens.
UNLIMITED = 2147483647

SPARSE_NONE, SPARSE_CAUSAL, SPARSE_BAND = 0, 3, 4


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
    sparse_mode: int = SPARSE_NONE,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    learnable_sink: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of every request's new tokens over its keys: ``softmax(scale * Q K^T + mask) V``.

    A request with ``q`` query rows and ``k`` keys is aligned at the right-down corner: row ``i`` sits at key position
    ``p = k - q + i``. ``sparse_mode`` 0 lets it see every key, 3 the keys ``j <= p`` (causal), 4 the band
    ``p - pre_tokens <= j <= p + next_tokens``; both ends are included, so a sliding window of ``W`` tokens (itself
    among them) is ``pre_tokens = W - 1, next_tokens = 0``.

    Args:
        query: [T, N, D] bf16, fp16 or fp32; D one of 64, 80, 96, 128, 192, 256. Rows past the last request are
            padding: their output is 0, their LSE -inf.
        key: paged [blocks, block_size, N_kv, D] or contiguous packed [T_kv, N_kv, D], the dtype of ``query``; contiguous.
        value: the shape and dtype of ``key``; contiguous.
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
        pre_tokens: keys before the row's own position that it sees; read for sparse_mode 4 only.
        next_tokens: keys after the row's own position that it sees; read for sparse_mode 4 only.
        learnable_sink: [N], one extra logit to each head that takes part in the softmax and has no value.
        return_softmax_lse: whether the second result is filled.

    Returns:
        The output [T, N, D] in the dtype of ``query``, and the natural-log LSE [T, N] fp32 (the sink is part of it; shape
        [0] when not asked for). A row that sees no key gives output 0; its LSE is -inf, or the sink's logit.

    Raises:
        ContractError: for whatever CANN would refuse, on every device.
    """
    _validate_tensors(query, key, value, num_query_heads, num_key_value_heads)
    _validate_mask(sparse_mode, pre_tokens, next_tokens, learnable_sink, query, num_query_heads)
    _validate_lengths(query, actual_seq_qlen, actual_seq_kvlen, query_start_loc, seq_lens)
    _validate_cache(key, block_table, block_size, actual_seq_kvlen)
    return _contract.op(  # type: ignore[no-any-return]
        query,
        key,
        value,
        actual_seq_qlen=actual_seq_qlen,
        actual_seq_kvlen=actual_seq_kvlen,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        num_query_heads=num_query_heads,
        num_key_value_heads=num_key_value_heads,
        softmax_scale=softmax_scale,
        block_table=block_table,
        block_size=block_size,
        sparse_mode=sparse_mode,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        learnable_sink=learnable_sink,
        return_softmax_lse=return_softmax_lse,
    )


def _validate_tensors(query: Tensor, key: Tensor, value: Tensor, heads: int, kv_heads: int) -> None:
    require(query.dtype in DTYPES, OP, "a bf16, fp16 or fp32 query", query.dtype, "Cast the query.")
    require(query.dim() == 3, OP, "a query [T, N, D]", tuple(query.shape), "Pack the tokens of all requests.")
    require(
        query.shape[-1] in HEAD_DIMS,
        OP,
        f"a head dim of {HEAD_DIMS}",
        query.shape[-1],
        "Pad the heads to the next one, or use another backend for this model.",
    )
    require(
        key.dtype == query.dtype and value.dtype == query.dtype,
        OP,
        f"key and value of {query.dtype}",
        f"{key.dtype} and {value.dtype}",
        "Give query, key and value one dtype.",
    )
    require(
        key.shape == value.shape,
        OP,
        "key and value of one shape",
        f"{tuple(key.shape)} and {tuple(value.shape)}",
        "Split K and V into tensors of their own.",
    )
    require(
        key.is_contiguous() and value.is_contiguous(),
        OP,
        "contiguous key and value",
        f"strides {key.stride()} and {value.stride()}",
        "Keep K and V in separate contiguous tensors.",
    )
    require(
        query.shape[1] == heads <= MAX_HEADS,
        OP,
        f"num_query_heads equal to the query's heads, at most {MAX_HEADS},",
        f"{heads} for {query.shape[1]} heads",
        "Pass the heads of this rank.",
    )
    require(
        key.shape[-2] == kv_heads and key.shape[-1] == query.shape[-1],
        OP,
        f"a key [..., num_key_value_heads={kv_heads}, D={query.shape[-1]}]",
        tuple(key.shape),
        "Pass the KV heads of this rank.",
    )
    require(
        kv_heads > 0 and heads % kv_heads == 0 and heads // kv_heads <= MAX_HEAD_RATIO,
        OP,
        f"a whole number of query heads to a KV head, at most {MAX_HEAD_RATIO},",
        f"{heads} to {kv_heads}",
        "Choose a tensor parallel size that divides the KV heads.",
    )


def _validate_mask(mode: int, pre: int, after: int, sink: Tensor | None, query: Tensor, heads: int) -> None:
    require(
        mode in (SPARSE_NONE, SPARSE_CAUSAL, SPARSE_BAND),
        OP,
        "sparse_mode 0, 3 or 4",
        mode,
        "Use 3 for causal attention, 4 with pre_tokens for a sliding window.",
    )
    require(
        pre >= 0 and after >= 0,
        OP,
        "pre_tokens and next_tokens of at least 0",
        f"{pre} and {after}",
        "A window always holds the row's own position.",
    )
    if sink is not None:
        right = sink.shape == (heads,) and sink.dtype in (query.dtype, torch.float32)
        require(
            right,
            OP,
            f"a sink of shape ({heads},) in {query.dtype} or torch.float32",
            f"{tuple(sink.shape)} in {sink.dtype}",
            "Pass the sinks of this rank's heads.",
        )


def _validate_lengths(query: Tensor, qlen: Sequence[int], kvlen: Sequence[int], start: Tensor, lens: Tensor) -> None:
    count = len(qlen)
    require(
        0 < count <= MAX_REQUESTS and len(kvlen) == count,
        OP,
        f"1 to {MAX_REQUESTS} lengths, as many of keys as of queries",
        f"{count} and {len(kvlen)}",
        "Pass one pair of lengths to a request.",
    )
    require(
        all(a <= b for a, b in pairwise((0, *qlen))) and qlen[-1] <= query.shape[0],
        OP,
        f"cumulative query lengths up to {query.shape[0]}",
        list(qlen[-4:]),
        "Cumulate the lengths, without a leading 0.",
    )
    right = start.dtype == lens.dtype == torch.int32 and start.shape == (count + 1,) and lens.shape == (count,)
    require(
        right,
        OP,
        f"int32 query_start_loc [{count + 1}] and seq_lens [{count}]",
        f"{start.dtype} {tuple(start.shape)} and {lens.dtype} {tuple(lens.shape)}",
        "Pass the device copies of the same lengths.",
    )


def _validate_cache(key: Tensor, block_table: Tensor | None, block_size: int, kvlen: Sequence[int]) -> None:
    if block_table is None:
        require(
            block_size == 0 and key.dim() == 3,
            OP,
            "a packed key [T_kv, N_kv, D] and block_size 0 without a block table",
            f"{tuple(key.shape)} and {block_size}",
            "Pass the block table of a paged cache.",
        )
        require(
            all(a <= b for a, b in pairwise((0, *kvlen))) and kvlen[-1] <= key.shape[0],
            OP,
            f"cumulative key lengths up to {key.shape[0]}",
            list(kvlen[-4:]),
            "Contiguous keys want cumulative lengths, without a leading 0.",
        )
        return
    require(
        block_size in BLOCK_SIZES,
        OP,
        "a block size of 16 to 256 in steps of 16",
        block_size,
        "Start vLLM with --block-size 128.",
    )
    require(
        key.dim() == 4 and key.shape[1] == block_size,
        OP,
        f"a paged key [blocks, {block_size}, N_kv, D]",
        tuple(key.shape),
        "View the cache in blocks.",
    )
    longest = math.ceil(max(kvlen) / block_size)
    right = block_table.dtype == torch.int32 and block_table.dim() == 2 and block_table.shape[0] >= len(kvlen)
    require(
        right and block_table.shape[1] >= longest,
        OP,
        f"an int32 block table of at least [{len(kvlen)}, {longest}]",
        f"{block_table.dtype} {tuple(block_table.shape)}",
        "Pass the block table of the same requests.",
    )
    require(min(kvlen) >= 0, OP, "key lengths of at least 0", min(kvlen), "Paged keys want one length to a request.")


def _fake(query: Tensor, key: Tensor, value: Tensor, *, return_softmax_lse: bool = False, **_: object) -> tuple[Tensor, Tensor]:
    lse_shape = query.shape[:2] if return_softmax_lse else (0,)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
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
) -> OpCase:
    """Random tensors for one batch of (query length, key length) pairs; ``options`` are further keyword arguments.

    ``shape`` is (query heads, KV heads, head dim, block size or 0 for contiguous keys). Blocks are shuffled, the table has
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
        key, value = normal(sum(kvlens), kv_heads, dim), normal(sum(kvlens), kv_heads, dim)
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


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    sinks = torch.linspace(-2.0, 2.0, 16)
    for turn, (name, batch) in enumerate((n, b) for n, b in _BATCHES.items() for _ in range(3)):
        shape, mask = _SHAPES[turn % len(_SHAPES)], _MASKS[turn % 3]
        options: dict[str, object] = dict(mask)
        if turn % 2:
            options["learnable_sink"] = sinks[: shape[0]].to(device)
        label = f"{name}-h{shape[0]}k{shape[1]}d{shape[2]}b{shape[3]}-mask{mask['sparse_mode']}{'-sink' if turn % 2 else ''}"
        yield build_case(label, batch, shape, options, device, dtype, seed + turn)


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor query, Tensor key, Tensor value, *, SymInt[] actual_seq_qlen, SymInt[] actual_seq_kvlen,"
        " Tensor query_start_loc, Tensor seq_lens, int num_query_heads, int num_key_value_heads, float softmax_scale,"
        " Tensor? block_table=None, int block_size=0, int sparse_mode=0, int pre_tokens=2147483647,"
        " int next_tokens=2147483647, Tensor? learnable_sink=None, bool return_softmax_lse=False) -> (Tensor, Tensor)",
        reference=reference.fused_infer_attention,
        fake=_fake,
        cases=_cases,
        # fp32: sums of up to a few hundred products; 16 bit: one rounding of values around 1, after fp32 sums.
        tolerance={
            torch.float32: Tolerance(2e-6, 2e-5),
            torch.float16: Tolerance(2e-3, 4e-3),
            torch.bfloat16: Tolerance(1e-2, 2e-2),
        },
    )
)
