from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from npu_ops.attention_update import attention_update
from npu_ops.contract import ContractError, OpCase, all_contracts
from npu_ops.fused_infer_attention import (
    BLOCK_SIZES,
    DTYPES,
    SPARSE_BAND,
    SPARSE_CAUSAL,
    build_case,
    fused_infer_attention,
)
from npu_ops.gather_kv_cache import gather_kv_cache

OPS = ("fused_infer_attention",)
CONTRACT = all_contracts()["fused_infer_attention"]
CAUSAL: dict[str, object] = {"sparse_mode": SPARSE_CAUSAL}


def dense(case: OpCase, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One masked softmax in ``dtype`` over all tokens of all requests at once, on the CPU."""
    query, key, value = (x.cpu().to(dtype) for x in case.args)
    options = case.kwargs
    if (rope := options.get("query_rope")) is not None:
        query, key = (torch.cat((x, y.cpu().to(dtype)), -1) for x, y in ((query, rope), (key, options["key_rope"])))
    qsum, klens, table = options["actual_seq_qlen"], options["seq_lens"].tolist(), options["block_table"]
    qlens = [b - a for a, b in zip([0, *qsum], qsum, strict=False)]
    owner_q, place_q = _places(qlens, [k - q for q, k in zip(qlens, klens, strict=True)], query.shape[0])
    owner_k, place_k = _places(klens, [0] * len(klens), sum(klens))
    if table is not None:
        size = options["block_size"]
        slots = table.cpu()[owner_k, place_k // size].long() * size + place_k % size
        key, value = key.flatten(0, 1)[slots], value.flatten(0, 1)[slots]
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    distance = place_k - place_q[:, None]
    seen = owner_q[:, None] == owner_k
    if options["sparse_mode"] == SPARSE_CAUSAL:
        seen &= distance <= 0
    elif options["sparse_mode"] == SPARSE_BAND:
        seen &= (distance >= -options["pre_tokens"]) & (distance <= options["next_tokens"])
    scores = torch.einsum("tnd,snd->tns", query, key) * options["softmax_scale"]
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    if (sink := options.get("learnable_sink")) is not None:
        column = sink.cpu().to(dtype).expand(len(scores), -1).masked_fill(owner_q[:, None] < 0, -math.inf)
        scores = torch.cat((scores, column[..., None]), -1)
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else torch.full(scores.shape[:2], -math.inf, dtype=dtype)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return torch.einsum("tns,snd->tnd", weights[..., : key.shape[0]], value), lse


def _places(lengths: Sequence[int], firsts: Sequence[int], rows: int) -> tuple[Tensor, Tensor]:
    """Request (-1: none) and key position of each packed row."""
    pairs = [(i, first + j) for i, (n, first) in enumerate(zip(lengths, firsts, strict=True)) for j in range(n)]
    table = torch.tensor(pairs + [(-1, 0)] * (rows - len(pairs)), dtype=torch.long).view(-1, 2)
    return table[:, 0], table[:, 1]


def assert_as_exact_as_pytorch(case: OpCase, results: Sequence[Tensor]) -> None:
    """Equal NaN and inf masks; at most twice the error of plain PyTorch in the same dtype; a tight LSE.

    The floor of eight units in the last place is for rows of few keys, where plain PyTorch may be exact by chance: a GPU takes
    exp2 of scores scaled by log2(e), and each of these steps rounds.
    """
    out, lse = (x.cpu().double() for x in results)
    dtype = case.args[0].dtype
    exact, exact_lse = dense(case, torch.float64)
    plain, _ = dense(case, dtype)
    assert torch.equal(out.isfinite(), exact.isfinite()), case.name
    assert torch.equal(lse.isinf(), exact_lse.isinf()), case.name
    if out.numel():
        allowed = 2 * (plain.double() - exact).abs().max() + 8 * torch.finfo(dtype).eps * exact.abs().max()
        assert (out - exact).abs().max() <= allowed, case.name
    torch.testing.assert_close(lse, exact_lse, atol=2e-5, rtol=1e-5, msg=lambda text: f"{case.name}: LSE: {text}")


def attend(case: OpCase) -> tuple[Tensor, Tensor]:
    return fused_infer_attention(*case.args, **case.kwargs)


def close(actual: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Two results of this op are equal within its tolerance, the LSE within that of fp32."""
    for a, b in zip(actual, wanted, strict=True):
        bound = CONTRACT.tolerance[a.dtype]
        torch.testing.assert_close(a, b, atol=bound.atol, rtol=bound.rtol)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


def test_matches_dense_softmax(op_case: tuple, device: str, seed: int, call_op: Callable) -> None:
    contract, dtype, name = op_case
    case = next(case for case in contract.cases(device, dtype, seed) if case.name == name)
    assert_as_exact_as_pytorch(case, call_op(contract, case))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size(device: str, block_size: int, seed: int) -> None:
    batch = [(1, block_size), (1, block_size + 1), (3, 2 * block_size - 1), (20, 20)]
    case = build_case(f"block-{block_size}", batch, (4, 2, 64, block_size), CAUSAL, device, torch.bfloat16, seed)
    assert_as_exact_as_pytorch(case, attend(case))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [(64, 1), (5, 5)], ids=str)
def test_every_head_dim(device: str, dim: int, heads: tuple[int, int], seed: int) -> None:
    case = build_case(f"dim-{dim}", [(1, 40), (9, 21)], (*heads, dim, 16), CAUSAL, device, torch.bfloat16, seed)
    assert_as_exact_as_pytorch(case, attend(case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [0, 16])
def test_window_of_one_returns_the_own_value(device: str, dtype: torch.dtype, block_size: int, seed: int) -> None:
    options: dict[str, object] = {"sparse_mode": SPARSE_BAND, "pre_tokens": 0, "next_tokens": 0}
    case = build_case("window-1", [(33, 33)], (4, 2, 64, block_size), options, device, dtype, seed)
    query, key, value = case.args
    if block_size:
        blocks = case.kwargs["block_table"][0, :3].long()
        key, value = (cache[blocks].flatten(0, 1)[:33] for cache in (key, value))
    out, lse = attend(case)
    assert torch.equal(out, value.repeat_interleave(2, 1))
    score = (query.float() * key.repeat_interleave(2, 1).float()).sum(-1) * case.kwargs["softmax_scale"]
    torch.testing.assert_close(lse, score, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [(1, 0), (15, 0), (16, 3), (127, 0), (500, 500)], ids=str)
def test_sliding_windows(device: str, window: tuple[int, int], seed: int) -> None:
    options: dict[str, object] = {"sparse_mode": SPARSE_BAND, "pre_tokens": window[0], "next_tokens": window[1]}
    batch = [(1, 200), (40, 150), (130, 130), (3, 1)]
    case = build_case(f"window-{window}", batch, (4, 2, 64, 16), options, device, torch.bfloat16, seed)
    assert_as_exact_as_pytorch(case, attend(case))


@pytest.mark.parametrize("sink", [-30.0, 0.0, 30.0])
def test_sink_is_one_logit_without_value(device: str, sink: float, seed: int) -> None:
    plain = build_case("no-sink", [(1, 50), (9, 20)], (4, 2, 64, 16), CAUSAL, device, torch.float32, seed)
    sinks = torch.full((4,), sink, device=device)
    out, lse = attend(plain)
    with_sink, lse_sink = attend(OpCase("sink", plain.args, {**plain.kwargs, "learnable_sink": sinks}))
    total = torch.logaddexp(lse, sinks)
    close((with_sink, lse_sink), (out * (lse - total).exp()[..., None], total))


def test_lse_is_left_out_unless_asked_for(device: str, seed: int) -> None:
    case = build_case("no-lse", [(1, 5)], (2, 1, 64, 16), CAUSAL, device, torch.float32, seed)
    out, lse = fused_infer_attention(*case.args, **{**case.kwargs, "return_softmax_lse": False})
    assert lse.shape == (0,)
    assert torch.equal(out, attend(case)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_past_the_last_request_are_padding(device: str, dtype: torch.dtype, seed: int) -> None:
    options = {**CAUSAL, "learnable_sink": torch.ones(4, device=device)}
    case = build_case("padded", [(1, 20), (5, 9)], (4, 2, 64, 16), options, device, dtype, seed)
    padding = torch.full((3, 4, 64), math.nan, dtype=dtype, device=device)
    padded = OpCase("padded", (torch.cat((case.args[0], padding)), *case.args[1:]), case.kwargs)
    out, lse = attend(padded)
    close((out[:6], lse[:6]), attend(case))
    assert not out[6:].any()
    assert (lse[6:] == -math.inf).all()


@pytest.mark.parametrize("mode", [0, SPARSE_CAUSAL, SPARSE_BAND])
def test_dummy_batch_without_keys(device: str, mode: int, seed: int) -> None:
    # Eight rows of a warm-up batch with seq_lens 0: the table holds no block that exists, and none is read.
    case = build_case("dummy", [(1, 0)] * 8, (4, 2, 64, 16), {"sparse_mode": mode}, device, torch.bfloat16, seed)
    table = torch.full((8, 4), 2**30, dtype=torch.int32, device=device)
    out, lse = attend(OpCase("dummy", case.args, {**case.kwargs, "block_table": table}))
    assert not out.any()
    assert (lse == -math.inf).all()


def test_one_token_tail_of_a_long_prompt(device: str, seed: int) -> None:
    # A prompt of 4097 whose last chunk is one token, beside the first chunk of another: as the whole prompt's row.
    whole = build_case("whole", [(4097, 4097)], (1, 1, 64, 128), CAUSAL, device, torch.bfloat16, seed)
    query, key, value = whole.args
    table = whole.kwargs["block_table"].expand(2, -1).contiguous()
    lengths = {
        "actual_seq_qlen": [64, 65],
        "actual_seq_kvlen": [64, 4097],
        "query_start_loc": torch.tensor([0, 64, 65], dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([64, 4097], dtype=torch.int32, device=device),
        "block_table": table,
    }
    mixed = attend(OpCase("tail", (torch.cat((query[:64], query[4096:])), key, value), {**whole.kwargs, **lengths}))
    out, lse = attend(whole)
    rows = [*range(64), 4096]
    close(mixed, (out[rows], lse[rows]))


CHUNKS = [1, 7, 64, 127, 128, 129, 1000]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_prompt_in_chunks_of_queries(device: str, chunk: int, seed: int) -> None:
    whole = build_case("prompt", [(1000, 1000)], (2, 1, 64, 128), CAUSAL, device, torch.float32, seed)
    query, key, value = whole.args
    parts = []
    for start in range(0, 1000, chunk):
        stop = min(start + chunk, 1000)
        options = {**whole.kwargs, **_lengths([stop - start], [stop], device)}
        parts.append(attend(OpCase("chunk", (query[start:stop], key, value), options)))
    close([torch.cat(side) for side in zip(*parts, strict=True)], attend(whole))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_context_in_chunks_of_keys_merged(device: str, chunk: int, seed: int) -> None:
    # The last 8 tokens of a prompt of 1000: first their own keys with a mask, then the 992 cached ones piece by piece.
    whole = build_case("tail", [(8, 1000)], (2, 1, 64, 0), CAUSAL, device, torch.float32, seed)
    query, key, value = whole.args
    out, lse = _packed(query, key[992:], value[992:], whole, SPARSE_CAUSAL)
    for start in range(0, 992, chunk):
        stop = min(start + chunk, 992)
        part, part_lse = _packed(query, key[start:stop], value[start:stop], whole, 0)
        out, lse = attention_update([lse, part_lse], [out, part])
    # Up to a thousand merges round once each.
    wanted, wanted_lse = attend(whole)
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-4)
    torch.testing.assert_close(lse, wanted_lse, atol=2e-5, rtol=2e-5)


def _lengths(qlens: Sequence[int], klens: Sequence[int], device: str) -> dict[str, Any]:
    qsum = torch.tensor(qlens).cumsum(0).tolist()
    return {
        "actual_seq_qlen": qsum,
        "actual_seq_kvlen": list(klens),
        "query_start_loc": torch.tensor([0, *qsum], dtype=torch.int32, device=device),
        "seq_lens": torch.tensor(klens, dtype=torch.int32, device=device),
    }


def _packed(query: Tensor, key: Tensor, value: Tensor, like: OpCase, mode: int) -> tuple[Tensor, Tensor]:
    options = {**like.kwargs, **_lengths([len(query)], [len(key)], str(query.device)), "sparse_mode": mode}
    return attend(OpCase("packed", (query, key.contiguous(), value.contiguous()), options))


def test_context_that_ends_before_the_last_chunk(device: str, seed: int) -> None:
    # Contexts of 256 and 64 tokens in chunks of 128: lengths [[128, 64], [128, 0]].
    batch = [(5, 261), (3, 67)]
    whole = build_case("context", batch, (4, 2, 64, 16), CAUSAL, device, torch.float32, seed)
    query, key_cache, value_cache = whole.args
    table = whole.kwargs["block_table"]

    def part(offsets: list[int], lens: list[int], mode: int) -> tuple[Tensor, Tensor]:
        rows = torch.empty(2, sum(lens), 2, 64, device=device)
        device_lens, starts = (torch.tensor(x, dtype=torch.int32, device=device) for x in (lens, offsets))
        gather_kv_cache(key_cache, value_cache, table, device_lens, *rows, seq_offset=starts)
        options = {**whole.kwargs, **_lengths([5, 3], lens, device), "block_table": None, "block_size": 0}
        options |= {"actual_seq_kvlen": torch.tensor(lens).cumsum(0).tolist(), "sparse_mode": mode}
        return attend(OpCase("part", (query, *rows), options))

    parts = [part([0, 0], [128, 64], 0), part([128, 64], [128, 0], 0), part([256, 64], [5, 3], SPARSE_CAUSAL)]
    assert (parts[1][1][5:] == -math.inf).all()
    out, lse = attention_update([p[1] for p in parts], [p[0] for p in parts])
    close((out, lse), attend(whole))


mixed_batches = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.integers(1, 90)),
        st.integers(1, 40).flatmap(lambda q: st.tuples(st.just(q), st.integers(q, 90))),
        st.just((0, 0)),
    ),
    min_size=1,
    max_size=6,
)


def select(case: OpCase, requests: Sequence[int], device: str) -> tuple[OpCase, list[int]]:
    """The same paged tensors seen by some of the requests, in this order, and their query rows in the whole batch."""
    qsum = [0, *case.kwargs["actual_seq_qlen"]]
    rows = [row for i in requests for row in range(qsum[i], qsum[i + 1])]
    qlens, klens = [qsum[i + 1] - qsum[i] for i in requests], [case.kwargs["actual_seq_kvlen"][i] for i in requests]
    options = {
        **case.kwargs,
        **_lengths(qlens, klens, device),
        "block_table": case.kwargs["block_table"][list(requests)],
    }
    query, key, value = case.args
    return OpCase("selected", (query[rows], key, value), options), rows


@given(batch=mixed_batches, data=st.data())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_split_and_order_of_the_batch_do_not_matter(
    device: str, dtype: torch.dtype, batch: list[tuple[int, int]], data: st.DataObject
) -> None:
    case = build_case("batch", batch, (4, 2, 64, 16), CAUSAL, device, dtype, len(batch))
    out, lse = attend(case)
    order = data.draw(st.permutations(range(len(batch))))
    cut = data.draw(st.integers(1, len(batch)))
    for requests in (order, order[:cut], order[cut:], sorted(order[:cut])):
        if requests:
            part, rows = select(case, requests, device)
            close(attend(part), (out[rows], lse[rows]))


def test_cache_past_2_to_31_elements(device: str) -> None:
    # Blocks 16383 and 16384 of 16 * 32 * 256 elements stand on both sides of 2^31; the rest is never touched.
    key, value = (torch.empty(16385, 16, 32, 256, dtype=torch.bfloat16, device=device) for _ in range(2))
    table = torch.tensor([[16384, 0, 16383]], dtype=torch.int32, device=device)
    rows = torch.randn(2, 48, 32, 256).bfloat16()
    for cache, part in zip((key, value), rows, strict=True):
        for turn, block in enumerate(table[0].tolist()):
            cache[block] = part[16 * turn : 16 * turn + 16]
    query = torch.randn(4, 32, 256).bfloat16().to(device)
    options = {**_lengths([4], [48], device), "num_query_heads": 32, "num_key_value_heads": 32, "softmax_scale": 1 / 16}
    options |= {"sparse_mode": SPARSE_CAUSAL, "return_softmax_lse": True}
    paged = attend(OpCase("far", (query, key, value), {**options, "block_table": table, "block_size": 16}))
    close(paged, attend(OpCase("near", (query, *rows.to(device)), options)))


# What is changed in a good call, and the part of the message that says what is required, what came, and what to do.
BAD_CALLS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "head-dim": (
        lambda c: {name: c[name][..., :48].contiguous() for name in ("query", "key", "value")},
        "a head dim of (64, 80, 96, 128, 192, 256) is required, got 48. Pad the heads",
    ),
    "dtype": (
        lambda c: {"query": c["query"].double()},
        "a bf16, fp16 or fp32 query is required, got torch.float64. Cast",
    ),
    "mixed-dtypes": (
        lambda c: {"key": c["key"].half()},
        "key and value of torch.bfloat16 is required, got torch.float16 and",
    ),
    "query-rank": (lambda c: {"query": c["query"][None]}, "a query [T, N, D] is required, got (1, 5, 4, 64). Pack"),
    "value-shape": (lambda c: {"value": c["value"][:1]}, "one shape, or packed keys of 192 with values of 128, is"),
    "strided-cache": (
        lambda c: {name: c[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("key", "value")},
        "contiguous key and value is required, got strides",
    ),
    "heads": (
        lambda c: {"num_query_heads": 8},
        "num_query_heads equal to the query's heads, at most 256, is required, got 8",
    ),
    "kv-heads": (
        lambda c: {"num_key_value_heads": 4},
        "a key [..., num_key_value_heads=4, D=64] is required, got (4, 16, 2, 64)",
    ),
    "ratio": (
        lambda c: {"query": c["query"].repeat(1, 33, 1), "num_query_heads": 132},
        "a whole number of query heads to a KV head, at most 64, is required, got 132 to 2",
    ),
    "sparse-mode": (
        lambda c: {"sparse_mode": 2},
        "sparse_mode 0, 3 or 4 is required, got 2. Use 3 for causal attention",
    ),
    "window": (
        lambda c: {"sparse_mode": 4, "pre_tokens": -1},
        "pre_tokens and next_tokens of at least 0 is required, got -1 and",
    ),
    "sink": (
        lambda c: {"learnable_sink": torch.ones(3)},
        "a sink of shape (4,) in torch.bfloat16 or torch.float32 is required, got (3,)",
    ),
    "counts": (
        lambda c: {"actual_seq_kvlen": [20]},
        "1 to 4096 lengths, as many of keys as of queries is required, got 2 and 1",
    ),
    "falling": (
        lambda c: {"actual_seq_qlen": [5, 4]},
        "cumulative query lengths up to 5 is required, got [5, 4]. Cumulate",
    ),
    "too-long": (lambda c: {"actual_seq_qlen": [1, 6]}, "cumulative query lengths up to 5 is required, got [1, 6]"),
    "device-lengths": (
        lambda c: {"seq_lens": c["seq_lens"].long()},
        "int32 query_start_loc [3] and seq_lens [2] is required, got torch.int32 (3,) and torch.int64 (2,)",
    ),
    "block-size": (
        lambda c: {"block_size": 17},
        "a block size of 16 to 256 in steps of 16 is required, got 17. Start vLLM with",
    ),
    "block-shape": (lambda c: {"block_size": 32}, "a paged key [blocks, 32, N_kv, D] is required, got (4, 16, 2, 64)"),
    "block-table": (
        lambda c: {"block_table": c["block_table"].long()},
        "an int32 block table of at least [2, 2] is required, got torch.int64 (2, 4)",
    ),
    "narrow-table": (
        lambda c: {"block_table": c["block_table"][:, :1]},
        "an int32 block table of at least [2, 2] is required",
    ),
    "no-table": (
        lambda c: {"block_table": None},
        "a packed key [T_kv, N_kv, D] and block_size 0 without a block table is required",
    ),
    "negative": (lambda c: {"actual_seq_kvlen": [20, -1]}, "key lengths of at least 0 is required, got -1"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_say_what_to_do(device: str, name: str) -> None:
    case = build_case("good", [(1, 20), (4, 9)], (4, 2, 64, 16), CAUSAL, device, torch.bfloat16, 0)
    good = {**dict(zip(("query", "key", "value"), case.args, strict=True)), **case.kwargs}
    change, message = BAD_CALLS[name]
    with pytest.raises(ContractError) as error:
        fused_infer_attention(**{**good, **change(good)})
    assert str(error.value).startswith("fused_infer_attention: ")
    assert message in str(error.value)


def test_contiguous_keys_want_cumulative_lengths(device: str) -> None:
    case = build_case("packed", [(1, 20), (4, 9)], (4, 2, 64, 0), CAUSAL, device, torch.bfloat16, 0)
    with pytest.raises(ContractError, match=r"cumulative key lengths up to 29 is required, got \[20, 9\]\. Contiguous keys"):
        fused_infer_attention(*case.args, **{**case.kwargs, "actual_seq_kvlen": [20, 9]})
