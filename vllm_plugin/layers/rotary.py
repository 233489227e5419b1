"""Rotary embeddings through npu_ops.rotary.

The scaled variants (Llama 3, YaRN, linear, NTK) differ in how the cos/sin table is made, not in how it is applied, so one
mixin serves all of them.
"""

from __future__ import annotations

from torch import Tensor
from vllm.model_executor.layers import rotary_embedding as upstream

from npu_ops.rotary import rotary

# Classes whose forward is RotaryEmbedding's own. Multimodal, dual-chunk and DeepSeek's variants apply it otherwise.
_CLASSES = (
    upstream.RotaryEmbedding,
    upstream.Llama3RotaryEmbedding,
    upstream.YaRNScalingRotaryEmbedding,
    upstream.LinearScalingRotaryEmbedding,
    upstream.NTKScalingRotaryEmbedding,
    upstream.DynamicNTKScalingRotaryEmbedding,
    upstream.DynamicNTKAlphaRotaryEmbedding,
)


class _RotaryMixin:
    head_size: int
    is_neox_style: bool

    def forward_oot(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Rotate query [T, heads * head_size] and key (or None, where layers share KV) by their positions [T]."""
        table = self._match_cos_sin_cache_dtype(query)  # type: ignore[attr-defined]
        cos, sin = table.index_select(0, positions.flatten()).chunk(2, dim=-1)
        return self._rotate(query, cos, sin), None if key is None else self._rotate(key, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mode = "half" if self.is_neox_style else "interleave"
        rotated = rotary(x.view(cos.shape[0], -1, self.head_size), cos, sin, rotary_mode=mode)
        return rotated.view(x.shape)


def register() -> None:
    """Put a replacement in place of each class."""
    for cls in _CLASSES:
        cls.register_oot(type(f"Parity{cls.__name__}", (_RotaryMixin, cls), {}), name=cls.__name__)
