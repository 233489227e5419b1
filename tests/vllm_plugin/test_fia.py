"""ASCEND_FIA without an engine: the split, the rebased lengths, the half pages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_plugin.attention.fia import half_pages, split_page_halves, splitting_pays


@pytest.mark.parametrize(
    ("mode", "decode_keys", "prefill_tokens", "split"),
    [
        ("never", 10**6, 10**4, False),
        ("always", 1, 1, True),
        ("always", 0, 100, False),
        ("always", 100, 0, False),
        ("auto", 8192, 1024, True),
        ("auto", 8191, 1024, False),
        ("auto", 8192, 1023, False),
        ("auto", 0, 8192, False),
    ],
)
def test_splitting_rule(mode, decode_keys, prefill_tokens, split):
    assert splitting_pays(mode, decode_keys, prefill_tokens) is split


@given(st.integers(1, 5), st.sampled_from([16, 48, 128]), st.integers(1, 3), st.sampled_from([64, 80]), st.integers(0, 3))
def test_half_pages_are_the_pages_memory(blocks, block_size, heads, dim, padding):
    """Keys and values written through the halves land in their own page, whole, and nowhere else."""
    half = block_size * heads * dim
    stride = 2 * half + padding * half
    memory = torch.zeros(blocks * stride)
    cache = memory.as_strided((blocks, heads, block_size, 2 * dim), (stride, block_size * 2 * dim, 2 * dim, 1))
    key, value = split_page_halves(cache)
    halves = half_pages(cache)
    assert halves == 2 + padding
    assert key.is_contiguous()
    assert value.is_contiguous()
    for block in range(blocks):
        key[block * halves] = 1 + block
        value[block * halves] = -1 - block
    for block in range(blocks):
        page = memory[block * stride : (block + 1) * stride]
        assert (page[:half] == 1 + block).all()
        assert (page[half : 2 * half] == -1 - block).all()
        assert (page[2 * half :] == 0).all()


def test_odd_padding_is_refused():
    cache = torch.zeros(3000).as_strided((2, 1, 16, 64), (1025, 1024, 64, 1))
    with pytest.raises(ValueError, match="blocks must lie at multiples of 512 elements, got 1025"):
        half_pages(cache)
