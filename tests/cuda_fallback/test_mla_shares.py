"""How the keys of a batch are divided among programs over a latent cache: pure arithmetic on the lengths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cuda_fallback.mla_attention import KEYS_PER_SPLIT, MAX_SPLITS, PARTIAL_BYTES, _shares

lengths = st.lists(st.tuples(st.integers(1, 32), st.integers(0, 2**20)), max_size=70)


@given(work=lengths, slots=st.integers(1, 264), size=st.integers(0, 2**28))
def test_shares_cover_every_key_within_the_limits(work: list[tuple[int, int]], slots: int, size: int) -> None:
    chunk, splits = _shares(work, slots, size)
    longest = max((keys for _, keys in work), default=0)
    assert chunk % 64 == 0
    assert chunk >= KEYS_PER_SPLIT
    assert (splits - 1) * chunk < max(longest, 1) <= max(splits * chunk, 1)
    assert splits == 1 or (splits <= MAX_SPLITS and splits * size <= PARTIAL_BYTES)


def test_a_long_request_among_short_ones_fills_the_gpu() -> None:
    chunk, splits = _shares([(1, 131072)] + [(1, 1000)] * 63, 264, 4 * 64 * 16 * 512)
    assert (chunk, splits) == (1024, 128)


def test_equal_requests_fill_the_gpu_once() -> None:
    chunk, splits = _shares([(1, 131072)] * 64, 264, 4 * 64 * 16 * 512)
    assert splits == 5
    assert 4 * chunk < 131072
    assert 4 * 64 <= 264
