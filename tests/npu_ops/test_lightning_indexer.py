from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fla.ops.dsa.naive import naive_dsa_indexer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from npu_ops.contract import EXACT, ContractError
from npu_ops.lightning_indexer import DIM, build_case, lightning_indexer
from npu_ops.rotary import rotary

OPS = ("lightning_indexer",)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


def make(batch: list[tuple[int, int]], heads: int, count: int, device: str, **options: Any) -> tuple[tuple, dict[str, Any]]:
    """Arguments of a call over blocks of 16 with whole numbers."""
    case = build_case("", (batch, heads, 16, count, 0), device, torch.float32, 1, options)
    return case.args, case.kwargs


def keys_of(key: Tensor, options: dict[str, Any], request: int) -> Tensor:
    """The keys [k, 128] of one request, on the CPU in fp64."""
    blocks = options["block_table"][request].long().cpu()
    return key.cpu().double()[blocks].view(-1, DIM)[: int(options["actual_seq_lengths_key"][request])]


def by_sorting(args: tuple, options: dict[str, Any], act: Callable[[Tensor], Tensor] = torch.relu, parts: int = 1) -> list:
    """Each row's positions by sorting (score, position) pairs in fp64; with ``parts``, chosen within parts of the keys."""
    query, key, weights = args
    rows, start = [], 0
    for request, end in enumerate(options["actual_seq_lengths_query"].tolist()):
        keys = keys_of(key, options, request)
        for t in range(start, end):
            seen = max(len(keys) - (end - t) + 1, 0)
            scores = weights[t].cpu().double() @ act(query[t].cpu().double() @ keys[:seen].T)
            pairs = [(-score, position) for position, score in enumerate(scores.tolist())]
            size, best = -(-seen // parts), []
            for first in range(0, seen, max(size, 1)):
                best += sorted(pairs[first : first + size])[: options["sparse_count"] // parts]
            rows.append(sorted(position for _, position in best))
        start = end
    return rows


def chosen(indices: Tensor) -> list[list[int]]:
    """The positions of each row, after a check that they ascend and that -1 comes last."""
    rows = []
    for row in indices[:, 0].tolist():
        positions = [x for x in row if x >= 0]
        assert row == sorted(set(positions)) + [-1] * (len(row) - len(positions))
        rows.append(positions)
    return rows


lengths = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 70)), min_size=1, max_size=3)


@settings(max_examples=12)
@given(batch=lengths, heads=st.sampled_from([1, 4, 20]), count=st.sampled_from([1, 7, 32]))
def test_matches_sorting(device: str, batch: list[tuple[int, int]], heads: int, count: int) -> None:
    args, options = make(batch, heads, count, device)
    assert chosen(lightning_indexer(*args, **options)) == by_sorting(args, options)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_matches_fla(device: str, dtype: torch.dtype) -> None:
    lens, count = [90, 40], 16
    # With 16 heads no key is at zero in all of them: fla has no order among equal scores.
    query, key = torch.randn(130, 16, DIM).to(dtype), torch.randn(130, DIM).to(dtype)
    weights = torch.randn(130, 16).to(dtype)
    cache = torch.full((9, 16, 1, DIM), math.nan, dtype=dtype)
    table = torch.tensor([[7, 1, 3, 5, 0, 2], [8, 4, 6, 0, 0, 0]], dtype=torch.int32)
    for ids, rows in zip(table, key.split(lens), strict=True):
        for first in range(0, len(rows), 16):
            part = rows[first : first + 16]
            cache[ids[first // 16], : len(part), 0] = part
    wanted = naive_dsa_indexer(
        query[None], key[None], weights[None], topk=count, activation="relu", cu_seqlens=torch.tensor([0, 90, 130])
    )
    ends, sizes = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([90, 130], lens))
    indices = lightning_indexer(
        query.to(device), cache.to(device), weights.to(device), actual_seq_lengths_query=ends, actual_seq_lengths_key=sizes,
        block_table=table.to(device), sparse_count=count, max_seq_len=90,
    )  # fmt: skip
    assert [set(row) for row in chosen(indices)] == [{x for x in row if x >= 0} for row in wanted[0].tolist()]


def test_matches_transformers_with_its_rope(device: str) -> None:
    # The indexer of V3.2 rotates two halves, at any position; neighbours (as its attention does) choose other keys.
    tokens, count, heads = 48, 8, 16
    config = DeepseekV32Config(hidden_size=64, q_lora_rank=32, index_n_heads=heads, index_head_dim=DIM, qk_rope_head_dim=64,
                               index_topk=count)  # fmt: skip
    indexer = DeepseekV32Indexer(config, 0)
    hidden, residual = torch.randn(1, tokens, 64), torch.randn(1, tokens, 32)
    position = torch.cat((torch.arange(tokens - 1), torch.tensor([4095]))).float()
    angles = position[:, None] * 1e4 ** -(torch.arange(32) / 32)
    cos, sin = angles.cos(), angles.sin()
    causal = torch.full((tokens, tokens), -math.inf).triu(1)[None]
    wide = [torch.cat((x, x), -1)[None] for x in (cos, sin)]
    wanted = indexer(hidden, residual, wide, causal, torch.arange(tokens)[None])

    def select(mode: str) -> list[set[int]]:
        query = indexer.wq_b(residual)[0].unflatten(-1, (heads, DIM))
        key = indexer.k_norm(indexer.wk(hidden))[0][:, None]
        turned = [torch.cat((rotary(x[..., :64].to(device), cos.to(device), sin.to(device), rotary_mode=mode),
                             x[..., 64:].to(device)), -1) for x in (query, key)]  # fmt: skip
        one = {"dtype": torch.int32, "device": device}
        indices = lightning_indexer(
            turned[0], turned[1].view(3, 16, 1, DIM), indexer.weights_proj(hidden)[0].to(device),
            actual_seq_lengths_query=torch.tensor([tokens], **one), actual_seq_lengths_key=torch.tensor([tokens], **one),
            block_table=torch.arange(3, **one)[None], sparse_count=count, max_seq_len=tokens,
        )  # fmt: skip
        return [set(row) for row in chosen(indices)]

    with torch.no_grad():
        right = [{x for x in row if x <= t} for t, row in enumerate(wanted[0].tolist())]
        assert select("half") == right
        assert select("interleave") != right


def test_scores_are_relus_summed_over_heads(device: str) -> None:
    # Heads see +3 and -5 in key 0, +1 and +1 in key 1: with ReLU 3 beats 2, without it -2 does not.
    query = torch.zeros(1, 2, DIM, device=device)
    query[0, 0, 0] = query[0, 1, 1] = 1
    key = torch.zeros(1, 16, 1, DIM, device=device)
    key[0, 0, 0, :2], key[0, 1, 0, :2] = torch.tensor([3.0, -5.0]), torch.tensor([1.0, 1.0])
    one = {"dtype": torch.int32, "device": device}
    options = {"actual_seq_lengths_query": torch.tensor([1], **one), "actual_seq_lengths_key": torch.tensor([2], **one),
               "block_table": torch.zeros(1, 1, **one), "sparse_count": 1, "max_seq_len": 2}  # fmt: skip
    assert lightning_indexer(query, key, torch.ones(1, 2, device=device), **options).tolist() == [[[0]]]


def test_other_definitions_would_be_seen(device: str) -> None:
    args, options = make([(4, 150), (3, 90)], 4, 16, device)
    ours = chosen(lightning_indexer(*args, **options))
    assert ours == by_sorting(args, options)
    assert ours != by_sorting(args, options, act=lambda x: x)  # ReLU dropped
    assert ours != by_sorting(args, options, parts=2)  # the best of each half, not of all


def test_of_equal_scores_the_first_win(device: str) -> None:
    args, options = make([(2, 140)], 2, 16, device)
    query, key, weights = args
    assert chosen(lightning_indexer(query, key, weights * 0, **options)) == [list(range(16))] * 2
    # Zeros of either sign are equal: a negative weight makes one out of a key that no head likes.
    weights[:, 0], weights[:, 1] = -1, 0
    assert chosen(lightning_indexer(query, key, weights, **options)) == by_sorting((query, key, weights), options)


def test_requests_keep_to_their_own_keys(device: str) -> None:
    args, options = make([(3, 13), (2, 102)], 4, 16, device)
    alone, own = make([(2, 102)], 4, 16, device)
    query, key, weights = args
    both = lightning_indexer(query, key, weights, **options)
    assert [len(row) for row in chosen(both)] == [11, 12, 13, 16, 16]
    own["block_table"] = options["block_table"][1:]
    assert torch.equal(lightning_indexer(query[3:].contiguous(), key, weights[3:], **own), both[3:])
    key[options["block_table"][0, :1].long()] = math.nan
    assert torch.equal(lightning_indexer(query, key, weights, **options)[3:], both[3:])
    assert alone[0].shape == query[3:].shape


@pytest.mark.parametrize("keys", [1, 5, 2047, 2048, 2049])
def test_as_many_positions_as_there_are(device: str, keys: int) -> None:
    args, options = make([(1, keys)], 1, 2048, device)
    (row,) = chosen(lightning_indexer(*args, **options))
    assert len(row) == min(keys, 2048)
    assert row[-1] < keys
    assert row == list(range(keys)) or keys > 2048


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_slices_change_nothing(device: str, dtype: torch.dtype) -> None:
    # 32 KiB of scores are one row of 8192.
    query, key = torch.randn(9, 4, DIM).to(dtype).to(device), torch.randn(520, 16, 1, DIM).to(dtype).to(device)
    one = {"dtype": torch.int32, "device": device}
    options = {"actual_seq_lengths_query": torch.tensor([9], **one), "actual_seq_lengths_key": torch.tensor([8190], **one),
               "block_table": torch.randperm(520).int()[None].to(device), "sparse_count": 64, "max_seq_len": 8190}  # fmt: skip
    weights = torch.rand(9, 4).to(dtype).to(device)
    whole = lightning_indexer(query, key, weights, **options)
    for size in (2**15, 2**15 + 4, 2**17):
        assert torch.equal(lightning_indexer(query, key, weights, **options, logits_bytes=size), whole)


def test_blocks_past_2_to_31_elements(device: str) -> None:
    # 2^31 elements are block 131072 of 128 rows. The memory is only touched where keys are.
    case = build_case("", ([(2, 250)], 4, 128, 16, 0), device, torch.bfloat16, 1, {})
    query, near, weights = case.args
    wanted = lightning_indexer(query, near, weights, **case.kwargs)
    far = torch.empty(131072 + len(near), 128, 1, DIM, dtype=torch.bfloat16, device=device)
    far[131072:] = near
    options = case.kwargs | {"block_table": case.kwargs["block_table"] + 131072}
    assert torch.equal(lightning_indexer(query, far, weights, **options), wanted)


def test_bad_calls_say_what_to_do(device: str) -> None:
    args, options = make([(2, 40)], 4, 16, device)
    given = dict(zip(("query", "key", "weights"), args, strict=True)) | options
    table = options["block_table"]
    wrong: dict[str, list[tuple[object, str]]] = {
        "query": [(args[0][..., :64], r"a query \[T, N1, 128\] in bf16, fp16 or fp32 with N1 of 1 to 64 is required"),
                  (args[0].half(), r"a key in torch\.float16 is required, got torch\.float32")],
        "key": [(args[1].transpose(0, 1), r"a contiguous key \[blocks, block_size, 1, 128\] .*View the indexer's cache"),
                (args[1].view(-1, 8, 1, DIM), r"a block_size that is a multiple of 16 is required, got \(\d+, 8, 1, 128\)")],
        "weights": [(args[2][:, :2], r"weights \[2, 4\] in bf16, fp16 or fp32 is required, got \(2, 2\)")],
        "actual_seq_lengths_query": [(table[0, :1].long(), r"an int32 actual_seq_lengths_query \[B\] is required"),
                                     (table[0, :2], r"as many query lengths as key lengths is required, got 2 and 1")],
        "block_table": [(table.long(), r"an int32 block_table of at least 1 rows"),
                        (table[:, ::2], r"each contiguous, is required, got torch\.int32 \(1, 3\) with strides \(\d, 2\)")],
        "sparse_count": [(2049, r"a sparse_count of 1 to 2048, or of 3072 to 8192 in steps of 1024, is required, got 2049"),
                         (0, r"a sparse_count of 1 to 2048")],
        "logits_bytes": [(2**15 - 1, r"logits_bytes of at least 32768 for max_seq_len 40 is required, got 32767\. Raise")],
    }  # fmt: skip
    for name, values in wrong.items():
        for value, text in values:
            with pytest.raises(ContractError, match=text):
                lightning_indexer(**{**given, name: value})
