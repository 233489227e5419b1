from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm, apply_rotary_pos_emb_interleave

from npu_ops.contract import ELEMENTWISE, ContractError
from npu_ops.interleave_rope import random_angles
from npu_ops.kv_rmsnorm_rope_cache import kv_rmsnorm_rope_cache

OPS = ("kv_rmsnorm_rope_cache",)


def make(tokens: int, device: str, dtype: torch.dtype = torch.float32, blocks: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    cos, sin = random_angles(tokens, dtype, generator, magnitude=0.9)
    values = {
        "kv": torch.randn(tokens, 576, generator=generator).to(dtype),
        "gamma": torch.randn(512, generator=generator).to(dtype),
        "cos": cos,
        "sin": sin,
        "slot_mapping": torch.randperm(blocks * 16, generator=generator)[:tokens],
        "k_cache": torch.full((blocks, 16, 1, 64), math.nan, dtype=dtype),
        "ckv_cache": torch.full((blocks, 16, 1, 512), math.nan, dtype=dtype),
    }
    return {name: x.to(device) for name, x in values.items()}


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


@pytest.mark.parametrize("dtype", ELEMENTWISE, ids=str)
def test_matches_transformers(device: str, dtype: torch.dtype) -> None:
    given = make(9, device, dtype)
    rope, latent = kv_rmsnorm_rope_cache(**given, epsilon=1e-6)
    kv = given["kv"].cpu().double()
    norm = DeepseekV3RMSNorm(512, eps=1e-6)
    norm.weight.data = given["gamma"].cpu().float()
    wide = [torch.cat((given[name],) * 2, -1)[None].cpu().double() for name in ("cos", "sin")]
    part = kv[None, None, :, 512:]
    bound = ELEMENTWISE[dtype]
    for ours, wanted in (
        (latent, norm(kv[:, :512].float())),
        (rope, apply_rotary_pos_emb_interleave(part, part, *wide)[0][0, 0]),
    ):
        torch.testing.assert_close(ours.cpu().double(), wanted.double(), atol=bound.atol, rtol=bound.rtol)


def test_rows_lie_at_their_slots_and_nowhere_else(device: str) -> None:
    given = make(23, device)
    given["slot_mapping"][3::4] = -1
    given["kv"][3::4] = math.nan  # padding, which may hold anything
    rope, latent = kv_rmsnorm_rope_cache(**given)
    kept = given["slot_mapping"] >= 0
    for rows, cache in ((rope, given["k_cache"]), (latent, given["ckv_cache"])):
        flat = cache.flatten(0, 2)
        assert torch.equal(flat[given["slot_mapping"][kept]], rows[kept])
        assert rows[kept].isfinite().all()
        others = torch.ones(len(flat), dtype=torch.bool, device=device)
        others[given["slot_mapping"][kept]] = False
        assert flat[others].isnan().all()


def test_a_row_does_not_touch_another(device: str) -> None:
    given = make(8, device)
    clean = kv_rmsnorm_rope_cache(**{name: x.clone() for name, x in given.items()})
    given["kv"][3] = math.nan
    spoilt = kv_rmsnorm_rope_cache(**given)
    for a, b in zip(clean, spoilt, strict=True):
        assert torch.equal(a[[0, 1, 2, 4, 5, 6, 7]], b[[0, 1, 2, 4, 5, 6, 7]])
        assert b[3].isnan().all()


def test_strides_change_nothing(device: str) -> None:
    given = make(21, device)
    plain = {name: x.clone() for name, x in given.items()}
    given["kv"] = torch.cat((torch.full((21, 96), math.nan, device=device), given["kv"]), -1)[:, 96:]
    # cos and sin side by side, as models keep them.
    given["cos"], given["sin"] = torch.cat((given["cos"], given["sin"]), -1).chunk(2, -1)
    for name in ("gamma", "slot_mapping"):
        given[name] = torch.stack((given[name], given[name]), -1)[..., 0]
    for ours, wanted in zip(kv_rmsnorm_rope_cache(**given), kv_rmsnorm_rope_cache(**plain), strict=True):
        assert torch.equal(ours, wanted)
    for name in ("k_cache", "ckv_cache"):
        assert torch.equal(given[name].nan_to_num(7), plain[name].nan_to_num(7))


def test_more_padding_than_the_cache_has_slots(device: str) -> None:
    given = make(40, device, torch.bfloat16)
    few = {**given, "k_cache": given["k_cache"][:1].clone(), "ckv_cache": given["ckv_cache"][:1].clone()}
    few["slot_mapping"] = torch.full((40,), -1, device=device)
    few["slot_mapping"][[2, 17, 39]] = torch.tensor([15, 0, 7], device=device)
    rope, latent = kv_rmsnorm_rope_cache(**few)
    for rows, wanted in zip((rope, latent), kv_rmsnorm_rope_cache(**given), strict=True):
        assert torch.equal(rows, wanted)
    for rows, cache in ((rope, few["k_cache"]), (latent, few["ckv_cache"])):
        assert torch.equal(cache.flatten(0, 2)[[15, 0, 7]], rows[[2, 17, 39]])
        assert int(cache.flatten(0, 2).isnan().all(-1).sum()) == 13


def test_slots_past_2_to_31_elements(device: str) -> None:
    # 2^31 elements are slot 4194304 of the latent rows. The memory is only touched where rows are written.
    far = 2**31 // 512
    given = make(4, device, torch.bfloat16)
    given["k_cache"] = torch.empty(far // 16 + 1, 16, 1, 64, dtype=torch.bfloat16, device=device)
    given["ckv_cache"] = torch.empty(far // 16 + 1, 16, 1, 512, dtype=torch.bfloat16, device=device)
    given["slot_mapping"] = torch.tensor([far + 15, 3, -1, far], device=device)
    flat = given["ckv_cache"].view(-1, 512)
    flat[:16] = 0  # where the far rows would land, were 2^31 elements taken off
    rope, latent = kv_rmsnorm_rope_cache(**given)
    kept = given["slot_mapping"][[0, 1, 3]]
    assert torch.equal(flat[kept], latent[[0, 1, 3]])
    assert torch.equal(given["k_cache"].view(-1, 64)[kept], rope[[0, 1, 3]])
    assert not flat[[0, 15]].any()


def test_bad_calls_say_what_to_do(device: str) -> None:
    given = make(3, device)
    wrong = {
        "kv": (given["kv"][:, :512], r"a kv \[T, 576\] in bf16, fp16 or fp32 is required, got \(3, 512\)"),
        "gamma": (given["gamma"][:64], r"a gamma \[512\] in torch\.float32 is required, got \(64,\)"),
        "cos": (given["cos"].half(), r"a cos \[3, 32\] in torch\.float32 is required"),
        "slot_mapping": (given["slot_mapping"].int(), r"an int64 slot_mapping \[3\] is required, got torch\.int32"),
        "k_cache": (given["k_cache"].transpose(0, 1), r"caches \[blocks, block_size, N_kv, D\] that agree in all but D"),
        "ckv_cache": (given["ckv_cache"][..., :64].contiguous(), r"a ckv_cache \[blocks, block_size, 1, 512\]"),
    }
    for name, (value, text) in wrong.items():
        with pytest.raises(ContractError, match=text):
            kv_rmsnorm_rope_cache(**{**given, name: value})
    odd = {name: given[name].view(8, 8, 1, -1) for name in ("k_cache", "ckv_cache")}
    with pytest.raises(ContractError, match=r"a block_size that is a multiple of 16 is required, got 8\."):
        kv_rmsnorm_rope_cache(**{**given, **odd})
