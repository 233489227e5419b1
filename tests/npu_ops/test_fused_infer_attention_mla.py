"""FIA in the two forms of multi-head latent attention: absorbed over a latent cache, and heads of 192 with values of 128."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_ops.attention_update import attention_update
from npu_ops.contract import ContractError, OpCase, all_contracts
from npu_ops.fused_infer_attention import build_case, build_latent_case, fused_infer_attention

CONTRACT = all_contracts()["fused_infer_attention"]
SCALE = 192**-0.5


def attend(case: OpCase, **changes: Any) -> tuple[Tensor, Tensor]:
    return fused_infer_attention(*case.args, **{**case.kwargs, **changes})


def close(actual: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Equal within the op's tolerance for ``dtype``; the second of a pair, an LSE, within fp32's."""
    for part, whole, kind in zip(actual, wanted, (dtype, torch.float32), strict=True):
        bound = CONTRACT.tolerance[kind]
        torch.testing.assert_close(part.float().cpu(), whole.float().cpu(), atol=bound.atol, rtol=bound.rtol)


def lengths(qlens: Sequence[int], klens: Sequence[int], device: str) -> dict[str, Any]:
    qsum = torch.tensor(qlens).cumsum(0).tolist()
    return {
        "actual_seq_qlen": qsum,
        "actual_seq_kvlen": list(klens),
        "query_start_loc": torch.tensor([0, *qsum], dtype=torch.int32, device=device),
        "seq_lens": torch.tensor(klens, dtype=torch.int32, device=device),
    }


def oracle(case: OpCase) -> tuple[Tensor, Tensor]:
    """PyTorch's scaled_dot_product_attention in fp64 with a mask written out, request by request."""
    options = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in case.kwargs.items()}
    query, key = case.args[0].cpu().double(), case.args[1].cpu().double()
    results, logs = torch.zeros_like(query), torch.full(query.shape[:2], -math.inf, dtype=torch.double)
    starts = [0, *options["actual_seq_qlen"]]
    for request, (begin, end) in enumerate(pairwise(starts)):
        keys, rows = options["actual_seq_kvlen"][request], end - begin
        if not keys or not rows:
            continue
        place = torch.arange(keys)
        size = options["block_size"]
        where = options["block_table"][request][place // size].long(), place % size
        latent, rope = key[where][:, 0], options["key_rope"].double()[where][:, 0]
        q = torch.cat((query[begin:end], options["query_rope"][begin:end].double()), -1).transpose(0, 1)
        k = torch.cat((latent, rope), -1).expand(len(q), -1, -1)
        seen = torch.ones(rows, keys, dtype=torch.bool)
        if options["sparse_mode"] == 3:
            seen = seen.tril(keys - rows)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], latent.expand(len(q), -1, -1)[None], seen, scale=options["softmax_scale"]
        )[0]
        results[begin:end] = attended.masked_fill(~seen.any(-1)[:, None], 0.0).transpose(0, 1)
        scores = (q @ k.transpose(1, 2) * options["softmax_scale"]).masked_fill(~seen, -math.inf)
        logs[begin:end] = scores.logsumexp(-1).t()
    return results, logs


@pytest.mark.parametrize("heads", [1, 2, 3, 16, 20, 128])
@pytest.mark.parametrize("block_size", [16, 128])
def test_against_pytorchs_attention(device: str, heads: int, block_size: int, seed: int) -> None:
    batch = [(1, 15), (2, 16), (0, 0), (3, 17), (1, 127), (0, 5), (4, 128), (16, 129), (2, 0), (5, 3), (1, 1)]
    for mode in (0, 3):
        case = build_latent_case("edges", batch, heads, block_size, {"sparse_mode": mode}, device, torch.float32, seed)
        close(attend(case), oracle(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", range(1, 17))
def test_every_number_of_rows(device: str, rows: int, dtype: torch.dtype, seed: int) -> None:
    batch = [(rows, 128 + rows), (1, 40), (rows, rows), (rows, 127)]
    case = build_latent_case("rows", batch, 4, 128, {"sparse_mode": 3}, device, dtype, seed)
    close(attend(case), oracle(case), dtype)


def test_long_requests_divided_among_programs(device: str, seed: int) -> None:
    batch = [(1, 3000), (2, 700), (1, 0), (1, 9)]
    case = build_latent_case("long", batch, 16, 128, {"sparse_mode": 3}, device, torch.bfloat16, seed)
    close(attend(case), oracle(case), torch.bfloat16)


def test_a_speculative_row_sees_its_own_key_and_none_after_it(device: str, seed: int) -> None:
    case = build_latent_case("draft", [(1, 30), (5, 133)], 16, 128, {"sparse_mode": 3}, device, torch.bfloat16, seed)
    before, _ = attend(case)
    query, latent, _ = case.args
    for row in range(5):
        block, slot = divmod(128 + row, 128)
        changed = latent.clone()
        changed[case.kwargs["block_table"][1, block].item(), slot] += 1
        after, _ = attend(OpCase("changed", (query, changed, changed), case.kwargs))
        same = [torch.equal(after[i], before[i]) for i in range(6)]
        assert same == [i < 1 + row for i in range(6)]


@pytest.mark.parametrize("heads", [2, 128])
def test_rows_together_are_decodes_one_by_one(device: str, heads: int, seed: int) -> None:
    case = build_latent_case("draft", [(4, 131), (4, 20)], heads, 16, {"sparse_mode": 3}, device, torch.float32, seed)
    query, latent, _ = case.args
    together = attend(case)
    for row in range(4):
        chosen, klens = [row, 4 + row], [128 + row, 17 + row]
        changes = {**lengths([1, 1], klens, device), "query_rope": case.kwargs["query_rope"][chosen], "sparse_mode": 0}
        close(attend(OpCase("one", (query[chosen], latent, latent), case.kwargs), **changes), [x[chosen] for x in together])


def test_absorbed_form_equals_heads_of_192(device: str, seed: int) -> None:
    """Up-projecting the latent rows and attending to heads of 192 is the same as absorbing the projections, in fp32."""
    heads, batch = 4, [(3, 140), (0, 0), (1, 17), (16, 16)]
    case = build_latent_case("absorbed", batch, heads, 128, {"sparse_mode": 3}, device, torch.float32, seed)
    generator = torch.Generator().manual_seed(seed)
    nope, up_key, up_value = (
        torch.randn(shape, generator=generator).to(device) / math.sqrt(shape[-1])
        for shape in ((20, heads, 128), (heads, 128, 512), (heads, 128, 512))
    )
    _, latent, _ = case.args
    rope, key_rope = case.kwargs["query_rope"], case.kwargs["key_rope"]
    absorbed = torch.einsum("thd,hdl->thl", nope, up_key)
    out, lse = attend(OpCase("absorbed", (absorbed, latent, latent), case.kwargs))
    klens = [k for _, k in batch]
    slots = torch.cat([
        case.kwargs["block_table"][i].long().repeat_interleave(128)[:k] * 128 + torch.arange(k, device=device) % 128
        for i, k in enumerate(klens)
    ])  # fmt: skip
    rows, rope_rows = latent.view(-1, 512)[slots], key_rope.view(-1, 1, 64)[slots].expand(-1, heads, -1)
    key = torch.cat((torch.einsum("sl,hdl->shd", rows, up_key), rope_rows), -1)
    value = torch.einsum("sl,hdl->shd", rows, up_value)
    packed = {
        **lengths([q for q, _ in batch], klens, device), "actual_seq_kvlen": torch.tensor(klens).cumsum(0).tolist(),
        "num_query_heads": heads, "num_key_value_heads": heads, "softmax_scale": SCALE, "sparse_mode": 3,
    }  # fmt: skip
    whole, whole_lse = fused_infer_attention(torch.cat((nope, rope), -1), key, value, **packed, return_softmax_lse=True)
    assert whole.shape == (20, heads, 128)
    torch.testing.assert_close(torch.einsum("thl,hdl->thd", out, up_value), whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [16, 50, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_context_of_narrow_values_in_chunks_merged(device: str, chunk: int, dtype: torch.dtype, seed: int) -> None:
    whole = build_case("mha", [(6, 206)], (4, 4, 192, 0), {"sparse_mode": 3}, device, dtype, seed, 128)
    query, key, value = whole.args

    def part(start: int, stop: int, mode: int) -> tuple[Tensor, Tensor]:
        changes = {**lengths([6], [stop - start], device), "sparse_mode": mode}
        return attend(OpCase("part", (query, key[start:stop], value[start:stop]), whole.kwargs), **changes)

    parts = [part(start, min(start + chunk, 200), 0) for start in range(0, 200, chunk)] + [part(200, 206, 3)]
    assert parts[0][0].shape == (6, 4, 128)
    merged = attention_update([lse for _, lse in parts], [out for out, _ in parts])
    close(merged, attend(whole), dtype)


@pytest.mark.parametrize("mode", [0, 3])
def test_dummy_batch_without_keys(device: str, mode: int, seed: int) -> None:
    case = build_latent_case("dummy", [(1, 0)] * 8, 16, 128, {"sparse_mode": mode}, device, torch.bfloat16, seed)
    out, lse = attend(case, block_table=torch.full((8, 4), 2**30, dtype=torch.int32, device=device))
    assert not out.any()
    assert (lse == -math.inf).all()


def test_rows_past_the_last_request_are_padding(device: str, seed: int) -> None:
    case = build_latent_case("padded", [(1, 20), (5, 9)], 3, 16, {"sparse_mode": 3}, device, torch.bfloat16, seed)
    query, rope = (torch.cat((x, x.new_full((3, *x.shape[1:]), math.nan))) for x in (case.args[0], case.kwargs["query_rope"]))
    out, lse = attend(OpCase("padded", (query, *case.args[1:]), case.kwargs), query_rope=rope)
    close((out[:6], lse[:6]), attend(case), torch.bfloat16)
    assert not out[6:].any()
    assert (lse[6:] == -math.inf).all()


def test_cache_past_2_to_31_elements(device: str) -> None:
    # Blocks 32767 and 32768 of 128 * 512 elements stand on both sides of 2^31; the rest is never touched.
    sizes = {"latent": 512, "rope": 64}
    caches = {name: torch.empty(32769, 128, 1, dim, dtype=torch.bfloat16, device=device) for name, dim in sizes.items()}
    near = {name: torch.randn(2, 128, 1, dim).bfloat16().to(device) for name, dim in sizes.items()}
    for name, cache in caches.items():
        cache[32768], cache[32767] = near[name]
    query, rope = torch.randn(2, 4, 512).bfloat16().to(device), torch.randn(2, 4, 64).bfloat16().to(device)
    options = {**lengths([2], [200], device), "num_query_heads": 4, "num_key_value_heads": 1, "softmax_scale": SCALE}
    options |= {"block_size": 128, "sparse_mode": 3, "return_softmax_lse": True, "query_rope": rope}
    results = []
    for part, blocks in ((caches, [32768, 32767]), (near, [0, 1])):
        table = torch.tensor([blocks], dtype=torch.int32, device=device)
        latent = part["latent"]
        options |= {"key_rope": part["rope"], "block_table": table}
        results.append(fused_infer_attention(query, latent, latent, **options))
    close(*results, torch.bfloat16)


BAD_CALLS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "no-key-rope": (lambda c: {"key_rope": None}, "query_rope and key_rope together, or neither, is required, got only query"),
    "no-query-rope": (lambda c: {"query_rope": None}, "got only key_rope. Pass the rope parts"),
    "neither": (lambda c: {"query_rope": None, "key_rope": None}, "a head dim of (64, 80, 96, 128, 192, 256) is required, got"),
    "swapped": (
        lambda c: {"query": c["query_rope"], "query_rope": c["query"]},
        "a query [T, N, 512] with a query_rope [T, N, 64] is required, got (5, 4, 64) with (5, 4, 512). Absorb",
    ),
    "rows-of-rope": (lambda c: {"query_rope": c["query_rope"][:4]}, "got (5, 4, 512) with (4, 4, 64)"),
    "contiguous": (
        lambda c: {"block_table": None, "block_size": 0},
        "a paged latent cache with a block size of 16 or 128 is required, got 0 without a block table",
    ),
    "block-size": (lambda c: {"block_size": 32}, "block size of 16 or 128 is required, got 32 with a block table. Start"),
    "caches-swapped": (
        lambda c: {"key": c["key_rope"], "key_rope": c["key"]},
        "a latent cache [blocks, 16, 1, 512] as key and value, key_rope [..., 64] and one KV head is required",
    ),
    "narrow-value": (lambda c: {"value": c["value"][..., :128]}, "a latent cache [blocks, 16, 1, 512] as key and value"),
    "kv-heads": (lambda c: {"num_key_value_heads": 2}, "one KV head is required"),
    "dtypes": (
        lambda c: {"key_rope": c["key_rope"].half()},
        "rope parts, key and value of torch.bfloat16 is required, got torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.f",
    ),
    "strided-cache": (
        lambda c: {"key_rope": torch.cat((c["key_rope"], c["key_rope"]), -1)[..., :64]},
        "contiguous latent and rope caches is required, got strides",
    ),
    "heads": (
        lambda c: {name: c[name].repeat(1, 33, 1) for name in ("query", "query_rope")} | {"num_query_heads": 132},
        "at most 128 heads over a latent cache is required, got 132. Raise the tensor parallel size",
    ),
    "band": (lambda c: {"sparse_mode": 4}, "sparse_mode 0 or 3 and no sink over a latent cache is required, got 4 without"),
    "sink": (lambda c: {"learnable_sink": torch.zeros(4)}, "no sink over a latent cache is required, got 3 with a sink"),
    "rows": (
        lambda c: {name: c[name][:1].expand(17, -1, -1) for name in ("query", "query_rope")}
        | lengths([17], [40], "cpu") | {"block_table": c["block_table"].expand(1, -1)},
        "at most 16 query rows to a request over a latent cache is required, got 17. Up-project",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_say_what_to_do(device: str, name: str) -> None:
    case = build_latent_case("good", [(5, 40)], 4, 16, {"sparse_mode": 3}, device, torch.bfloat16, 0)
    good = {**dict(zip(("query", "key", "value"), case.args, strict=True)), **case.kwargs}
    change, message = BAD_CALLS[name]
    with pytest.raises(ContractError) as error:
        fused_infer_attention(**{**good, **change(good)})
    assert str(error.value).startswith("fused_infer_attention: ")
    assert message in str(error.value)


@pytest.mark.parametrize("shape", [(192, 64), (128, 64), (192, 192, 128)], ids=str)
def test_no_other_pair_of_dims(device: str, shape: tuple[int, ...], seed: int) -> None:
    """Values narrower than keys are 128 beside 192, and never paged."""
    block_size = 16 if len(shape) == 3 else 0
    case = build_case("dims", [(2, 20)], (4, 4, shape[0], block_size), {"sparse_mode": 3}, device, torch.bfloat16, seed)
    query, key, value = case.args
    with pytest.raises(
        ContractError, match="key and value of one shape, or packed keys of 192 with values of 128, is required"
    ):
        fused_infer_attention(query, key, value[..., : shape[-1]].contiguous(), **case.kwargs)
