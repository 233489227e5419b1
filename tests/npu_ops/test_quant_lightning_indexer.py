from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from fla.ops.dsa.naive import naive_dsa_indexer
from torch import Tensor

from npu_ops.contract import ContractError, OpCase
from npu_ops.lightning_indexer import DIM, build_case, lightning_indexer
from npu_ops.quant_lightning_indexer import SCALES, quant_lightning_indexer, quantised

OPS = ("quant_lightning_indexer",)
by_kind = pytest.mark.parametrize("kind", SCALES, ids=str)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


def plain(batch: list[tuple[int, int]], heads: int, count: int) -> OpCase:
    """A call of the form without scales, on the CPU."""
    return build_case("", (batch, heads, 16, count, 0), "cpu", torch.float32, 1, {})


def quantise(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows in 8 bits, and their scales."""
    largest = 127 if kind == torch.int8 else 448
    scale = (x.abs().amax(-1) / largest).to(SCALES[kind])
    rows = x / scale[..., None].float()
    return (rows.round().clamp(-127, 127) if kind == torch.int8 else rows.clamp(-448, 448)).to(kind), scale


@by_kind
def test_matches_fla_on_dequantised_rows(device: str, kind: torch.dtype) -> None:
    tokens, count = 80, 16
    query, query_scale = quantise(torch.randn(tokens, 16, DIM), kind)
    key, key_scale = quantise(torch.randn(tokens, DIM), kind)
    weights = torch.rand(tokens, 16).half().float()
    wide = query.float() * query_scale[..., None].float(), key.float() * key_scale[:, None].float()
    wanted = naive_dsa_indexer(wide[0][None], wide[1][None], weights[None], topk=count, activation="relu")
    one = {"dtype": torch.int32, "device": device}
    order = torch.tensor([3, 0, 4, 1, 2])
    pages = key.view(5, 16, 1, DIM).view(torch.int8)[order.argsort()].view(kind)
    indices = quant_lightning_indexer(
        query.to(device), pages.to(device), weights.half().to(device),
        query_scale.to(device), key_scale.view(5, 16, 1)[order.argsort()].to(device),
        actual_seq_lengths_query=torch.tensor([tokens], **one), actual_seq_lengths_key=torch.tensor([tokens], **one),
        block_table=order.to(**one)[None], sparse_count=count, max_seq_len=tokens,
    )  # fmt: skip
    same = [len({x for x in row if x >= 0} & set(ours)) / min(t + 1, count)
            for t, (row, ours) in enumerate(zip(wanted[0].tolist(), indices[:, 0].tolist(), strict=True))]  # fmt: skip
    assert min(same) == 1.0


@by_kind
def test_scales_of_one_are_the_form_without(device: str, kind: torch.dtype) -> None:
    case = plain([(4, 150), (3, 90)], 4, 16)
    query, key, weights, *scales = quantised(case, kind, device, torch.float16, 1).args
    ones = [torch.where(x.isnan(), x, 1) for x in scales]
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in case.kwargs.items()}
    wanted = lightning_indexer(*(x.to(device) for x in case.args), **options)
    assert torch.equal(quant_lightning_indexer(query, key, weights, *ones, **options), wanted)
    assert not torch.equal(quant_lightning_indexer(query, key, weights, *scales, **options), wanted)


@by_kind
def test_slices_change_nothing(device: str, kind: torch.dtype) -> None:
    case = quantised(plain([(6, 8190)], 4, 64), kind, device, torch.float16, 2)
    whole = quant_lightning_indexer(*case.args, **case.kwargs)
    assert torch.equal(quant_lightning_indexer(*case.args, **case.kwargs, logits_bytes=2**15), whole)
    assert (whole >= 0).all()


def test_bad_calls_say_what_to_do(device: str) -> None:
    case = quantised(plain([(2, 40)], 4, 16), torch.int8, device, torch.float16, 1)
    names = ("query", "key", "weights", "query_dequant_scale", "key_dequant_scale")
    given = dict(zip(names, case.args, strict=True)) | case.kwargs
    scale, pages = given["query_dequant_scale"], given["key_dequant_scale"]
    for name, value, text in (
        ("query", given["query"].half(), r"a query \[T, N1, 128\] in int8 or float8_e4m3fn with N1 of 1 to 64 is required"),
        ("key", given["key"].half(), r"a key in torch\.int8 is required, got torch\.float16"),
        ("query_dequant_scale", scale.float(), r"a query_dequant_scale \[2, 4\] in torch\.float16 is required"),
        ("key_dequant_scale", pages[..., 0], r"a contiguous key_dequant_scale \[\d+, 16, 1\] in torch\.float16 is required"),
        ("sparse_count", 3072, r"a sparse_count of 1 to 2048 is required, got 3072"),
    ):
        with pytest.raises(ContractError, match=text):
            quant_lightning_indexer(**{**given, name: value})
    assert math.isnan(float(pages.flatten()[0]))  # block 0 is nobody's
