"""Random numbers of the virtual NPU: a function of a generator's seed and offset, drawn with the CPU's generator.

An NPU generator's state is (seed, offset), and each draw moves the offset, as on the real device; so states can be saved
and restored. The first draw after seeding gives the CPU's numbers for the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# What one kernel moves the offset by on the device.
STEP = 4
_MIX = 0x9E3779B97F4A7C15


def next_draw(generator: torch.Generator) -> torch.Generator:
    """A CPU generator for the next draw of an NPU generator, which is moved on."""
    offset = generator.get_offset()
    seed = generator.initial_seed() ^ (offset * _MIX & (1 << 64) - 1)
    generator.set_offset(offset + STEP)
    return torch.Generator().manual_seed(seed)


@contextmanager
def as_default(generator: torch.Generator) -> Iterator[None]:
    """Draw from ``generator`` in CPU ops that take none."""
    kept = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        yield
    finally:
        torch.default_generator.set_state(kept)
