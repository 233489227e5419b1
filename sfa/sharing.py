"""Which layers score tokens for their top-k, and which reuse the top-k of an earlier layer.

IndexCache (https://arxiv.org/abs/2603.12201): neighbouring layers choose nearly the same tokens, so only some of them score.
Configurations say it in one of three ways; the first that is present counts:

1. ``indexer_types``: "full" or "shared" for each layer.
2. ``index_topk_pattern``: "F" or "S" for each layer, as a string or a list.
3. ``index_topk_freq`` and ``index_skip_topk_offset`` (2 if missing): layer ``l`` shares if
   ``max(l - offset + 1, 0) % freq != 0``. So the layers before ``offset`` score, then every ``freq``-th.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_OFFSET = 2
_KINDS = {"full": False, "shared": True, "F": False, "S": True}


@dataclass(frozen=True)
class TopkSharing:
    """Where each layer's top-k comes from.

    Attributes:
        sources: for each layer the layer whose top-k it uses, itself if it scores.
    """

    sources: tuple[int, ...]

    @classmethod
    def of(cls, config: object) -> TopkSharing:
        """What a configuration in transformers' form says.

        Raises:
            ValueError: if the first layer would share, if not every layer has one entry, or for an unknown entry or frequency.
        """
        layers: int = config.num_hidden_layers  # type: ignore[attr-defined]
        types, pattern = (getattr(config, key, None) for key in ("indexer_types", "index_topk_pattern"))
        if types is not None:
            shares = _read("indexer_types", types, layers)
        elif pattern is not None:
            shares = _read("index_topk_pattern", pattern, layers)
        else:
            shares = _periodic(config, layers)
        if shares and shares[0]:
            raise ValueError(
                "Top-k sharing: the first layer must score, as there is none before it; the configuration has it share."
            )
        sources: list[int] = []
        for layer, shared in enumerate(shares):
            sources.append(sources[-1] if shared else layer)
        return cls(tuple(sources))

    def source(self, layer: int) -> int:
        """The layer whose top-k ``layer`` uses; layers past the model's own (multi-token prediction) score for themselves."""
        return self.sources[layer] if layer < len(self.sources) else layer

    def scores(self, layer: int) -> bool:
        """Whether ``layer`` has an indexer and an indexer cache."""
        return self.source(layer) == layer


def _read(key: str, entries: Sequence[str], layers: int) -> list[bool]:
    if len(entries) != layers:
        raise ValueError(f"{key}: one entry to each of {layers} layers is required, got {len(entries)}.")
    # transformers also takes a pattern that is a list of whole words.
    unknown = sorted({str(entry) for entry in entries if entry not in _KINDS})
    if unknown:
        raise ValueError(f"{key}: full and shared, or F and S, are the entries that exist, got {', '.join(unknown)}.")
    return [_KINDS[entry] for entry in entries]


def _periodic(config: object, layers: int) -> list[bool]:
    frequency, offset = getattr(config, "index_topk_freq", None), getattr(config, "index_skip_topk_offset", None)
    frequency, offset = 1 if frequency is None else frequency, DEFAULT_OFFSET if offset is None else offset
    if frequency < 1:
        raise ValueError(f"index_topk_freq: at least 1 is required, got {frequency}. 1 lets every layer score.")
    return [max(layer - offset + 1, 0) % frequency != 0 for layer in range(layers)]
