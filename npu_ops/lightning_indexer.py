"""The keys that sparse attention reads: the best positions of each query row by the lightning indexer's score.

DeepSeek-AI, DeepSeek-V3.2 (arXiv:2512.02556), equation 1. Ascend op: ``torch_npu.npu_lightning_indexer``, whose document names
no order of its result and gives no score.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from npu_ops.contract import EXACT, OpCase, OpContract, register, require
from npu_ops.reference import lightning_indexer as reference

OP = "lightning_indexer"
DIM, MAX_HEADS, SLOTS = 128, 64, 16
# What CANN selects at once, beside every number up to 2048.
LARGE_COUNTS = (3072, 4096, 5120, 6144, 7168, 8192)
LOGITS_BYTES = 536870912


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    sparse_count: int,
    max_seq_len: int,
    logits_bytes: int = LOGITS_BYTES,
) -> Tensor:
    """Choose the ``sparse_count`` keys of each row that score best by ``sum_h weights[h] * relu(query[h] . key)``.

    Row t of a request with q rows and k keys sees its first k - q + t + 1 keys. Scores are fp32; of equal ones the lower
    position wins, so a result does not depend on how the work is divided. Nothing waits for the lengths.

    Args:
        query: [T, N1, 128] bf16, fp16 or fp32, N1 up to 64; any strides.
        key: [blocks, block_size, 1, 128], the dtype of ``query``; contiguous. block_size is a multiple of 16. Rows past a
            request's keys may hold anything.
        weights: [T, N1] bf16, fp16 or fp32; any strides. On Ascend they are rounded to the dtype of ``query``.
        actual_seq_lengths_query: int32 [B], the rows of all requests up to and including each: cumulative, no leading 0.
            Rows past the last are padding.
        actual_seq_lengths_key: int32 [B], the keys of each request.
        block_table: int32 [>= B, >= blocks of the longest request]; rows may be strided. Entries past a request's keys may be
            anything.
        sparse_count: positions to choose: 1 to 2048, or 3072 to 8192 in steps of 1024.
        max_seq_len: no request has more keys.
        logits_bytes: no buffer of scores is larger; it holds at least one row of max(max_seq_len, 8192) scores. On Ascend
            CANN scores in a workspace of its own.

    Returns:
        Positions within the request, int32 [T, 1, sparse_count], ascending; -1 after the last, and throughout a padding row.
        A row that sees no more than ``sparse_count`` keys gets them all. Scores that are no number give positions that are
        visible, and no promise which.

    Raises:
        ContractError: if a shape, dtype or number does not fit. Lengths and block ids are device data and are not checked.
    """
    require(query.dim() == 3 and query.shape[2] == DIM and 1 <= query.shape[1] <= MAX_HEADS and query.dtype in EXACT, OP,
            f"a query [T, N1, {DIM}] in bf16, fp16 or fp32 with N1 of 1 to {MAX_HEADS}",
            f"{tuple(query.shape)} in {query.dtype}", "Pass all heads of the indexer.")  # fmt: skip
    validate_counts(OP, sparse_count, LARGE_COUNTS, max_seq_len, logits_bytes)
    validate_tensors(OP, query, key, weights, actual_seq_lengths_query, actual_seq_lengths_key, block_table)
    return _contract.op(  # type: ignore[no-any-return]
        query, key, weights, actual_seq_lengths_query=actual_seq_lengths_query, actual_seq_lengths_key=actual_seq_lengths_key,
        block_table=block_table, sparse_count=sparse_count, max_seq_len=max_seq_len, logits_bytes=logits_bytes,
    )  # fmt: skip


def validate_counts(op: str, sparse_count: int, large: tuple[int, ...], max_seq_len: int, logits_bytes: int) -> None:
    """What both forms of the indexer require of their numbers."""
    require(1 <= sparse_count <= 2048 or sparse_count in large, op,
            "a sparse_count of 1 to 2048" + (f", or of 3072 to {large[-1]} in steps of 1024," if large else ""), sparse_count,
            "Choose what CANN selects in one call.")  # fmt: skip
    least = 4 * max(max_seq_len, LARGE_COUNTS[-1])
    require(max_seq_len >= 0 and logits_bytes >= least, op, f"logits_bytes of at least {least} for max_seq_len {max_seq_len}",
            logits_bytes, "Raise indexer_logits_bytes, or lower max_model_len.")  # fmt: skip


def validate_tensors(
    op: str, query: Tensor, key: Tensor, weights: Tensor, ends: Tensor, lens: Tensor, block_table: Tensor
) -> None:
    """What both forms of the indexer require of their tensors beside the query."""
    require(key.dim() == 4 and key.shape[2:] == (1, DIM) and key.shape[1] % SLOTS == 0 and key.is_contiguous(), op,
            f"a contiguous key [blocks, block_size, 1, {DIM}] with a block_size that is a multiple of {SLOTS}",
            f"{tuple(key.shape)} with strides {key.stride()}", "View the indexer's cache in blocks.")  # fmt: skip
    require(key.dtype == query.dtype, op, f"a key in {query.dtype}", key.dtype, "Keep keys in the dtype of the queries.")
    require(weights.shape == query.shape[:2] and weights.dtype in EXACT, op,
            f"weights {list(query.shape[:2])} in bf16, fp16 or fp32", f"{tuple(weights.shape)} in {weights.dtype}",
            "Pass one weight to a head of each row.")  # fmt: skip
    for name, lengths in (("actual_seq_lengths_query", ends), ("actual_seq_lengths_key", lens)):
        require(lengths.dim() == 1 and lengths.dtype == torch.int32, op, f"an int32 {name} [B]",
                f"{lengths.dtype} {tuple(lengths.shape)}", "Pass the device copy of the lengths.")  # fmt: skip
    require(ends.shape == lens.shape, op, "as many query lengths as key lengths", f"{len(ends)} and {len(lens)}",
            "Pass both of every request.")  # fmt: skip
    right = block_table.dim() == 2 and block_table.dtype == torch.int32 and block_table.shape[0] >= len(ends)
    require(right and (block_table.shape[1] < 2 or block_table.stride(1) == 1), op,
            f"an int32 block_table of at least {len(ends)} rows, each contiguous,",
            f"{block_table.dtype} {tuple(block_table.shape)} with strides {block_table.stride()}",
            "Pass the block table of the same requests.")  # fmt: skip


# (query length, key length) of each request, then N1, block size, sparse_count and padding rows.
Shape = tuple[list[tuple[int, int]], int, int, int, int]
SHAPES: dict[str, Shape] = {
    "none": ([(0, 5), (0, 0)], 4, 16, 3, 0),
    "one": ([(1, 1)], 1, 16, 4, 0),
    "decode": ([(1, 300), (1, 17), (1, 33)], 64, 128, 32, 0),
    "prefill": ([(70, 200)], 8, 48, 64, 0),
    "odd": ([(3, 70), (0, 9), (5, 5), (2, 1), (4, 130)], 4, 16, 16, 3),
    "few": ([(2, 140)], 3, 128, 1, 0),
}


def build_case(name: str, shape: Shape, device: str, dtype: torch.dtype, seed: int, options: dict[str, Any]) -> OpCase:
    """Small whole numbers, whose scores are exact in any order and often equal; unused rows hold NaN, spare ids are 0."""
    batch, heads, block_size, count, padding = shape
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high + 1, size, generator=generator).float()

    qlens, lens = (list(part) for part in zip(*batch, strict=True))
    counts = [math.ceil(keys / block_size) for keys in lens]
    blocks = torch.split((torch.randperm(sum(counts), generator=generator) + 1).int(), counts)
    key = torch.full((sum(counts) + 1, block_size, 1, DIM), math.nan)
    table = torch.zeros(len(batch), max(counts) + 2, dtype=torch.int32)
    for row, ids, keys in zip(table, blocks, lens, strict=True):
        row[: len(ids)] = ids
        rows = torch.full((len(ids) * block_size, DIM), math.nan)
        rows[:keys] = whole(-2, 2, keys, DIM)
        key[ids.long(), :, 0] = rows.view(-1, block_size, DIM)
    tokens = sum(qlens)
    query, weights = whole(-2, 2, tokens + padding, heads, DIM), whole(-4, 8, tokens + padding, heads) / 8
    query[tokens:] = math.nan
    lengths = {
        "actual_seq_lengths_query": torch.tensor(qlens).cumsum(0).int().to(device),
        "actual_seq_lengths_key": torch.tensor(lens).int().to(device),
        "block_table": table.to(device), "sparse_count": count, "max_seq_len": max(lens),
    }  # fmt: skip
    return OpCase(name, tuple(x.to(dtype).to(device) for x in (query, key, weights)), lengths | options)


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    for name, shape in SHAPES.items():
        options = {"logits_bytes": 4 * LARGE_COUNTS[-1]} if name == "prefill" else {}
        case = build_case(name, shape, device, dtype, seed, options)
        if name == "odd":  # a slice of a fused projection
            query, key, weights = case.args
            case = OpCase(name, (torch.cat((query, query), 1)[:, : query.shape[1]], key, weights.float()), case.kwargs)
        yield case


def fake(query: Tensor, *_: object, sparse_count: int, **__: object) -> Tensor:
    """Shape and dtype of the result of both forms."""
    return torch.empty((query.shape[0], 1, sparse_count), dtype=torch.int32, device=query.device)


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor query, Tensor key, Tensor weights, *, Tensor actual_seq_lengths_query, Tensor actual_seq_lengths_key,"
        f" Tensor block_table, int sparse_count, int max_seq_len, int logits_bytes={LOGITS_BYTES}) -> Tensor",
        reference=reference.lightning_indexer,
        fake=fake,
        cases=_cases,
        tolerance=EXACT,
    )
)
