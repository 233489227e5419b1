"""What a model's configuration says of its indexer."""

from __future__ import annotations

from dataclasses import dataclass

from sfa.sharing import TopkSharing

# Models whose indexer rotates pairs of neighbours although their configuration does not say so; transformers has it in code.
_INTERLEAVED = ("glm_moe_dsa",)


@dataclass(frozen=True)
class SparseSettings:
    """The indexer of a model with DeepSeek sparse attention.

    Attributes:
        topk: tokens that a query attends to.
        heads: indexer heads.
        head_dim: width of indexer keys.
        interleaved_rope: the indexer's rope turns pairs of neighbours; else element i with element i + half (NeoX). The rope
            of the attention itself is interleaved in either case.
        sharing: which layers score.
    """

    topk: int
    heads: int
    head_dim: int
    interleaved_rope: bool
    sharing: TopkSharing

    @classmethod
    def of(cls, config: object) -> SparseSettings:
        """Read a configuration in transformers' form (``index_topk``, ``index_n_heads``, ``index_head_dim``, ...).

        ``indexer_rope_interleave`` decides on the rope; if it is missing, NeoX, except for GLM-MoE-DSA.

        Raises:
            ValueError: if the model has no indexer, or see ``TopkSharing.of``.
        """
        sizes = [getattr(config, key, None) for key in ("index_topk", "index_n_heads", "index_head_dim")]
        if None in sizes:
            raise ValueError(f"index_topk, index_n_heads and index_head_dim are required of a sparse model, got {sizes}.")
        topk, heads, head_dim = map(int, sizes)  # type: ignore[arg-type]
        interleaved = getattr(config, "indexer_rope_interleave", None)
        if interleaved is None:
            interleaved = getattr(config, "model_type", None) in _INTERLEAVED
        return cls(topk, heads, head_dim, bool(interleaved), TopkSharing.of(config))
