from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from fla.ops.dsa.naive import naive_dsa
from torch import Tensor

from npu_ops.attention_update import attention_update
from npu_ops.contract import ContractError, OpCase, all_contracts
from npu_ops.sparse_flash_attention import build_sparse_case, sparse_flash_attention

OPS = ("sparse_flash_attention",)
CONTRACT = all_contracts()["sparse_flash_attention"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


def attend(case: OpCase, **changes: Any) -> tuple[Tensor, Tensor]:
    return sparse_flash_attention(*case.args, **{**case.kwargs, **changes})


def close(actual: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Equal within the op's tolerance for ``dtype``; the second of a pair, an LSE, within fp32's."""
    for part, whole, kind in zip(actual, wanted, (dtype, torch.float32), strict=False):
        bound = CONTRACT.tolerance[kind]
        torch.testing.assert_close(part.float().cpu(), whole.float().cpu(), atol=bound.atol, rtol=bound.rtol)


def dense(case: OpCase) -> tuple[Tensor, Tensor]:
    """Attention in fp64 over all keys of each request, those that a row does not name or see hidden by a mask."""
    query, latent, indices = (x.cpu() for x in case.args)
    options = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in case.kwargs.items()}
    query = torch.cat((query, options["query_rope"]), -1).double()
    results, logs = torch.zeros(*query.shape[:2], 512, dtype=torch.float64), torch.full(query.shape[:2], -math.inf).double()
    ends, keys = options["actual_seq_lengths_query"].tolist(), options["actual_seq_lengths_kv"].tolist()
    for request, (begin, end) in enumerate(pairwise((0, *ends))):
        blocks = options["block_table"][request].long()
        cache = torch.cat((latent[blocks], options["key_rope"][blocks]), -1).flatten(0, 2)[: keys[request]].double()
        for row in range(begin, end):
            limit = keys[request] - (end - row - 1) * (options["sparse_mode"] == 3)
            named = [i for i in indices[row, 0].tolist() if 0 <= i < limit]
            if named:
                mask = torch.full((keys[request],), -math.inf).double()
                mask[named] = 0
                scores = query[row] @ cache.t() * options["scale_value"] + mask
                results[row] = scores.softmax(-1) @ cache[:, :512]
                logs[row] = scores.logsumexp(-1)
    return results, logs


@pytest.mark.parametrize("heads", [1, 2, 3, 16, 20, 128, 130])
@pytest.mark.parametrize("mode", [0, 3])
def test_against_dense_attention(device: str, heads: int, mode: int, seed: int) -> None:
    batch = [(1, 15), (2, 16), (0, 0), (3, 17), (1, 127), (0, 5), (4, 128), (2, 129), (2, 0), (5, 3), (1, 1)]
    case = build_sparse_case("edges", batch, heads, 40, 16, {"sparse_mode": mode}, device, torch.float32, seed, 3)
    close(attend(case), dense(case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, 31, 32, 33, 64, 65, 200])
def test_any_number_of_indices(device: str, count: int, dtype: torch.dtype, seed: int) -> None:
    case = build_sparse_case("count", [(3, 150), (1, 40), (20, 20)], 8, count, 128, {}, device, dtype, seed)
    close(attend(case), dense(case), dtype)


def test_without_lse(device: str, seed: int) -> None:
    case = build_sparse_case("plain", [(2, 40), (3, 2)], 5, 20, 16, {}, device, torch.bfloat16, seed, 2)
    out, lse = attend(case, return_softmax_lse=False)
    assert lse.shape == (0,)
    close((out,), attend(case), torch.bfloat16)


@pytest.mark.parametrize("length", [1, 5, 2047, 2048, 2049])
def test_all_keys_named_is_dense_attention(device: str, length: int, seed: int) -> None:
    """Top-k of 2048 on a context around it: below it all keys are named, the rest is -1, and sparse equals dense."""
    case = build_sparse_case("top-k", [(2, length)], 2, 2048, 128, {}, device, torch.float32, seed)
    latent, keys, indices = case.args
    limits = [length - 1, length]
    for row, limit in zip(indices[:, 0], limits, strict=True):
        count = min(limit, 2048)
        row[:count] = torch.arange(count, dtype=torch.int32)
        row[count:] = -1
    out, lse = attend(case)
    close((out, lse), dense(case))
    if length <= 2048:
        cache = torch.cat((keys, case.kwargs["key_rope"]), -1)[case.kwargs["block_table"][0].long()].flatten(0, 2)[:length]
        query = torch.cat((latent, case.kwargs["query_rope"]), -1)
        visible = torch.ones(2, length, dtype=torch.bool, device=device).tril(length - 2)
        for row, seen in enumerate(visible):
            if seen.any():
                wanted = torch.nn.functional.scaled_dot_product_attention(
                    query[row, :, None].cpu().double()[None], cache.cpu().double().expand(2, -1, -1)[None],
                    cache[:, :512].cpu().double().expand(2, -1, -1)[None], seen.cpu()[None], scale=case.kwargs["scale_value"],
                )  # fmt: skip
                close((out[row],), (wanted[0, :, 0],))


def test_against_fla(device: str, seed: int) -> None:
    """Whole requests, as fla-core takes them: keys of 576, of which the last 64 dims are no values."""
    lengths = [33, 1, 16]
    case = build_sparse_case("fla", [(n, n) for n in lengths], 4, 12, 16, {}, device, torch.float32, seed)
    query = torch.cat((case.args[0], case.kwargs["query_rope"]), -1).cpu()
    tables = case.kwargs["block_table"].cpu().long()
    whole = torch.cat((case.args[1], case.kwargs["key_rope"]), -1).cpu()
    keys = torch.cat([whole[table].flatten(0, 1)[:n] for table, n in zip(tables, lengths, strict=True)])
    starts = torch.tensor([0, *lengths]).cumsum(0)
    indices = case.args[2].cpu().long()
    ends = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))[:, None, None]
    indices = indices.masked_fill(indices >= ends, -1)  # fla hides what lies after the row, but knows no end
    # Its results are as wide as the keys for one loop over requests; values are padded and cut.
    values = torch.nn.functional.pad(keys[..., :512], (0, 64)).expand(-1, 4, -1)
    wanted = naive_dsa(
        query[None], keys.expand(-1, 4, -1)[None], values[None], None, None, indices=indices[None, :, 0],
        scale=case.kwargs["scale_value"], cu_seqlens=starts,
    )[0, ..., :512]  # fmt: skip
    seen = ~wanted.isnan().any(-1).any(-1)  # there a row without keys is NaN
    out, lse = attend(case)
    close((out.cpu()[seen],), (wanted[seen],))
    assert not out.cpu()[~seen].any()
    assert (lse.cpu()[~seen] == -math.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", [0, 3])
def test_rows_without_keys(device: str, mode: int, dtype: torch.dtype, seed: int) -> None:
    """No index, only indices past the row or past the keys, no keys at all, and padding: output 0 and LSE -inf."""
    batch = [(4, 20), (2, 0), (3, 3)]
    case = build_sparse_case("empty", batch, 3, 10, 16, {"sparse_mode": mode}, device, dtype, seed, 2)
    indices = case.args[2]
    indices[:, 0] = -1
    indices[1, 0, :3] = torch.tensor([5, 6, 7], dtype=torch.int32)
    indices[2, 0, :2] = torch.tensor([20, 21], dtype=torch.int32)
    indices[6, 0, 0] = 1  # of three rows over three keys the first sees key 0 alone
    indices[8, 0, 0] = 2
    indices[9:, 0] = 0
    out, lse = attend(case)
    live = [1, 6, 8] if mode == 0 else [1, 8]
    others = [row for row in range(11) if row not in live]
    assert out[live].isfinite().all()
    assert lse[live].isfinite().all()
    assert not out[others].any()
    assert (lse[others] == -math.inf).all()


def test_a_batch_of_dummy_rows(device: str, seed: int) -> None:
    """Eight decodes without keys, whose table names blocks that are not there."""
    case = build_sparse_case("dummy", [(1, 0)] * 8, 16, 64, 128, {}, device, torch.bfloat16, seed)
    case.kwargs["block_table"].fill_(2**31 - 1)
    case.args[2][:] = torch.arange(64, dtype=torch.int32)
    out, lse = attend(case)
    assert not out.any()
    assert (lse == -math.inf).all()


def test_no_rows_at_all(device: str, seed: int) -> None:
    case = build_sparse_case("nothing", [(0, 9), (0, 0)], 4, 8, 16, {}, device, torch.bfloat16, seed)
    assert [x.shape for x in attend(case)] == [(0, 4, 512), (0, 4)]


def test_only_named_keys_are_read(device: str, seed: int) -> None:
    case = build_sparse_case("poison", [(3, 90), (2, 40)], 4, 6, 16, {}, device, torch.float32, seed)
    before = attend(case)
    _, latent, indices = case.args
    keep = torch.zeros(latent.shape[:2], dtype=torch.bool, device=device)
    for row, request in enumerate([0, 0, 0, 1, 1]):
        limit = [88, 89, 90, 39, 40][row]
        for position in indices[row, 0].tolist():
            if 0 <= position < limit:
                keep[case.kwargs["block_table"][request, position // 16].item(), position % 16] = True
    latent.masked_fill_(~keep[..., None, None], math.nan)
    case.kwargs["key_rope"].masked_fill_(~keep[..., None, None], math.nan)
    for ours, wanted in zip(attend(case), before, strict=True):
        assert torch.equal(ours, wanted)
        assert not ours.isnan().any()


def test_a_key_changes_the_rows_that_name_it_alone(device: str, seed: int) -> None:
    case = build_sparse_case("one-key", [(6, 60)], 4, 20, 16, {}, device, torch.float32, seed)
    before, _ = attend(case)
    _, latent, indices = case.args
    for position in (3, 17, 54, 58):
        changed = latent.clone()
        changed[case.kwargs["block_table"][0, position // 16].item(), position % 16] += 1
        after, _ = sparse_flash_attention(case.args[0], changed, indices, **case.kwargs)
        touched = [bool((indices[row, 0] == position).any()) and position <= 54 + row for row in range(6)]
        assert [not torch.equal(after[row], before[row]) for row in range(6)] == touched


def test_parts_merge_by_lse(device: str, seed: int) -> None:
    """Two halves of the indices, one of them empty for some rows, as two ranks would have them."""
    case = build_sparse_case("parts", [(4, 70), (3, 5), (1, 0)], 4, 30, 16, {}, device, torch.float32, seed)
    indices = case.args[2]
    parts = []
    for parity in (0, 1):
        mine = torch.where(indices % 2 == parity, indices, 2**30).sort(-1).values
        mine = torch.where(mine == 2**30, -1, mine)
        if parity:
            mine[2] = -1
        else:
            mine[2] = indices[2]
        parts.append(sparse_flash_attention(*case.args[:2], mine, **case.kwargs))
    close(attention_update([lse for _, lse in parts], [out for out, _ in parts]), attend(case))


def test_strides_change_nothing(device: str, seed: int) -> None:
    case = build_sparse_case("strides", [(3, 50), (2, 9)], 6, 12, 16, {}, device, torch.bfloat16, seed)
    query, key, indices = case.args
    wide = torch.cat((case.kwargs["block_table"],) * 2, 1)[:, : case.kwargs["block_table"].shape[1]]
    heads_first = query.transpose(0, 1).contiguous().transpose(0, 1)
    rope = torch.stack((case.kwargs["query_rope"],) * 2, -1)[..., 0]
    other = OpCase("", (heads_first, key, torch.stack((indices,) * 2, -1)[..., 0]), case.kwargs)
    for ours, wanted in zip(attend(other, query_rope=rope, block_table=wide), attend(case), strict=True):
        assert torch.equal(ours, wanted)


def test_blocks_past_2_to_31_elements(device: str, seed: int) -> None:
    case = build_sparse_case("far", [(2, 40)], 2, 8, 16, {}, device, torch.bfloat16, seed)
    first = 2**31 // (512 * 16) + 1
    caches = []
    for cache in (case.args[1], case.kwargs["key_rope"]):
        far = torch.empty((first + len(cache), *cache.shape[1:]), dtype=cache.dtype, device=device)
        far[: len(cache)] = 0  # where the blocks would be found, were 2^31 elements taken off
        far[first:] = cache
        caches.append(far)
    changes = {"key_rope": caches[1], "block_table": case.kwargs["block_table"] + first}
    far_case = OpCase("far", (case.args[0], caches[0], case.args[2]), case.kwargs | changes)
    for ours, wanted in zip(attend(far_case), attend(case), strict=True):
        assert torch.equal(ours, wanted)


def test_slices_of_rows_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build_sparse_case("slices", [(9, 40), (0, 3), (5, 5)], 4, 16, 16, {}, "cpu", torch.float32, seed, 2)
    whole = attend(case)
    for size in (1, 3 * 16 * 576 * 4):
        monkeypatch.setattr("npu_ops.reference.sparse_flash_attention.SLICE_BYTES", size)
        close(attend(case), whole)


def test_bad_calls_say_what_to_do(device: str, seed: int) -> None:
    case = build_sparse_case("bad", [(3, 20), (1, 4)], 4, 8, 16, {}, device, torch.bfloat16, seed)
    query, key, indices = case.args
    rope, table = case.kwargs["key_rope"], case.kwargs["block_table"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"query": query[..., :256]}, r"a query \[T, N, 512\] with a query_rope \[T, N, 64\] is required, got \(4, 4, 256\)"),
        ({"query_rope": case.kwargs["query_rope"][:3]}, r"with a query_rope \[T, N, 64\]"),
        ({"key_rope": rope.half()}, "bf16, fp16 or fp32 alike in queries and caches"),
        ({"key": key[..., :256].contiguous()}, r"caches \[blocks, block_size, 1, 512\] and \[blocks, block_size, 1, 64\]"),
        ({"key_rope": rope[:1]}, r"caches \[blocks, block_size, 1, 512\]"),
        ({"key": key.transpose(0, 1).contiguous().transpose(0, 1)}, "contiguous caches"),
        ({"sparse_indices": indices.long()}, r"int32 sparse_indices \[4, 1, K\] is required, got torch\.int64 \(4, 1, 8\)"),
        ({"sparse_indices": indices[:3]}, r"int32 sparse_indices \[4, 1, K\]"),
        ({"sparse_indices": indices[..., :0]}, r"int32 sparse_indices \[4, 1, K\]"),
        ({"key": key.view(-1, 8, 1, 512), "key_rope": rope.view(-1, 8, 1, 64)}, "a block_size that is a multiple of 16"),
        ({"actual_seq_lengths_kv": case.kwargs["actual_seq_lengths_kv"][:1]}, r"int32 actual_seq_lengths_query and"),
        ({"actual_seq_lengths_query": case.kwargs["actual_seq_lengths_query"].long()}, r"int32 actual_seq_lengths_query and"),
        ({"block_table": table[:1]}, r"an int32 block table of at least \[2, 1\]"),
        ({"block_table": table.long()}, r"an int32 block table of at least \[2, 1\]"),
        ({"sparse_mode": 4}, "sparse_mode 0 or 3 is required, got 4"),
    ]
    named = dict(zip(("query", "key", "sparse_indices"), case.args, strict=True)) | case.kwargs
    for changes, text in wrong:
        with pytest.raises(ContractError, match=text):
            sparse_flash_attention(**{**named, **changes})
