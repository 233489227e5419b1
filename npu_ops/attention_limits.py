"""What npu_ops.fused_infer_attention takes, and the refusal of everything else: the limits of CANN on every device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from npu_ops.contract import require

OP = "fused_infer_attention"

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BLOCK_SIZES = tuple(range(16, 257, 16))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# CANN: at most 64 query heads to a KV head, at most 256 query heads, at most 4096 lengths.
MAX_HEAD_RATIO, MAX_HEADS, MAX_REQUESTS = 64, 256, 4096
# The absorbed form of MLA: dims of the latent and of the rope part, and CANN's limits for it.
LATENT_DIM, ROPE_DIM = 512, 64
LATENT_BLOCK_SIZES = (16, 128)
LATENT_MAX_HEADS, LATENT_MAX_ROWS = 128, 16
# The one pair of key and value dims that differ, in the form of MLA that is plain multi-head attention.
MHA_DIMS = (192, 128)
SPARSE_NONE, SPARSE_CAUSAL, SPARSE_BAND = 0, 3, 4


def validate_tensors(query: Tensor, key: Tensor, value: Tensor, heads: int, kv_heads: int) -> None:
    """Tensors of every form but the absorbed one."""
    _validate_query(query, heads)
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
    narrow = key.dim() == 3 and key.shape[:-1] == value.shape[:-1] and (key.shape[-1], value.shape[-1]) == MHA_DIMS
    require(
        key.shape == value.shape or narrow,
        OP,
        "key and value of one shape, or packed keys of 192 with values of 128,",
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


def _validate_query(query: Tensor, heads: int) -> None:
    require(query.dtype in DTYPES, OP, "a bf16, fp16 or fp32 query", query.dtype, "Cast the query.")
    require(query.dim() == 3, OP, "a query [T, N, D]", tuple(query.shape), "Pack the tokens of all requests.")
    require(
        query.shape[1] == heads <= MAX_HEADS,
        OP,
        f"num_query_heads equal to the query's heads, at most {MAX_HEADS},",
        f"{heads} for {query.shape[1]} heads",
        "Pass the heads of this rank.",
    )


def validate_latent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    heads: int,
    kv_heads: int,
    block_table: Tensor | None,
    block_size: int,
) -> None:
    """The tensors of the absorbed form; validate_latent_rows looks at the rest of the call."""
    if query_rope is None or key_rope is None:
        got = "only query_rope" if key_rope is None else "only key_rope"
        require(False, OP, "query_rope and key_rope together, or neither,", got, "Pass the rope parts of queries and keys.")
        return
    _validate_query(query, heads)
    require(
        query.shape[2] == LATENT_DIM and query_rope.shape == (*query.shape[:2], ROPE_DIM),
        OP,
        f"a query [T, N, {LATENT_DIM}] with a query_rope [T, N, {ROPE_DIM}]",
        f"{tuple(query.shape)} with {tuple(query_rope.shape)}",
        "Absorb the up-projection of the keys into the query.",
    )
    require(
        block_table is not None and block_size in LATENT_BLOCK_SIZES,
        OP,
        "a paged latent cache with a block size of 16 or 128",
        f"{block_size} with{'' if block_table is not None else 'out'} a block table",
        "Start vLLM with --block-size 128.",
    )
    rows = (key.shape[0], block_size, 1)
    right = key.shape == value.shape == (*rows, LATENT_DIM) and key_rope.shape == (*rows, ROPE_DIM)
    require(
        right and kv_heads == 1,
        OP,
        f"a latent cache [blocks, {block_size}, 1, {LATENT_DIM}] as key and value, key_rope [..., {ROPE_DIM}] and one KV head",
        f"{tuple(key.shape)}, {tuple(value.shape)}, {tuple(key_rope.shape)} and {kv_heads}",
        "Pass the latent cache as key and as value, and the rope cache.",
    )
    dtypes = [x.dtype for x in (query_rope, key, value, key_rope)]
    require(
        set(dtypes) == {query.dtype},
        OP,
        f"rope parts, key and value of {query.dtype}",
        ", ".join(map(str, dtypes)),
        "Give all five tensors one dtype.",
    )
    require(
        key.is_contiguous() and value.is_contiguous() and key_rope.is_contiguous(),
        OP,
        "contiguous latent and rope caches",
        f"strides {key.stride()}, {value.stride()} and {key_rope.stride()}",
        "Keep latent and rope parts in separate contiguous tensors.",
    )
    require(
        heads <= LATENT_MAX_HEADS,
        OP,
        f"at most {LATENT_MAX_HEADS} heads over a latent cache",
        heads,
        "Raise the tensor parallel size.",
    )


def validate_latent_rows(mode: int, sink: Tensor | None, qlen: Sequence[int]) -> None:
    """Mask and query rows of the absorbed form."""
    require(
        mode in (SPARSE_NONE, SPARSE_CAUSAL) and sink is None,
        OP,
        "sparse_mode 0 or 3 and no sink over a latent cache",
        f"{mode} with{'out' if sink is None else ''} a sink",
        "Use another backend for windows and sinks.",
    )
    rows = max(b - a for a, b in pairwise((0, *qlen)))
    require(
        rows <= LATENT_MAX_ROWS,
        OP,
        f"at most {LATENT_MAX_ROWS} query rows to a request over a latent cache",
        rows,
        "Up-project the keys and attend to them as contiguous heads of 192.",
    )


def validate_mask(mode: int, pre: int, after: int, sink: Tensor | None, query: Tensor, heads: int) -> None:
    """Mask and sink."""
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


def validate_lengths(query: Tensor, qlen: Sequence[int], kvlen: Sequence[int], start: Tensor, lens: Tensor) -> None:
    """Lengths on the host and on the device."""
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


def validate_cache(key: Tensor, block_table: Tensor | None, block_size: int, kvlen: Sequence[int]) -> None:
    """Keys, paged or not, against the lengths."""
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
