"""Contract check (d): CANN's own rules, which torch_npu does not check, are checked on every call of the virtual NPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from npu_ops.contract import all_contracts
from npu_ops.device import NPU
from npu_ops.virtual_npu import rules

CONTRACTS = all_contracts()
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONTRACTS)
def test_calls_of_the_mappings_keep_the_rules(name: str, dtype: str, cases: Callable, serve: Callable) -> None:
    for case in cases(name, DTYPES[dtype]):
        served = serve(name, case, lambda x: x.clone().to(NPU))
        for call in served.calls if served else ():
            rules.check(call.op._schema.name, call.args, call.kwargs)


def test_every_operator_in_use_has_rules(cases: Callable, serve: Callable) -> None:
    for name in CONTRACTS:
        for case in cases(name, torch.bfloat16)[:2]:
            served = serve(name, case, lambda x: x.clone().to(NPU))
            used = {call.op._schema.name for call in served.calls} if served else set()
            assert {op.removeprefix("npu::") for op in used} <= set(rules.RULES)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(**changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A paged prefill of two requests that keeps all rules, with changes."""
    call: dict[str, Any] = {
        "query": empty(9, 8, 128), "key": empty(6, 128, 256), "value": empty(6, 128, 256),
        "atten_mask": empty(2048, 2048, dtype=torch.int8), "actual_seq_qlen": [4, 9], "actual_seq_kvlen": [300, 40],
        "block_table": empty(2, 3, dtype=torch.int32), "num_query_heads": 8, "num_key_value_heads": 2, "input_layout": "TND",
        "sparse_mode": 3, "block_size": 128,
    }  # fmt: skip
    call |= changes
    return tuple(call.pop(name) for name in ("query", "key", "value")), call


PACKED = {
    "key": empty(340, 2, 128),
    "value": empty(340, 2, 128),
    "block_table": None,
    "block_size": 0,
    "actual_seq_kvlen": [300, 340],
}
LATENT = {
    "query": empty(3, 8, 512), "query_rope": empty(3, 8, 64), "key": empty(6, 1, 128, 512), "value": empty(6, 1, 128, 512),
    "key_rope": empty(6, 1, 128, 64), "num_key_value_heads": 1, "actual_seq_qlen": [1, 3],
}  # fmt: skip
LATENT_DECODE = {**LATENT, "query": empty(2, 128, 512), "query_rope": empty(2, 128, 64), "num_query_heads": 128,
                 "actual_seq_qlen": [1, 2], "sparse_mode": 0, "atten_mask": None}  # fmt: skip
DECODE = {"query": empty(2, 8, 128), "actual_seq_qlen": [1, 2]}
SMALL_BLOCKS = {**DECODE, "block_size": 16, "key": empty(60, 16, 256), "value": empty(60, 16, 256),
                "block_table": empty(2, 20, dtype=torch.int32)}  # fmt: skip


@pytest.mark.parametrize("good", [{}, PACKED, DECODE, SMALL_BLOCKS, LATENT, LATENT_DECODE])
def test_right_attention_passes(good: dict[str, Any]) -> None:
    rules.check(f"npu::{rules.attention_rules.ATTENTION[1]}", *attention(**good))


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("query, key, value, mask and rope parts contiguous", {"key": empty(6, 256, 128).transpose(1, 2)}),
    ("num_query_heads to be the query's heads", {"num_query_heads": 4}),
    ("at most 256", {"query": empty(9, 512, 128), "num_query_heads": 512, "num_key_value_heads": 8}),
    ("a whole number of query heads to a key head", {"num_key_value_heads": 3}),
    ("at most 64", {"query": empty(9, 128, 128), "num_query_heads": 128, "num_key_value_heads": 1}),
    ("a head dim of at most 512", {"query": empty(9, 8, 100)}),
    ("key and value of one dtype", {"value": empty(6, 128, 256, dtype=torch.float16)}),
    ("a query in fp16, bf16 or int8", {name: empty(*shape, dtype=torch.float32) for name, shape in
     {"query": (9, 8, 128), "key": (6, 128, 256), "value": (6, 128, 256)}.items()}),
    ("key and value of one shape", {"value": empty(5, 128, 256)}),
    ("a key with num_key_value_heads heads", {**PACKED, "key": empty(340, 4, 128), "value": empty(340, 4, 128)}),
    ("sparse_mode 0 to 4", {"sparse_mode": 5}),
    ("a mask in bool, int8 or uint8", {"atten_mask": empty(2048, 2048, dtype=torch.float16)}),
    ("the compressed mask", {"atten_mask": empty(128, 128, dtype=torch.int8)}),
    ("the compressed mask", {"atten_mask": None}),
    ("a mask in sparse mode 1", {"sparse_mode": 1, "atten_mask": None}),
    ("lists of query and key lengths", {"actual_seq_kvlen": [300]}),
    ("cumulative query lengths", {"actual_seq_qlen": [4, 5]}),
    ("cumulative query lengths", {"actual_seq_qlen": [0, 4]}),
    ("cumulative key lengths", {**PACKED, "actual_seq_kvlen": [300, 40]}),
    ("no empty tensor", {"key": empty(0, 128, 256), "value": empty(0, 128, 256)}),
    ("pre_tokens >= -query length", {"sparse_mode": 4, "pre_tokens": 3, "next_tokens": -4}),
    ("not cumulative", {"actual_seq_kvlen": [300, 640]}),
    ("a 2-D int32 block table", {"block_table": empty(2, 3, dtype=torch.int64)}),
    ("with one row to a request", {"block_table": empty(4, 3, dtype=torch.int32)}),
    ("a block size of 128, 256, 384 or 512", {"block_size": 144, "key": empty(6, 144, 256), "value": empty(6, 144, 256)}),
    ("that is a multiple of 16", {**DECODE, "block_size": 40, "key": empty(60, 40, 256), "value": empty(60, 40, 256),
                                  "block_table": empty(2, 20, dtype=torch.int32)}),
    ("a cache [blocks, block_size, N_kv * D]", {"key": empty(6, 128, 2, 128), "value": empty(6, 128, 2, 128)}),
    ("whose dims multiply to an int32", {"key": empty(65536, 128, 256), "value": empty(65536, 128, 256)}),
    ("at most 65535 elements to a token", {"query": empty(9, 256, 256), "num_query_heads": 256, "num_key_value_heads": 256,
                                           "key": empty(6, 128, 65536), "value": empty(6, 128, 65536)}),
    ("N * D below 65535", {"query": empty(2, 1, 65536), "num_query_heads": 256, "num_key_value_heads": 256,
                           "input_layout": "BSH"}),
    ("both rope parts or neither", {"query_rope": empty(9, 8, 64)}),
    ("rope parts as large as query and key", {**LATENT, "key_rope": empty(6, 1, 64, 64)}),
    ("a query of 512 dims, or of 128", {"query_rope": empty(9, 8, 64), "key_rope": empty(6, 128, 64)}),
    ("rope parts for a query of 512 dims", {**LATENT, "query_rope": None, "key_rope": None}),
    ("one key head over latent rows", {**LATENT, **dict.fromkeys(("key", "value"), empty(6, 2, 128, 512)),
                                       "key_rope": empty(6, 2, 128, 64), "num_key_value_heads": 2}),
    ("a power of two, at most 128", {**LATENT, "query": empty(3, 6, 512), "query_rope": empty(3, 6, 64), "num_query_heads": 6}),
    ("1 to 16 query rows", {**LATENT, "query": empty(18, 8, 512), "query_rope": empty(18, 8, 64), "actual_seq_qlen": [1, 18]}),
    ("1 to 16 query rows", {**LATENT, "actual_seq_qlen": [0, 3]}),
    ("a block size of 16 or 128", {**LATENT, **dict.fromkeys(("key", "value"), empty(6, 1, 256, 512)),
                                   "key_rope": empty(6, 1, 256, 64), "block_size": 256}),
    ("sparse_mode 0 without a mask for one query row", {**LATENT, "sparse_mode": 0, "atten_mask": None}),
    ("sparse_mode 0 without a mask for one query row", {**LATENT_DECODE, "sparse_mode": 3,
                                                        "atten_mask": empty(2048, 2048, dtype=torch.int8)}),
    ("a layout of TND, TND_NTD", {**LATENT, "input_layout": "TND_X"}),
    ("a sink [N] in bf16", {"learnable_sink": empty(8, dtype=torch.float32)}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "changes"), BROKEN)
def test_broken_attention_is_caught(rule: str, changes: dict[str, Any]) -> None:
    args, kwargs = attention(**changes)
    with pytest.raises(rules.RuleError) as caught:
        rules.check(f"npu::{rules.attention_rules.ATTENTION[1]}", args, kwargs)
    assert rule in caught.value.rule.text
    assert caught.value.rule.text in str(caught.value)
    assert caught.value.rule.source in str(caught.value)


def test_first_version_has_the_same_rules() -> None:
    args, kwargs = attention(num_query_heads=4)
    old = {"num_query_heads": "num_heads", "actual_seq_qlen": "actual_seq_lengths", "actual_seq_kvlen": "actual_seq_lengths_kv"}
    with pytest.raises(rules.RuleError, match="num_query_heads to be the query's heads"):
        rules.check("npu_fused_infer_attention_score", args, {old.get(name, name): x for name, x in kwargs.items()})


def test_first_version_takes_fewer_heads_over_a_latent_cache() -> None:
    args, kwargs = attention(**LATENT)
    old = {"num_query_heads": "num_heads", "actual_seq_qlen": "actual_seq_lengths", "actual_seq_kvlen": "actual_seq_lengths_kv"}
    with pytest.raises(rules.RuleError, match="32, 64 or 128 heads with rope parts"):
        rules.check("npu_fused_infer_attention_score", args, {old.get(name, name): x for name, x in kwargs.items()})


ROWS, CACHE, SLOTS = empty(3, 2, 64), empty(4, 16, 2, 64), torch.tensor([5, 0, 63])
TABLE, LENS = empty(2, 2, dtype=torch.int32), empty(2, dtype=torch.int32)
FP32, FLAT = empty(6, dtype=torch.float32), empty(6, 64)
X = empty(1, 5, 4, 64)
LOGITS, ID, IDS = empty(5, 64), torch.tensor([[0, 1], [7, 3]], dtype=torch.int32), empty(5, 2, dtype=torch.int32)
ROUTE = {"expert_num": 8, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "active_expert_range": [2, 8]}
EXPERTS, SIZES, MATMUL = empty(3, 64, 32), torch.tensor([2, 0, 4]), {"split_item": 2, "group_type": 0, "group_list_type": 1}
INDICES, PROBS = torch.tensor([5, 0, 1, 1, 2, 3], dtype=torch.int32), torch.tensor([[0.5, 0.5], [0.25, 0.0], [1.0, 2.0]])
NEW = empty(3, 2, 1, 64)
KV = (empty(1, 1, 3, 576), empty(512), empty(1, 1, 3, 64), empty(1, 1, 3, 64), torch.tensor([4, 5, -1]),
      empty(2, 16, 1, 64), empty(2, 16, 1, 512))  # fmt: skip
PAGED = {"cache_mode": "PA_BNSD", "is_output_kv": True}
ORDERS = {"perm_x1": [1, 0, 2], "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]}
SCORED = (empty(5, 4, 128), empty(6, 16, 1, 128), empty(5, 4))
LATEST = {
    "actual_seq_lengths_query": torch.tensor([2, 5], dtype=torch.int32),
    "layout_query": "TND",
    "layout_key": "PA_BSND",
    "actual_seq_lengths_key": torch.tensor([30, 9], dtype=torch.int32),
    "block_table": TABLE,
    "sparse_count": 16,
}
NARROW = (
    *(x.to(torch.int8) for x in SCORED[:2]),
    SCORED[2].half(),
    SCORED[2].half(),
    empty(6, 16, 1, dtype=torch.float16),
    0,
    0,
)
FP8 = (*(x.to(torch.float8_e4m3fn) for x in SCORED[:2]), SCORED[2], *(x.float() for x in NARROW[3:5]), 0, 0)
PLACES = torch.tensor([[5], [0], [5]])
LATENTS = empty(6, 16, 1, 512)
NAMED = torch.tensor([[0, 4, -1], [-1, -1, -1], [7, 8, 9]], dtype=torch.int32)[:, None]
SFA = (empty(3, 8, 512), LATENTS, LATENTS, NAMED, 0.1)
SPARSE: dict[str, Any] = {
    "block_table": empty(2, 3, dtype=torch.int32), "actual_seq_lengths_query": torch.tensor([1, 3], dtype=torch.int32),
    "actual_seq_lengths_kv": torch.tensor([40, 0], dtype=torch.int32), "layout_query": "TND", "layout_kv": "PA_BSND",
    "attention_mode": 2,
}  # fmt: skip
ROPES = {**SPARSE, "query_rope": empty(3, 8, 64), "key_rope": empty(6, 16, 1, 64)}
BYTES = empty(6, 16, 1, 656, dtype=torch.int8)
QSFA = (empty(3, 8, 576), BYTES, BYTES, NAMED, 0.1, 2, 2)
OTHERS: list[tuple[str, str | None, tuple[Any, ...], dict[str, Any]]] = [
    ("npu_attention_update", None, ([FP32], [FLAT], 1), {}),
    ("npu_attention_update", "update_type 0 or 1", ([FP32], [FLAT], 7), {}),
    ("npu_attention_update", "1 to 16 partials", ([FP32] * 17, [FLAT] * 17, 1), {}),
    ("npu_attention_update", "fp32 LSEs [M]", ([empty(3, 2, dtype=torch.float32)], [FLAT], 1), {}),
    ("npu_attention_update", "a head dim of 8 to 512", ([FP32], [empty(6, 12)], 1), {}),
    ("npu_attention_update", "contiguous partials", ([FP32], [empty(64, 6).T], 1), {}),
    ("npu_scatter_pa_kv_cache", None, (ROWS, ROWS, CACHE, CACHE, SLOTS), {"cache_mode": "Norm"}),
    ("npu_scatter_pa_kv_cache", "contiguous", (ROWS[..., :32], ROWS, CACHE, CACHE, SLOTS), {"cache_mode": "Norm"}),
    ("npu_scatter_pa_kv_cache", "in one dtype", (ROWS.half(), ROWS, CACHE, CACHE, SLOTS), {"cache_mode": "Norm"}),
    ("npu_scatter_pa_kv_cache", "rows [T, N, D]", (ROWS, ROWS, empty(4, 2, 16, 64), CACHE, SLOTS), {"cache_mode": "Norm"}),
    ("npu_scatter_pa_kv_cache", "one int32 or int64 slot", (ROWS, ROWS, CACHE, CACHE, SLOTS[:2]), {"cache_mode": "Norm"}),
    ("npu_scatter_pa_kv_cache", "slots in [0", (ROWS, ROWS, CACHE, CACHE, SLOTS - 1), {"cache_mode": "Norm"}),
    ("npu_scatter_pa_kv_cache", "slots in [0", (ROWS, ROWS, CACHE, CACHE, SLOTS + 1), {"cache_mode": "Norm"}),
    ("npu_gather_pa_kv_cache", None, (CACHE, CACHE, TABLE, LENS, ROWS, ROWS), {}),
    ("npu_gather_pa_kv_cache", "contiguous", (CACHE, CACHE, empty(2, 4, dtype=torch.int32)[:, :2], LENS, ROWS, ROWS), {}),
    ("npu_gather_pa_kv_cache", "int8, fp16 or bf16", (CACHE.float(), CACHE, TABLE, LENS, ROWS, ROWS), {}),
    ("npu_gather_pa_kv_cache", "int32 block_tables", (CACHE, CACHE, TABLE.long(), LENS, ROWS, ROWS), {}),
    ("npu_gather_pa_kv_cache", "rows [R, N, D]", (CACHE, CACHE, TABLE, LENS, empty(3, 128), ROWS), {}),
    ("npu_gather_pa_kv_cache", "no empty tensor", (CACHE, CACHE, TABLE, LENS, empty(0, 2, 64), empty(0, 2, 64)), {}),
    ("npu_gather_pa_kv_cache", "a multiple of 32", (empty(4, 16, 1, 8), CACHE, TABLE, LENS, empty(3, 1, 8), ROWS), {}),
    ("npu_gather_pa_kv_cache", "2**31 - 1 elements", (empty(2**20, 16, 2, 64), CACHE, TABLE, LENS, ROWS, ROWS), {}),
    ("npu_gather_pa_kv_cache", "in whole blocks", (CACHE, CACHE, TABLE, LENS, ROWS, ROWS),
     {"seq_offset": torch.tensor([16, 3], dtype=torch.int32)}),
    ("npu_rotary_mul", None, (X, X[:, :, :1].contiguous(), X[:, :, :1].contiguous()), {}),
    ("npu_rotary_mul", "4-D tensors", (X[0], X[0], X[0]), {}),
    ("npu_rotary_mul", "half or interleave", (X, X, X, "quarter"), {}),
    ("npu_rotary_mul", "below 896", (empty(1, 5, 4, 896),) * 3, {}),
    ("npu_rotary_mul", "factors as wide", (X, X[..., :32], X[..., :32]), {}),
    ("npu_rms_norm", None, (FLAT, empty(64, dtype=torch.float32)), {}),
    ("npu_rms_norm", "gamma over its last ones", (FLAT, empty(32)), {}),
    ("npu_add_rms_norm", "summands", (FLAT, FLAT.half(), empty(64)), {}),
    ("npu_dynamic_quant", None, (FLAT,), {}),
    ("npu_dynamic_quant", "contiguous fp16 or bf16", (FLAT.float(),), {}),
    ("npu_dynamic_quant", "contiguous fp16 or bf16", (FLAT.t(),), {}),
    ("npu_swiglu", None, (FLAT,), {}),
    ("npu_swiglu", "is even", (empty(6, 63),), {}),
    ("npu_moe_gating_top_k", None, (LOGITS, 8), {"bias": LOGITS[0], "k_group": 4, "group_count": 8, "norm_type": 1}),
    ("npu_moe_gating_top_k", "2-D logits", (empty(2, 2049), 8), {}),
    ("npu_moe_gating_top_k", "a bias [experts]", (LOGITS, 8), {"bias": empty(64, dtype=torch.float32)}),
    ("npu_moe_gating_top_k", "above 2", (LOGITS, 2), {"group_count": 32}),
    ("npu_moe_gating_top_k", "above 2", (empty(5, 300), 2), {"group_count": 100}),
    ("npu_moe_gating_top_k", "1 <= k_group", (LOGITS, 9), {"group_count": 8}),
    ("npu_moe_gating_top_k", "renorm 0", (LOGITS, 8), {"renorm": 1}),
    ("npu_moe_init_routing_v2", None, (LOGITS, IDS), ROUTE),
    ("npu_moe_init_routing_v2", "int32 ids [T, K]", (LOGITS, IDS.long()), ROUTE),
    ("npu_moe_init_routing_v2", "ids below expert_num", (LOGITS[:2], ID + 1), ROUTE),
    ("npu_moe_init_routing_v2", "an active_expert_range", (LOGITS, IDS), {**ROUTE, "active_expert_range": [2, 9]}),
    ("npu_moe_init_routing_v2", "drop_pad_mode 0", (LOGITS, IDS), {**ROUTE, "expert_tokens_num_flag": False}),
    ("npu_grouped_matmul", None, ([FLAT], [EXPERTS]), {"group_list": SIZES, **MATMUL}),
    ("npu_grouped_matmul", "split_item 2 or 3", ([FLAT], [EXPERTS]), {"group_list": SIZES, **MATMUL, "split_item": 0}),
    ("npu_grouped_matmul", "rows [R, K]", ([FLAT.half()], [EXPERTS]), {"group_list": SIZES, **MATMUL}),
    ("npu_grouped_matmul", "contiguous rows", ([empty(6, 128)[:, :64]], [EXPERTS]), {"group_list": SIZES, **MATMUL}),
    ("npu_grouped_matmul", "below 65536", ([FLAT], [empty(3, 64, 65536)]), {"group_list": SIZES, **MATMUL}),
    ("npu_grouped_matmul", "an int64 group_list", ([FLAT], [EXPERTS]), {"group_list": SIZES.int(), **MATMUL}),
    ("npu_grouped_matmul", "sizes that are not negative", ([FLAT], [EXPERTS]), {"group_list": SIZES + 1, **MATMUL}),
    ("npu_grouped_matmul", "sizes that are not negative", ([FLAT], [EXPERTS[:1]]), {"group_list": SIZES[:1], **MATMUL}),
    ("npu_grouped_matmul", "sizes that are not negative", ([FLAT], [EXPERTS]), {"group_list": SIZES, **MATMUL,
                                                                                "group_list_type": 0}),
    ("npu_moe_token_unpermute", None, (FLAT, INDICES, PROBS), {}),
    ("npu_moe_token_unpermute", "one int32 index", (FLAT, INDICES.long(), PROBS), {}),
    ("npu_moe_token_unpermute", "rows [T * K, H]", (FLAT[:5], INDICES, PROBS), {}),
    ("npu_moe_token_unpermute", "K up to 512", (empty(1026, 4), empty(1026, dtype=torch.int32), empty(2, 513)), {}),
    ("npu_moe_token_unpermute", "padded_mode False", (FLAT, INDICES, PROBS), {"padded_mode": True}),
    ("npu_moe_token_unpermute", "rows that are there", (FLAT, INDICES - 1, PROBS), {}),
    ("npu_moe_token_unpermute", "distinct indices", (FLAT, INDICES, PROBS + 1), {}),
    ("npu_interleave_rope", None, (NEW, empty(3, 1, 1, 64), empty(3, 1, 1, 64)), {}),
    ("npu_interleave_rope", "cos and sin [B, 1, S or 1, 64]", (NEW, NEW, NEW), {}),
    ("npu_interleave_rope", "contiguous", (empty(3, 2, 1, 128)[..., :64], empty(3, 1, 1, 64), empty(3, 1, 1, 64)), {}),
    ("npu_kv_rmsnorm_rope_cache_v2", None, KV, PAGED),
    ("npu_kv_rmsnorm_rope_cache_v2", "kv [B, 1, S, 576]", (KV[0][..., :512], *KV[1:]), PAGED),
    ("npu_kv_rmsnorm_rope_cache_v2", "contiguous caches", (*KV[:6], empty(2, 512, 1, 16).transpose(1, 3)), PAGED),
    ("npu_kv_rmsnorm_rope_cache_v2", "one int64 slot", (*KV[:4], torch.tensor([4, 4, -1]), *KV[5:]), PAGED),
    ("npu_kv_rmsnorm_rope_cache_v2", "one int64 slot", (*KV[:4], torch.tensor([4, 32, -1]), *KV[5:]), PAGED),
    ("npu_kv_rmsnorm_rope_cache_v2", "one int64 slot", (*KV[:4], torch.tensor([4, 5, -2]), *KV[5:]), PAGED),
    ("npu_kv_rmsnorm_rope_cache_v2", "a multiple of 16", (*KV[:5], empty(2, 8, 1, 64), empty(2, 8, 1, 512)), PAGED),
    ("npu_kv_rmsnorm_rope_cache_v2", "at least B *", (KV[0].transpose(0, 2), KV[1], *(x.transpose(0, 2) for x in KV[2:4]),
                                                      *KV[4:]), PAGED),
    ("npu_scatter_nd_update_", None, (FLAT, PLACES, empty(3, 64)), {}),
    ("npu_scatter_nd_update_", "in fp32, fp16, bf16, bool", (FLAT.double(), PLACES, empty(3, 64).double()), {}),
    ("npu_scatter_nd_update_", "updates [..., *input.shape[a:]]", (FLAT, PLACES, empty(3, 32)), {}),
    ("npu_scatter_nd_update_", "indices within", (FLAT, PLACES + 1, empty(3, 64)), {}),
    ("npu_scatter_nd_update_", "indices within", (FLAT, PLACES - 1, empty(3, 64)), {}),
    ("npu_lightning_indexer", None, SCORED, LATEST),
    ("npu_lightning_indexer", "contiguous query, key", (SCORED[0], SCORED[1], empty(4, 5).T), LATEST),
    ("npu_lightning_indexer", "in fp16 or bf16", (*SCORED[:2], SCORED[2].float()), LATEST),
    ("npu_lightning_indexer", "weights [T, N1]", (*SCORED[:2], empty(5, 3)), LATEST),
    ("npu_lightning_indexer", "a layout_key of PA_BSND", SCORED, {**LATEST, "layout_key": "BSND"}),
    ("npu_lightning_indexer", "a sparse_count of", SCORED, {**LATEST, "sparse_count": 2049}),
    ("npu_lightning_indexer", "sparse_mode 0 or 3", SCORED, {**LATEST, "sparse_mode": 4}),
    ("npu_lightning_indexer", "int32 lengths [B]", SCORED, {**LATEST, "actual_seq_lengths_query": None}),
    ("npu_lightning_indexer", "int32 lengths [B]", SCORED, {**LATEST, "actual_seq_lengths_query": PLACES[:2, 0].int()}),
    ("npu_lightning_indexer", "int32 key lengths", SCORED, {**LATEST, "actual_seq_lengths_key": PLACES[:, 0].int()}),
    ("npu_lightning_indexer", "an int32 block_table", SCORED, {**LATEST, "block_table": TABLE[:, :1]}),
    ("npu_quant_lightning_indexer", None, NARROW, LATEST),
    ("npu_quant_lightning_indexer", None, FP8, LATEST),
    ("npu_quant_lightning_indexer", "in int8, with weights", (*NARROW[:2], SCORED[2], *NARROW[3:]), LATEST),
    ("npu_quant_lightning_indexer", "in int8, with weights", (*NARROW[:3], *FP8[3:]), LATEST),
    ("npu_quant_lightning_indexer", "at most 64 heads", (*NARROW[:6], 1), LATEST),
    ("npu_quant_lightning_indexer", "at most 64 heads", (*NARROW[:4], empty(6, 16, dtype=torch.float16), 0, 0), LATEST),
    ("npu_quant_lightning_indexer", "1 to 2048 for rows in 8 bits", NARROW, {**LATEST, "sparse_count": 3072}),
    ("npu_sparse_flash_attention", None, SFA, ROPES),
    ("npu_sparse_flash_attention", "contiguous tensors, but", (empty(3, 512, 8).transpose(1, 2), *SFA[1:]), ROPES),
    ("npu_sparse_flash_attention", "a query [T, N, 512] with", SFA, SPARSE),
    ("npu_sparse_flash_attention", "one latent key head of 512", (SFA[0], LATENTS, empty(6, 16, 1, 64), *SFA[3:]), ROPES),
    ("npu_sparse_flash_attention", "one latent key head of 512", SFA, {**ROPES, "key_rope": LATENTS}),
    ("npu_sparse_flash_attention", "int32 sparse_indices [T, 1, K]", (*SFA[:3], NAMED.long(), 0.1), ROPES),
    ("npu_sparse_flash_attention", "its -1 at the end", (*SFA[:3], NAMED.flip(2), 0.1), ROPES),
    ("npu_sparse_flash_attention", "int32 lengths on the device", SFA, {
        **ROPES, "actual_seq_lengths_query": torch.tensor([3, 1], dtype=torch.int32)}),
    ("npu_sparse_flash_attention", "int32 lengths on the device", SFA, {**ROPES, "actual_seq_lengths_kv": None}),
    ("npu_sparse_flash_attention", "an int32 block_table [B, blocks]", SFA, {**ROPES, "block_table": TABLE}),
    ("npu_sparse_flash_attention", "an int32 block_table [B, blocks]", SFA, {**ROPES, "block_table": None}),
    ("npu_sparse_flash_attention", "layouts TND with PA_BSND or TND", SFA, {**ROPES, "attention_mode": 0}),
    ("npu_sparse_flash_attention", "layouts TND with PA_BSND or TND", SFA, {**ROPES, "sparse_mode": 4}),
    ("npu_sparse_flash_attention", "a power of two, at most 128", (empty(3, 6, 512), *SFA[1:]),
     {**ROPES, "query_rope": empty(3, 6, 64)}),
    ("npu_sparse_flash_attention", "packed keys where the maximum", SFA, {**ROPES, "return_softmax_lse": True}),
    ("npu_sparse_flash_attention", "no empty tensor", (SFA[0], *(empty(0, 16, 1, 512),) * 2, *SFA[3:]),
     {**ROPES, "key_rope": empty(0, 16, 1, 64)}),
    ("npu_kv_quant_sparse_flash_attention", None, QSFA, SPARSE),
    ("npu_kv_quant_sparse_flash_attention", "in bf16 over int8 rows", (QSFA[0].half(), *QSFA[1:]), SPARSE),
    ("npu_kv_quant_sparse_flash_attention", "in bf16 over int8 rows", (QSFA[0], BYTES, LATENTS, *QSFA[3:]), SPARSE),
    ("npu_kv_quant_sparse_flash_attention", "scales of tiles (2)", (*QSFA[:6], 0), SPARSE),
    ("npu_kv_quant_sparse_flash_attention", "scales of tiles (2)", QSFA, {**SPARSE, "tile_size": 64}),
    ("npu_kv_quant_sparse_flash_attention", "a power of two, at most 128", (empty(3, 12, 576), *QSFA[1:]), SPARSE),
    ("npu_dynamic_block_quant", None, (empty(5, 512),), {}),
    ("npu_dynamic_block_quant", "blocks of 1 x 128", (empty(5, 512, dtype=torch.float32),), {}),
    ("npu_dynamic_block_quant", "blocks of 1 x 128", (empty(5, 512),), {"row_block_size": 128}),
    ("npu_transpose_batchmatmul", None, (empty(5, 2, 64), empty(2, 64, 32)), ORDERS),
    ("npu_transpose_batchmatmul", "agree in batch", (empty(5, 2, 64), empty(3, 64, 32)), ORDERS),
    ("npu_transpose_batchmatmul", "perm_x2 of", (empty(5, 2, 64), empty(2, 64, 32)), {**ORDERS, "perm_x2": [0, 2, 1]}),
    ("npu_transpose_batchmatmul", "at most 65535", (empty(1, 128, 512), empty(128, 512, 16)), ORDERS),
    ("npu_transpose_batchmatmul", "multiples of 16", (empty(5, 2, 64), empty(2, 64, 20)), ORDERS),
]  # fmt: skip


@pytest.mark.parametrize(("op", "rule", "args", "kwargs"), OTHERS, ids=[f"{op}-{rule}" for op, rule, *_ in OTHERS])
def test_other_operators(op: str, rule: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if rule is None:
        rules.check(f"npu::{op}", args, kwargs)
        return
    with pytest.raises(rules.RuleError) as caught:
        rules.check(f"npu::{op}", args, kwargs)
    assert rule in caught.value.rule.text


def test_two_rows_to_one_slot() -> None:
    rows, cache = torch.randn(3, 1, 16), torch.zeros(2, 16, 1, 16)
    call = {"cache_mode": "Norm"}
    with pytest.raises(rules.RuleError, match="slot 4 for rows 0 and 2"):
        rules.check("npu_scatter_pa_kv_cache", (rows, rows, cache, cache, torch.tensor([4, 5, 4])), call)
    rows[2] = rows[0] = torch.nan
    rules.check("npu_scatter_pa_kv_cache", (rows, rows, cache, cache, torch.tensor([4, 5, 4])), call)


def test_every_rule_of_the_operators_is_tried() -> None:
    tried = ["distinct slots", "32, 64 or 128 heads", *(rule for rule, _ in BROKEN), *(rule for _, rule, *_ in OTHERS if rule)]
    texts = {rule.text for op in rules.RULES for rule in rules.RULES[op]}
    assert {text for text in texts if not any(part in text for part in tried)} == set()


def test_operators_without_rules_pass() -> None:
    rules.check("npu::npu_silu", (torch.zeros(1),), {})


def test_the_virtual_npu_applies_them() -> None:
    rows = torch.zeros(5, 4, 64, dtype=torch.bfloat16, device=NPU)
    with pytest.raises(rules.RuleError, match=r"npu_rotary_mul: CANN requires 4-D tensors.*got .*\[5, 4, 64\]"):
        torch.ops.npu.npu_rotary_mul(rows, rows, rows)
