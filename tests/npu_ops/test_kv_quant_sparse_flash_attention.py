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
from npu_ops.kv_quant_sparse_flash_attention import kv_quant_sparse_flash_attention, pack_case
from npu_ops.pack_sparse_kv import pack_sparse_kv, unpack_sparse_kv
from npu_ops.sparse_flash_attention import build_sparse_case, sparse_flash_attention

OPS = ("kv_quant_sparse_flash_attention",)
CONTRACT = all_contracts()["kv_quant_sparse_flash_attention"]
DTYPES = tuple(CONTRACT.tolerance)
BATCH = [(1, 15), (2, 16), (0, 0), (3, 17), (1, 127), (0, 5), (4, 128), (2, 129), (2, 0), (5, 3), (1, 1)]


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


def attend(case: OpCase, **changes: Any) -> tuple[Tensor, Tensor]:
    return kv_quant_sparse_flash_attention(*case.args, **{**case.kwargs, **changes})


def close(actual: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Equal within the op's tolerance for ``dtype``, LSEs too: scores are those of keys rounded to it."""
    bound = CONTRACT.tolerance[dtype]
    for part, whole in zip(actual, wanted, strict=True):
        torch.testing.assert_close(part.float().cpu(), whole.float().cpu(), atol=bound.atol, rtol=bound.rtol)


def quantise(latent: Tensor) -> Tensor:
    """What int8 in tiles of 128 leaves of latent rows [..., 512]; scales are fp32, or a value halfway goes another way."""
    tiles = latent.float().unflatten(-1, (4, 128))
    step = tiles.abs().amax(-1, keepdim=True) / 127
    return (torch.round(tiles / step.where(step > 0, 1.0)).double() * step).flatten(-2)


def simulated(case: OpCase) -> tuple[Tensor, Tensor]:
    """Attention in fp64 over the rows of an unpacked case after simulated quantisation; -inf hides what is not named."""
    query, latent, indices = (x.cpu() for x in case.args)
    options = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in case.kwargs.items()}
    query = torch.cat((query, options["query_rope"]), -1).double()
    out, lse = torch.zeros(*query.shape[:2], 512).double(), torch.full(query.shape[:2], -math.inf).double()
    ends, keys = options["actual_seq_lengths_query"].tolist(), options["actual_seq_lengths_kv"].tolist()
    for request, (begin, end) in enumerate(pairwise((0, *ends))):
        blocks = options["block_table"][request].long()
        values = quantise(latent[blocks].flatten(0, 2)[: keys[request]])
        cache = torch.cat((values, options["key_rope"].bfloat16()[blocks].flatten(0, 2)[: keys[request]].double()), -1)
        for row in range(begin, end):
            limit = keys[request] - (end - row - 1) * (options["sparse_mode"] == 3)
            named = [i for i in indices[row, 0].tolist() if 0 <= i < limit]
            if named:
                hidden = torch.full((keys[request],), -math.inf).double().index_fill(0, torch.tensor(named), 0.0)
                scores = query[row] @ cache.t() * options["scale_value"] + hidden
                out[row], lse[row] = scores.softmax(-1) @ cache[:, :512], scores.logsumexp(-1)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 16, 130])
@pytest.mark.parametrize("mode", [0, 3])
def test_against_simulated_quantisation(device: str, heads: int, mode: int, dtype: torch.dtype, seed: int) -> None:
    case = build_sparse_case("edges", BATCH, heads, 40, 16, {"sparse_mode": mode}, device, dtype, seed, 3)
    close(attend(pack_case(case)), simulated(case), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, 33, 64, 65, 200])
def test_is_attention_over_unpacked_rows(device: str, count: int, dtype: torch.dtype, seed: int) -> None:
    case = pack_case(build_sparse_case("count", [(3, 150), (1, 40), (20, 20)], 8, count, 128, {}, device, dtype, seed))
    query, packed, indices = case.args
    latent, rope = unpack_sparse_kv(packed, dtype)
    nope, query_rope = query.tensor_split((512,), -1)
    wanted = sparse_flash_attention(nope, latent, indices, query_rope=query_rope, key_rope=rope, **case.kwargs)
    close(attend(case), wanted, dtype)


def test_error_against_bf16(device: str, seed: int) -> None:
    """What int8 costs beside a cache in bf16, for normal rows: an error of about 1.1 % of the output's size, as root mean
    squares, where bf16 has 0.2 %.
    """
    case = build_sparse_case("error", [(16, 400), (1, 90)], 16, 128, 128, {}, device, torch.bfloat16, seed)
    exact = sparse_flash_attention(*(x.float() if x.is_floating_point() else x for x in case.args), **{
        name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in case.kwargs.items()
    })  # fmt: skip
    errors = []
    # int8 of a tile of 128 normal numbers has steps of about 2.8 / 127, an error of 0.0064 by root mean square.
    for out, lse in (sparse_flash_attention(*case.args, **case.kwargs), attend(pack_case(case))):
        size = exact[0].square().mean().sqrt()
        errors.append(((out.float() - exact[0]).square().mean().sqrt() / size).item())
        assert (lse - exact[1]).abs().max().item() < 0.05
    plain, quantised = errors
    print(f"root mean square error: bf16 {plain:.4%}, int8 {quantised:.4%}")
    assert plain < 0.003
    assert 0.005 < quantised < 0.015


def test_without_lse(device: str, seed: int) -> None:
    case = pack_case(build_sparse_case("plain", BATCH, 5, 20, 16, {}, device, torch.bfloat16, seed, 2))
    out, lse = attend(case, return_softmax_lse=False)
    assert lse.shape == (0,)
    close((out,), attend(case)[:1], torch.bfloat16)


@pytest.mark.parametrize("wants_lse", [False, True])
def test_rows_without_keys(device: str, wants_lse: bool, seed: int) -> None:
    case = pack_case(build_sparse_case("empty", [(4, 20), (2, 0), (3, 3)], 3, 10, 16, {}, device, torch.bfloat16, seed, 2))
    indices = case.args[2]
    indices[:, 0] = -1
    indices[1, 0, :2] = torch.tensor([5, 19], dtype=torch.int32)
    indices[2, 0, :2] = torch.tensor([19, 21], dtype=torch.int32)
    indices[4:6, 0], indices[9:, 0] = 0, 0
    out, lse = attend(case, return_softmax_lse=wants_lse)
    assert out[1].isfinite().all()
    others = [row for row in range(11) if row != 1]
    assert not out[others].any()
    if wants_lse:
        assert lse[1].isfinite().all()
        assert (lse[others] == -math.inf).all()


def test_dummy_rows_and_none(device: str, seed: int) -> None:
    """Decodes without keys, whose table names blocks that are not there; and no row at all."""
    case = pack_case(build_sparse_case("dummy", [(1, 0)] * 8, 4, 32, 128, {}, device, torch.bfloat16, seed))
    case.kwargs["block_table"].fill_(2**31 - 1)
    case.args[2][:] = torch.arange(32, dtype=torch.int32)
    out, lse = attend(case)
    assert not out.any()
    assert (lse == -math.inf).all()
    case = pack_case(build_sparse_case("nothing", [(0, 9), (0, 0)], 4, 8, 16, {}, device, torch.bfloat16, seed))
    assert [x.shape for x in attend(case)] == [(0, 4, 512), (0, 4)]


def test_parts_merge_by_lse(device: str, seed: int) -> None:
    """Even and odd indices apart, as two ranks would have them."""
    case = pack_case(build_sparse_case("parts", [(4, 70), (3, 5), (1, 0)], 4, 30, 16, {}, device, torch.float32, seed))
    parts = []
    for parity in (0, 1):
        mine = torch.where(case.args[2] % 2 == parity, case.args[2], 2**30).sort(-1).values
        mine = torch.where(mine == 2**30, -1, mine)
        parts.append(kv_quant_sparse_flash_attention(*case.args[:2], mine, **case.kwargs))
    merged = attention_update([lse for _, lse in parts], [out for out, _ in parts])
    close(merged, attend(case), torch.float32)


def test_blocks_past_2_to_31_bytes(device: str, seed: int) -> None:
    case = pack_case(build_sparse_case("far", [(2, 40)], 2, 8, 16, {}, device, torch.bfloat16, seed))
    query, packed, indices = case.args
    first = 2**31 // (656 * 16) + 1
    far = torch.empty((first + len(packed), *packed.shape[1:]), dtype=torch.int8, device=device)
    far[: len(packed)] = 0
    far[first:] = packed
    table = case.kwargs["block_table"] + first
    for wants_lse in (False, True):
        options = {"block_table": table, "return_softmax_lse": wants_lse}
        ours = kv_quant_sparse_flash_attention(query, far, indices, **{**case.kwargs, **options})
        wanted = attend(case, return_softmax_lse=wants_lse)
        assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


def test_bad_calls_say_what_to_do(device: str, seed: int) -> None:
    case = pack_case(build_sparse_case("bad", [(3, 20), (1, 4)], 4, 8, 16, {}, device, torch.bfloat16, seed))
    query, packed, indices = case.args
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"query": query[..., :512]}, r"a query \[T, N, 576\] in bf16 or fp32 is required, got torch\.bfloat16 \(4, 4, 512\)"),
        ({"query": query.half()}, r"a query \[T, N, 576\] in bf16 or fp32 is required, got torch\.float16"),
        ({"key_value": packed.view(torch.uint8)}, r"a contiguous int8 cache \[blocks, block_size, 1, 656\]"),
        ({"key_value": packed[..., :576].contiguous()}, r"a contiguous int8 cache \[blocks, block_size, 1, 656\]"),
        ({"key_value": packed.view(-1, 8, 1, 656)}, "a block_size that is a multiple of 16 is required, got 8"),
        ({"sparse_indices": indices.long()}, r"int32 sparse_indices \[4, 1, K\]"),
        ({"sparse_mode": 1}, "sparse_mode 0 or 3 is required, got 1"),
    ]
    named = dict(zip(("query", "key_value", "sparse_indices"), case.args, strict=True)) | case.kwargs
    for changes, text in wrong:
        with pytest.raises(ContractError, match=text):
            kv_quant_sparse_flash_attention(**{**named, **changes})
    rows = pack_sparse_kv(torch.zeros(3, 512, device=device), torch.zeros(3, 64, device=device))
    assert rows.shape[1] == packed.shape[3]
