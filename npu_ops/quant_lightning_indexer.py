"""The lightning indexer on 8-bit queries and keys with a scale to each row of 128.

Ascend op: ``torch_npu.npu_quant_lightning_indexer``: int8 on A3 (and, by vLLM-Ascend's use, A2), 8-bit floats on 950.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.contract import EXACT, OpCase, OpContract, register, require
from npu_ops.lightning_indexer import (
    DIM,
    LARGE_COUNTS,
    MAX_HEADS,
    SHAPES,
    build_case,
    fake,
    validate_counts,
    validate_tensors,
)
from npu_ops.reference import quant_lightning_indexer as reference

OP = "quant_lightning_indexer"
LOGITS_BYTES = 536870912
# What a row's scale is kept in.
SCALES = {torch.int8: torch.float16, torch.float8_e4m3fn: torch.float32}


def quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    *,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    sparse_count: int,
    max_seq_len: int,
    logits_bytes: int = LOGITS_BYTES,
) -> Tensor:
    """``lightning_indexer`` of the dequantised queries and keys.

    The score is ``key_scale * sum_h (weights[h] * query_scale[h]) * relu(query[h] . key)`` in fp32, as scales are positive.
    Products of int8 are exact; those of 8-bit floats are accumulated as the device's matrix units do, in fp32 or nearly so.

    Args:
        query: [T, N1, 128] int8 or float8_e4m3fn, N1 up to 64; any strides.
        key: [blocks, block_size, 1, 128], the dtype of ``query``; contiguous. block_size is a multiple of 16.
        weights: [T, N1] bf16, fp16 or fp32; any strides. On Ascend they are rounded to fp16, or to bf16 beside 8-bit floats.
        query_dequant_scale: [T, N1], fp16 for int8 and fp32 for float8_e4m3fn; any strides.
        key_dequant_scale: [blocks, block_size, 1], likewise; contiguous.
        actual_seq_lengths_query: as in lightning_indexer.
        actual_seq_lengths_key: as in lightning_indexer.
        block_table: as in lightning_indexer; keys and scales share it.
        sparse_count: positions to choose: 1 to 2048.
        max_seq_len: no request has more keys.
        logits_bytes: as in lightning_indexer.

    Returns:
        Positions, int32 [T, 1, sparse_count], as lightning_indexer returns them.

    Raises:
        ContractError: if a shape, dtype or number does not fit. Lengths and block ids are device data and are not checked.
    """
    require(query.dim() == 3 and query.shape[2] == DIM and 1 <= query.shape[1] <= MAX_HEADS and query.dtype in SCALES, OP,
            f"a query [T, N1, {DIM}] in int8 or float8_e4m3fn with N1 of 1 to {MAX_HEADS}",
            f"{tuple(query.shape)} in {query.dtype}", "Quantise the rotated queries of all heads.")  # fmt: skip
    validate_counts(OP, sparse_count, (), max_seq_len, logits_bytes)
    validate_tensors(OP, query, key, weights, actual_seq_lengths_query, actual_seq_lengths_key, block_table)
    kind = SCALES[query.dtype]
    require(query_dequant_scale.shape == query.shape[:2] and query_dequant_scale.dtype == kind, OP,
            f"a query_dequant_scale {list(query.shape[:2])} in {kind}",
            f"{tuple(query_dequant_scale.shape)} in {query_dequant_scale.dtype}",
            "Pass one scale to a head of each row.")  # fmt: skip
    right = key_dequant_scale.shape == key.shape[:3] and key_dequant_scale.dtype == kind
    require(right and key_dequant_scale.is_contiguous(), OP, f"a contiguous key_dequant_scale {list(key.shape[:3])} in {kind}",
            f"{tuple(key_dequant_scale.shape)} in {key_dequant_scale.dtype} with strides {key_dequant_scale.stride()}",
            "View the cache of scales in the same blocks.")  # fmt: skip
    return _contract.op(  # type: ignore[no-any-return]
        query, key, weights, query_dequant_scale, key_dequant_scale, actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_key=actual_seq_lengths_key, block_table=block_table, sparse_count=sparse_count,
        max_seq_len=max_seq_len, logits_bytes=logits_bytes,
    )  # fmt: skip


def quantised(case: OpCase, kind: torch.dtype, device: str, weights: torch.dtype, seed: int) -> OpCase:
    """A case of lightning_indexer on the CPU in fp32, in 8 bits: its whole numbers, and scales that are powers of two."""
    generator = torch.Generator().manual_seed(seed)
    query, key, weight = case.args
    unused = key.isnan().any(-1)

    def scales(*size: int) -> Tensor:
        return torch.exp2(torch.randint(-3, 2, size, generator=generator).float())

    query_scale, key_scale = scales(*query.shape[:2]), scales(*key.shape[:3])
    key_scale[unused] = torch.nan
    if kind == torch.int8:  # which has no NaN
        query, key = query.nan_to_num(127), key.nan_to_num(127)
    narrow, scale = (query.to(kind), key.to(kind)), (query_scale.to(SCALES[kind]), key_scale.to(SCALES[kind]))
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in case.kwargs.items()}
    return OpCase(case.name, tuple(x.to(device) for x in (*narrow, weight.to(weights), *scale)), options)


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """``dtype`` is that of the weights."""
    for name, shape in SHAPES.items():
        for kind in SCALES:
            label = f"{name}-int8" if kind == torch.int8 else f"{name}-fp8"
            options = {"logits_bytes": 4 * LARGE_COUNTS[-1]} if name == "prefill" else {}
            yield quantised(build_case(label, shape, "cpu", torch.float32, seed, options), kind, device, dtype, seed)


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, Tensor key_dequant_scale, *,"
        " Tensor actual_seq_lengths_query, Tensor actual_seq_lengths_key, Tensor block_table, int sparse_count,"
        f" int max_seq_len, int logits_bytes={LOGITS_BYTES}) -> Tensor",
        reference=reference.quant_lightning_indexer,
        fake=fake,
        cases=_cases,
        tolerance=EXACT,
    )
)
