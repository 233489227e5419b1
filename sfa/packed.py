"""Where the parts of a quantised cache row (C8) lie: ``int8 latent | rope in 16 bits | fp32 scale of each tile``.

The row of torch_npu's ``npu_kv_quant_sparse_flash_attention``; 656 bytes at 512, 64 and tiles of 128.
"""

from __future__ import annotations

from dataclasses import dataclass

ROPE_BYTES, SCALE_BYTES = 2, 4


@dataclass(frozen=True)
class PackedRow:
    """Byte layout of one token's row.

    Attributes:
        kv_lora: elements of the latent, one byte each.
        rope_dim: elements of the rope part, two bytes each.
        tile: elements of the latent that share one scale.
    """

    kv_lora: int = 512
    rope_dim: int = 64
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse tiles that do not divide the latent.

        Raises:
            ValueError: see above.
        """
        if self.tile < 1 or self.kv_lora % self.tile:
            raise ValueError(f"PackedRow: tiles that divide a latent of {self.kv_lora} are required, got {self.tile}.")

    @property
    def tiles(self) -> int:
        """Scales of a row."""
        return self.kv_lora // self.tile

    @property
    def nope(self) -> slice:
        """Bytes of the latent."""
        return slice(0, self.kv_lora)

    @property
    def rope(self) -> slice:
        """Bytes of the rope part."""
        return slice(self.kv_lora, self.kv_lora + ROPE_BYTES * self.rope_dim)

    @property
    def scales(self) -> slice:
        """Bytes of the scales."""
        return slice(self.width - SCALE_BYTES * self.tiles, self.width)

    @property
    def width(self) -> int:
        """Bytes of the row."""
        return self.kv_lora + ROPE_BYTES * self.rope_dim + SCALE_BYTES * self.tiles
