"""Rules of npu_fused_infer_attention_score and its second version; see rules.py.

Left out are rules of the documents that the kernels are known not to follow: layout TND for bf16 and head dims 128 and 192
alone, query lengths below the key lengths in sparse mode 3, and a cache with a block of its own for every block of every
request, which shared prefixes need not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from npu_ops.virtual_npu.rules import INT32_MAX, Broken, rule, scattered, unless

FIA = "torch_npu doc of npu_fused_infer_attention_score(_v2)"
ATTENTION = ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2")
MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)


def _layout(call: Any) -> str:
    """Layout of the inputs; "BNSD_NBSD" and its like name that of the output behind it."""
    return str(call.input_layout).partition("_")[0]


def _query_dims(call: Any) -> tuple[int, int]:
    """Heads and head dim of the query."""
    shape, layout = call.query.shape, _layout(call)
    if layout == "BSH":
        return call.num_query_heads, shape[-1] // call.num_query_heads
    return shape[{"TND": 1, "BSND": 2, "BNSD": 1, "NTD": 0}[layout]], shape[-1]


def _longest(call: Any) -> int:
    """Most query rows of one request: more than one takes CANN's prompt branch."""
    layout = _layout(call)
    if layout in ("TND", "NTD"):
        return max((b - a for a, b in pairwise((0, *call.actual_seq_qlen))), default=0)
    return int(call.query.shape[2 if layout == "BNSD" else 1])


def _tokens(tensor: Tensor, layout: str) -> int:
    return int(tensor.shape[0 if layout == "TND" else 1])


def _kv_heads(call: Any) -> int:
    return int(call.num_key_value_heads or call.num_query_heads)


def _packed(call: Any) -> bool:
    return _layout(call) in ("TND", "NTD")


def _latent(call: Any) -> bool:
    """The absorbed form of MLA: rope parts beside a latent of 512 dims."""
    return call.query_rope is not None and call.key_rope is not None and _query_dims(call)[1] == 512


def attention_rule(text: str) -> Callable[[Broken], Broken]:
    """A rule of both versions."""
    return rule(text, FIA, *ATTENTION)


@attention_rule("query, key, value, mask and rope parts contiguous")
def _attention_contiguous(c: Any) -> object:
    return scattered(c, "query", "key", "value", "atten_mask", "query_rope", "key_rope")


@attention_rule("num_query_heads to be the query's heads, at most 256")
def _query_heads(c: Any) -> object:
    heads = _query_dims(c)[0]
    return unless(heads == c.num_query_heads <= 256, f"{c.num_query_heads} for {heads} heads")


@attention_rule("a whole number of query heads to a key head, at most 64 but with rope parts and 512 dims")
def _head_ratio(c: Any) -> object:
    heads, kv_heads = c.num_query_heads, _kv_heads(c)
    return unless(heads % kv_heads == 0 and (heads // kv_heads <= 64 or _latent(c)), f"{heads} to {kv_heads}")


@attention_rule("a head dim of at most 512, a multiple of 16 (int8: of 32)")
def _head_dim(c: Any) -> object:
    width, step = _query_dims(c)[1], 32 if c.query.dtype == torch.int8 else 16
    return unless(0 < width <= 512 and width % step == 0, width)


@attention_rule("N * D below 65535 in layouts BSH and BSND")
def _wide_rows(c: Any) -> object:
    heads, width = _query_dims(c)
    return unless(_layout(c) not in ("BSH", "BSND") or heads * width < 65535, heads * width)


@attention_rule("a query in fp16, bf16 or int8, and key and value of one dtype: the query's unless they are quantised")
def _attention_dtypes(c: Any) -> object:
    dtypes = c.query.dtype, c.key.dtype, c.value.dtype
    quantised = c.key.dtype in (torch.int8, torch.int32)
    right = dtypes[0] in (torch.float16, torch.bfloat16, torch.int8) and dtypes[1] == dtypes[2]
    return unless(right and (quantised or dtypes[0] == dtypes[1]), dtypes)


@attention_rule("key and value of one shape; in layout TND the head dims may differ")
def _one_shape(c: Any) -> object:
    stop = -1 if _packed(c) and c.block_table is None else None
    return unless(c.key.shape[:stop] == c.value.shape[:stop], (list(c.key.shape), list(c.value.shape)))


@attention_rule("a key with num_key_value_heads heads and the query's head dim")
def _key_dims(c: Any) -> object:
    if c.block_table is not None:  # _cache_layout
        return None
    layout, kv_heads, width = _layout(c), _kv_heads(c), _query_dims(c)[1]
    shape = list(c.key.shape)
    heads = kv_heads if layout == "BSH" else shape[{"TND": 1, "BSND": 2, "BNSD": 1, "NTD": 0}[layout]]
    last = kv_heads * width if layout == "BSH" else width
    return unless(heads == kv_heads and shape[-1] == last, f"{shape} for {kv_heads} heads of {width}")


@attention_rule("sparse_mode 0 to 4, or 9 with rope parts")
def _sparse_modes(c: Any) -> object:
    return unless(c.sparse_mode in range(5) or (c.sparse_mode == 9 and c.query_rope is not None), c.sparse_mode)


@attention_rule("a mask in bool, int8 or uint8")
def _mask_dtype(c: Any) -> object:
    return unless(c.atten_mask is None or c.atten_mask.dtype in MASK_DTYPES, c.atten_mask is not None and c.atten_mask.dtype)


@attention_rule("the compressed mask, (2048, 2048) with ones of 1 in front, in sparse modes 2, 3 and 4")
def _compressed_mask(c: Any) -> object:
    if c.sparse_mode not in (2, 3, 4):
        return None
    shape = None if c.atten_mask is None else tuple(c.atten_mask.shape)
    return unless(shape in ((2048, 2048), (1, 2048, 2048), (1, 1, 2048, 2048)), f"{shape}")


@attention_rule("a mask in sparse mode 1")
def _full_mask(c: Any) -> object:
    return unless(c.sparse_mode != 1 or c.atten_mask is not None, "None")


@attention_rule("lists of query and key lengths, one of each to a request, at most 4096, in layout TND")
def _length_lists(c: Any) -> object:
    if not _packed(c):
        return None
    lists = c.actual_seq_qlen, c.actual_seq_kvlen
    right = all(x is not None and 0 < len(x) <= 4096 for x in lists) and len(lists[0]) == len(lists[1])
    return unless(right, tuple(None if x is None else len(x) for x in lists))


@attention_rule(
    "cumulative query lengths without a leading 0 whose last is the number of query rows, at most 1M, in layout TND"
)
def _query_lengths(c: Any) -> object:
    if not _packed(c):
        return None
    rows = _tokens(c.query, _layout(c))
    right = all(a <= b for a, b in pairwise((0, *c.actual_seq_qlen))) and c.actual_seq_qlen[-1] == rows <= 2**20
    return unless(right, f"{list(c.actual_seq_qlen[-4:])} for {rows} rows")


@attention_rule("cumulative key lengths whose last is the number of keys, in layout TND without a block table")
def _packed_keys(c: Any) -> object:
    if not _packed(c) or c.block_table is not None:
        return None
    rows = _tokens(c.key, _layout(c))
    right = all(a <= b for a, b in pairwise((0, *c.actual_seq_kvlen))) and c.actual_seq_kvlen[-1] == rows
    return unless(right, f"{list(c.actual_seq_kvlen[-4:])} for {rows} keys")


@attention_rule("no empty tensor in layout TND")
def _no_empty(c: Any) -> object:
    shapes = [list(x.shape) for x in (c.query, c.key, c.value)]
    return unless(not _packed(c) or all(math.prod(shape) for shape in shapes), shapes)


@attention_rule("pre_tokens >= -query length, next_tokens >= -key length and a sum of at least 0 in sparse mode 4")
def _band(c: Any) -> object:
    if c.sparse_mode != 4 or not _packed(c):
        return None
    rows = min(b - a for a, b in pairwise((0, *c.actual_seq_qlen)))
    keys = min(c.actual_seq_kvlen if c.block_table is not None else
               [b - a for a, b in pairwise((0, *c.actual_seq_kvlen))])  # fmt: skip
    right = c.pre_tokens >= -rows and c.next_tokens >= -keys and c.pre_tokens + c.next_tokens >= 0
    return unless(right, (c.pre_tokens, c.next_tokens))


@attention_rule("key lengths with a block table, one to a request and not cumulative: none below 0 or above what its row holds")
def _paged_lengths(c: Any) -> object:
    if c.block_table is None:
        return None
    if c.actual_seq_kvlen is None:
        return "None"
    room = c.block_table.shape[-1] * c.block_size
    return unless(all(0 <= x <= room for x in c.actual_seq_kvlen), f"{max(c.actual_seq_kvlen)} of {room}")


@attention_rule("a 2-D int32 block table with one row to a request")
def _block_table(c: Any) -> object:
    table = c.block_table
    if table is None:
        return None
    requests = len(c.actual_seq_qlen) if _packed(c) else c.query.shape[0]
    right = table.dtype == torch.int32 and table.dim() == 2 and table.shape[0] == requests
    return unless(right, f"{table.dtype} {list(table.shape)} for {requests} requests")


@attention_rule("a block size of 128, 256, 384 or 512 for more than one query row a request")
def _prompt_block(c: Any) -> object:
    free = c.block_table is None or _latent(c) or _longest(c) <= 1
    return unless(free or (c.block_size % 128 == 0 and 128 <= c.block_size <= 512), c.block_size)


@attention_rule("a block size of at most 512 that is a multiple of 16 (int8: of 32)")
def _decode_block(c: Any) -> object:
    step = 32 if c.key.dtype == torch.int8 else 16
    return unless(c.block_table is None or (c.block_size % step == 0 and 0 < c.block_size <= 512), c.block_size)


@attention_rule("a cache [blocks, block_size, N_kv * D] or [blocks, N_kv, block_size, D]; layouts BSH and BSND: the first")
def _cache_layout(c: Any) -> object:
    if c.block_table is None or c.key.dim() == 5:  # 5-D: FRACTAL_NZ
        return None
    shape, kv_heads, width = tuple(c.key.shape[1:]), _kv_heads(c), _query_dims(c)[1]
    right: set[tuple[int, ...]] = {(c.block_size, kv_heads * width)}
    if _layout(c) not in ("BSH", "BSND"):
        right.add((kv_heads, c.block_size, width))
    return unless(shape in right, f"{list(c.key.shape)} for {kv_heads} heads of {width} and block_size {c.block_size}")


@attention_rule("at most 65535 elements to a token of a cache [blocks, block_size, N_kv * D]")
def _cache_row(c: Any) -> object:
    return unless(c.block_table is None or c.key.dim() != 3 or c.key.shape[2] <= 65535, c.key.shape[-1])


@attention_rule("a cache whose dims multiply to an int32")
def _cache_size(c: Any) -> object:
    return unless(c.block_table is None or c.key.numel() <= INT32_MAX, c.key.numel())


@attention_rule("both rope parts or neither, of 64 dims, in the dtypes of query and key")
def _rope(c: Any) -> object:
    parts = c.query_rope, c.key_rope
    if parts == (None, None):
        return None
    if None in parts:
        return "one"
    right = parts[0].shape[-1] == 64 and c.query.dtype in (parts[0].dtype, torch.int8)
    return unless(right and c.key.dtype in (parts[1].dtype, torch.int8), [f"{x.dtype} {list(x.shape)}" for x in parts])


@attention_rule("rope parts as large as query and key but for their last dim")
def _rope_shapes(c: Any) -> object:
    if c.query_rope is None or c.key_rope is None or _layout(c) == "BSH":
        return None
    pairs = (c.query, c.query_rope), (c.key, c.key_rope)
    # A latent cache in FRACTAL_NZ has its head dim in two.
    right = all(whole.shape[:-1] == part.shape[:-1] for whole, part in pairs if whole.dim() < 5)
    return unless(right, [(list(whole.shape), list(part.shape)) for whole, part in pairs])


@attention_rule("with rope parts a query of 512 dims, or of 128 in layouts TND and NTD_TND without a block table")
def _rope_dims(c: Any) -> object:
    if c.query_rope is None or _latent(c):
        return None
    right = _query_dims(c)[1] == 128 and c.input_layout in ("TND", "NTD_TND") and c.block_table is None
    return unless(right, f"{list(c.query.shape)} in {c.input_layout}")


@attention_rule("rope parts for a query of 512 dims in layout TND")
def _latent_rope(c: Any) -> object:
    return unless(not _packed(c) or _query_dims(c)[1] != 512 or _latent(c), "none")


@attention_rule("one key head over latent rows of 512 dims with rope parts")
def _latent_kv_heads(c: Any) -> object:
    return unless(not _latent(c) or _kv_heads(c) == 1, _kv_heads(c))


@rule("32, 64 or 128 heads with rope parts and 512 dims", FIA, ATTENTION[0])
def _latent_heads_v1(c: Any) -> object:
    return unless(not _latent(c) or c.num_query_heads in (32, 64, 128), c.num_query_heads)


@rule("a number of heads that is a power of two, at most 128, with rope parts and 512 dims", FIA, ATTENTION[1])
def _latent_heads(c: Any) -> object:
    return unless(not _latent(c) or c.num_query_heads in (1, 2, 4, 8, 16, 32, 64, 128), c.num_query_heads)


@attention_rule("1 to 16 query rows to a request with rope parts and 512 dims")
def _latent_rows(c: Any) -> object:
    if not _latent(c):
        return None
    rows = [b - a for a, b in pairwise((0, *c.actual_seq_qlen))] if _packed(c) else [_longest(c)]
    return unless(min(rows) >= 1 and max(rows) <= 16, rows)


@attention_rule("a block table and a block size of 16 or 128 (FRACTAL_NZ: 128) with rope parts and 512 dims")
def _latent_block(c: Any) -> object:
    sizes = (128,) if c.key.dim() == 5 else (16, 128)
    return unless(not _latent(c) or (c.block_table is not None and c.block_size in sizes), c.block_size)


@attention_rule("with rope parts and 512 dims, sparse_mode 0 without a mask for one query row, 3 with a mask for more")
def _latent_mask(c: Any) -> object:
    right = (c.sparse_mode, c.atten_mask is not None) == ((3, True) if _longest(c) > 1 else (0, False))
    return unless(not _latent(c) or right, f"{c.sparse_mode} for {_longest(c)} rows")


@attention_rule("a layout of TND, TND_NTD, BSH, BSND, BNSD, BSH_NBSD, BSND_NBSD or BNSD_NBSD with rope parts and 512 dims")
def _latent_layout(c: Any) -> object:
    layouts = {"TND", "TND_NTD", *(f"{x}{y}" for x in ("BSH", "BSND", "BNSD") for y in ("", "_NBSD"))}
    return unless(not _latent(c) or c.input_layout in layouts, c.input_layout)


@rule("a sink [N] in bf16, for layouts TND and NTD and values of at most 128 dims", FIA, ATTENTION[1])
def _sink(c: Any) -> object:
    sink = c.learnable_sink
    if sink is None:
        return None
    width = c.value.shape[-1] // (_kv_heads(c) if c.block_table is not None and c.value.dim() == 3 else 1)
    right = tuple(sink.shape) == (c.num_query_heads,) and sink.dtype == torch.bfloat16 and _packed(c) and width <= 128
    return unless(right, f"{sink.dtype} {list(sink.shape)} in {c.input_layout} with {width} dims")
