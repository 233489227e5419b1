from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from npu_ops.contract import ELEMENTWISE, ContractError
from npu_ops.pack_sparse_kv import pack_sparse_kv, unpack_sparse_kv

OPS = ("pack_sparse_kv",)


def test_matches_reference(op_case: tuple, check_op: Callable) -> None:
    check_op(op_case)


def half_bytes(rope: torch.Tensor) -> np.ndarray:
    """The 16-bit patterns of rope rows as bytes, in numpy: fp16 as it is, bf16 by rounding fp32 to its upper half."""
    if rope.dtype == torch.float16:
        return rope.numpy().view(np.uint8)
    bits = rope.float().numpy().view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)  # to the nearest, half to even
    return (bits >> 16).astype(np.uint16).view(np.uint8)


@pytest.mark.parametrize("dtype", ELEMENTWISE, ids=str)
def test_every_byte_by_numpy(device: str, dtype: torch.dtype) -> None:
    latent = (torch.randn(50, 4, 128) * torch.tensor([1e-3, 1.0, 50.0, 7.0])[:, None]).flatten(1).to(dtype)
    latent[3], latent[7, 128:256] = 0, 0
    latent[9, :128] = torch.arange(-64, 64) / 4  # the largest is 16: halves abound
    latent[9, 0] = 127 / 4
    rope = torch.randn(50, 64).to(dtype)
    packed = pack_sparse_kv(latent.to(device), rope.to(device)).cpu()
    assert packed.shape == (50, 656)
    assert packed.dtype == torch.int8
    tiles = latent.float().numpy().reshape(50, 4, 128)
    scales = np.maximum(np.abs(tiles).max(-1) / np.float32(127), np.float32(1e-30)).astype(np.float32)
    wanted = np.concatenate(
        (
            np.rint(tiles / scales[..., None]).astype(np.int8).reshape(50, 512).view(np.uint8),
            half_bytes(rope),
            scales.view(np.uint8).reshape(50, 16),
        ),
        1,
    )
    np.testing.assert_array_equal(packed.numpy().view(np.uint8), wanted)


@pytest.mark.parametrize("dtype", ELEMENTWISE, ids=str)
def test_comes_back_within_half_a_step(device: str, dtype: torch.dtype) -> None:
    latent, rope = torch.randn(40, 512).to(dtype), torch.randn(40, 64).to(dtype)
    latent[5] = 0
    got, got_rope = (x.cpu() for x in unpack_sparse_kv(pack_sparse_kv(latent.to(device), rope.to(device)), dtype))
    assert got.dtype == got_rope.dtype == dtype
    assert torch.equal(got_rope, rope.bfloat16().float() if dtype == torch.float32 else rope)
    step = latent.float().unflatten(1, (4, 128)).abs().amax(-1, keepdim=True) / 127
    error = (got.float() - latent.float()).unflatten(1, (4, 128)).abs()
    bound = 0.5 * step + got.float().unflatten(1, (4, 128)).abs() * torch.finfo(dtype).eps
    assert bool((error <= bound * 1.0001).all())
    assert not got[5].any()
    # Unpacked rows of the cache's shape are the same rows.
    cache = pack_sparse_kv(latent.to(device), rope.to(device))[:32].view(2, 16, 1, 656)
    again = unpack_sparse_kv(cache, dtype)
    assert [x.shape for x in again] == [(2, 16, 1, 512), (2, 16, 1, 64)]
    assert torch.equal(again[0].cpu().view(32, 512), got[:32])


def test_a_nan_stays_in_its_tile(device: str) -> None:
    latent, rope = torch.randn(4, 512, device=device), torch.randn(4, 64, device=device)
    clean = unpack_sparse_kv(pack_sparse_kv(latent, rope), torch.float32)
    latent[2, 200] = math.nan
    spoilt, spoilt_rope = unpack_sparse_kv(pack_sparse_kv(latent, rope), torch.float32)
    assert spoilt[2, 128:256].isnan().all()
    spoilt[2, 128:256] = clean[0][2, 128:256]
    assert torch.equal(spoilt, clean[0])
    assert torch.equal(spoilt_rope, clean[1])


def test_strides_change_nothing(device: str) -> None:
    latent, rope = torch.randn(9, 512, device=device).bfloat16(), torch.randn(9, 64, device=device).bfloat16()
    columns = [torch.stack((x, x), -1)[..., 0] for x in (latent, rope)]
    packed = pack_sparse_kv(latent, rope)
    assert torch.equal(pack_sparse_kv(*columns), packed)
    wide = torch.cat((torch.zeros_like(packed)[:, :3], packed), 1)[:, 3:]  # at an address that no fp32 can have
    for ours, wanted in zip(unpack_sparse_kv(wide, torch.bfloat16), unpack_sparse_kv(packed, torch.bfloat16), strict=True):
        assert torch.equal(ours, wanted)


def test_bad_calls_say_what_to_do(device: str) -> None:
    latent, rope = torch.zeros(3, 512, device=device), torch.zeros(3, 64, device=device)
    with pytest.raises(
        ContractError, match=r"a latent \[T, 512\] in bf16, fp16 or fp32 is required, got torch\.float32 \(3, 64\)"
    ):
        pack_sparse_kv(rope, rope)
    with pytest.raises(ContractError, match=r"a rope \[3, 64\] in torch\.float32 is required, got torch\.float16"):
        pack_sparse_kv(latent, rope.half())
    with pytest.raises(ContractError, match=r"int8 rows \[\.\.\., 656\] is required, got torch\.int8 \(3, 576\)"):
        unpack_sparse_kv(torch.zeros(3, 576, dtype=torch.int8, device=device), torch.bfloat16)
    with pytest.raises(ContractError, match=r"a dtype of bf16, fp16 or fp32 is required, got torch\.int8"):
        unpack_sparse_kv(torch.zeros(3, 656, dtype=torch.int8, device=device), torch.int8)
