"""How large the buffer of the indexer's scores is: pure arithmetic on the number of rows and the budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_fallback.lightning_indexer import KEYS, MAX_TILE, MIN_TILE, buffer_shape

DEFAULT = 512 * 2**20
counts = st.sampled_from([1, 64, 2047, 2048, 4096, 8192])


@given(tokens=st.integers(1, 200_000), count=counts, size=st.integers(2**15, 2**32))
def test_buffers_keep_the_budget(tokens: int, count: int, size: int) -> None:
    rows, tile = buffer_shape(tokens, count, size)
    least = max(count, MIN_TILE)
    assert 4 * rows * tile <= size
    assert tile % KEYS == 0
    assert least <= tile <= MAX_TILE
    assert rows == tokens or 4 * (rows + 1) * least > size


@pytest.mark.parametrize("context", [131_072, 324_075, 1_048_576])
def test_a_prefill_asks_for_two_sizes(context: int) -> None:
    chunks = [min(8192, context - first) for first in range(0, context, 8192)]
    sizes = {buffer_shape(chunk, 2048, DEFAULT) for chunk in chunks}
    assert len(sizes) <= 2
    assert max(4 * rows * tile for rows, tile in sizes) <= DEFAULT
    # All rows of a chunk at once: the keys are in tiles, not the rows.
    assert buffer_shape(8192, 2048, DEFAULT) == (8192, 16384)


def test_a_decode_has_all_its_keys_in_one_tile() -> None:
    assert buffer_shape(1, 2048, DEFAULT) == (1, 2**20)
    assert buffer_shape(64, 2048, DEFAULT) == (64, 2**20)
