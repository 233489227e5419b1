"""sparse_flash_attention on a cache of packed int8 rows (C8), as pack_sparse_kv makes them.

Ascend op: ``torch_npu.npu_kv_quant_sparse_flash_attention`` with scales in tiles (quantisation mode 2) stored beside the data,
in attention mode 2 with layouts TND and PA_BSND. It has no LSE: a call that wants one unpacks the rows that are named to bf16
and goes to ``torch_npu.npu_sparse_flash_attention``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.attention_limits import LATENT_DIM, ROPE_DIM
from npu_ops.contract import OpCase, OpContract, Tolerance, register, require
from npu_ops.pack_sparse_kv import WIDTH
from npu_ops.reference import kv_quant_sparse_flash_attention as reference
from npu_ops.reference.pack_sparse_kv import pack_sparse_kv
from npu_ops.sparse_flash_attention import TOLERANCE, sparse_cases, validate_sparse

OP = "kv_quant_sparse_flash_attention"
# CANN takes bf16 queries alone; fp32 is for comparisons.
DTYPES = (torch.bfloat16, torch.float32)


def kv_quant_sparse_flash_attention(
    query: Tensor,
    key_value: Tensor,
    sparse_indices: Tensor,
    *,
    scale_value: float,
    block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    sparse_mode: int,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """sparse_flash_attention over ``unpack_sparse_kv(key_value, query.dtype)``, of which only the named rows are unpacked.

    On Ascend a call with LSE takes another way than one without; see the module. Its results are the same but for rounding.

    Args:
        query: [T, N, 576] bf16 or fp32, the latent part and the rope part; any strides. Rows past the last request are
            padding: output 0, LSE -inf.
        key_value: int8 [blocks, block_size, 1, 656], see pack_sparse_kv; the rope bytes are bf16; contiguous; block_size a
            multiple of 16. Rows that are not named are not read; offsets are right past 2^31 elements.
        sparse_indices: int32 [T, 1, K]: key positions within the row's request, distinct and ascending, then -1 to the end.
        scale_value: factor on the scores.
        block_table: int32 [>= B, blocks of the longest request], any strides between rows.
        actual_seq_lengths_query: int32 [B], cumulative query lengths without a leading 0.
        actual_seq_lengths_kv: int32 [B], keys of each request; 0 is allowed.
        sparse_mode: 3 hides indices past the row's own position, 0 only those that are no key.
        return_softmax_lse: whether the second result is filled.

    Returns:
        The output [T, N, 512] in the dtype of ``query``, and the natural-log LSE [T, N] fp32 ([0] when not asked for). A row
        that sees no key has output 0 and LSE -inf.

    Raises:
        ContractError: if a shape or dtype does not fit. Indices, lengths and blocks are device data and are not checked.
    """
    right = query.dim() == 3 and query.shape[1] > 0 and query.shape[2] == LATENT_DIM + ROPE_DIM and query.dtype in DTYPES
    require(right, OP, f"a query [T, N, {LATENT_DIM + ROPE_DIM}] in bf16 or fp32", f"{query.dtype} {tuple(query.shape)}",
            "Pass latent and rope part side by side; serve models in fp16 without a quantised cache.")  # fmt: skip
    right = key_value.dim() == 4 and key_value.shape[2:] == (1, WIDTH) and key_value.dtype == torch.int8
    require(right and key_value.is_contiguous(), OP, f"a contiguous int8 cache [blocks, block_size, 1, {WIDTH}]",
            f"{key_value.dtype} {tuple(key_value.shape)} with strides {key_value.stride()}",
            "Pass the layer's cache of packed rows.")  # fmt: skip
    validate_sparse(
        OP, query.shape[0], key_value.shape[1], sparse_indices, block_table, actual_seq_lengths_query, actual_seq_lengths_kv,
        sparse_mode,
    )  # fmt: skip
    return _contract.op(  # type: ignore[no-any-return]
        query, key_value, sparse_indices, scale_value=scale_value, block_table=block_table,
        actual_seq_lengths_query=actual_seq_lengths_query, actual_seq_lengths_kv=actual_seq_lengths_kv,
        sparse_mode=sparse_mode, return_softmax_lse=return_softmax_lse,
    )  # fmt: skip


def pack_case(case: OpCase) -> OpCase:
    """A case of sparse_flash_attention as one of this op, its caches packed. Rows of NaN unpack to NaN."""
    query, latent, indices = case.args
    options = dict(case.kwargs)
    query = torch.cat((query, options.pop("query_rope")), -1)
    rope = options.pop("key_rope")
    packed = pack_sparse_kv(latent.cpu().flatten(0, 2).nan_to_num(0.0), rope.cpu().flatten(0, 2))
    unused = latent.cpu().flatten(0, 2)[:, 0].isnan()
    packed[unused, -16:] = torch.full((4,), torch.nan).view(torch.int8)
    return OpCase(case.name, (query, packed.view(*latent.shape[:3], WIDTH).to(query.device), indices), options)


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """There are no fp16 ones: asked for those, it makes bf16 ones. Those have no LSE: it is fp32, but right within bf16 alone,
    as rows are unpacked in bf16.
    """
    kind = torch.bfloat16 if dtype == torch.float16 else dtype
    for case in map(pack_case, sparse_cases(device, kind, seed)):
        yield OpCase(case.name, case.args, case.kwargs | ({} if kind == torch.float32 else {"return_softmax_lse": False}))


def _fake(query: Tensor, *_: object, return_softmax_lse: bool = False, **__: object) -> tuple[Tensor, Tensor]:
    lse_shape = query.shape[:2] if return_softmax_lse else (0,)
    out = torch.empty((*query.shape[:2], LATENT_DIM), dtype=query.dtype, device=query.device)
    return out, torch.empty(lse_shape, dtype=torch.float32, device=query.device)


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor query, Tensor key_value, Tensor sparse_indices, *, float scale_value, Tensor block_table,"
        " Tensor actual_seq_lengths_query, Tensor actual_seq_lengths_kv, int sparse_mode, bool return_softmax_lse=False)"
        " -> (Tensor, Tensor)",
        reference=reference.kv_quant_sparse_flash_attention,
        fake=_fake,
        cases=_cases,
        # bf16: against rows unpacked in fp32, so the keys are rounded once more, and with them scores of 576 products.
        tolerance={torch.float32: TOLERANCE[torch.float32], torch.bfloat16: Tolerance(2e-2, 2e-2)},
    )
)
