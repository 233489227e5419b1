"""``--additional-config`` as a typed model. docs/configuration.md is generated from this file."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM itself writes this key into additional_config (engine/arg_utils.py); it is not ours to refuse.
_VLLM_KEYS = frozenset({"gdn_prefill_backend"})


class ParityConfig(BaseModel):
    """Settings of the plugin, passed as JSON: ``--additional-config '{"fia_split": "always"}'``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fia_split: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether a batch of decodes and prefills runs as two FIA calls. `auto` splits when both sides are "
        "large enough to be worth a second launch (docs/architecture.md gives the rule).",
    )
    mla_context_plan: Literal["proportional", "equal"] = Field(
        default="proportional",
        description="How the cached context of MLA prefills is split into chunks that fit the workspace. `equal` is Ascend's "
        "plan; `proportional` needs as few chunks as there can be (docs/mla.md compares them).",
    )
    mla_workspace_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Tokens of cached context that MLA prefills read at a time, a multiple of the block size. Unset: Ascend's "
        "formula (docs/mla.md). Fewer save memory, the most of it the up-projected keys and values, and need more chunks.",
    )

    mla_absorbed_rows: int | None = Field(
        default=None,
        ge=0,
        description="Up to how many new tokens of a request with a cached context ASCEND_MLA runs in absorbed form; more run "
        "in MHA form. By default what costs the fewest multiplications, 170 for DeepSeek (docs/mla.md gives the rule).",
    )

    sparse_kv_c8: bool = Field(
        default=False,
        description="Whether sparse attention (DeepSeek V3.2, GLM) keeps latent rows as 656 packed bytes, int8 with a scale "
        "to 128 elements, in place of 1,152 in 16 bits (docs/sfa.md gives the error).",
    )

    indexer_c8: bool = Field(
        default=False,
        description="Whether the indexer of sparse attention keeps its keys as int8 with a scale to a key. Where a quantised "
        "checkpoint says which layers' indexers are int8 (`quant_model_description.json`), only there.",
    )

    indexer_logits_bytes: int = Field(
        default=512 * 2**20,
        ge=2**20,
        description="Bytes that the scores of the indexer may take at a time. Rows are sliced and keys are tiled to stay below "
        "that; the picks are the same.",
    )

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> ParityConfig:
        """Validate the JSON object of ``--additional-config``.

        Raises:
            ValueError: for an unknown key (naming the nearest known one) or a value outside its range.
        """
        ours = {key: value for key, value in raw.items() if key not in _VLLM_KEYS}
        for key in ours.keys() - cls.model_fields.keys():
            near = difflib.get_close_matches(key, cls.model_fields, n=1, cutoff=0.0)[0]
            known = ", ".join(sorted(cls.model_fields))
            raise ValueError(f"--additional-config: unknown key {key!r}. Did you mean {near!r}? Known keys: {known}.")
        try:
            return cls(**ours)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"--additional-config: {where}: {first['msg']}, got {first['input']!r}.") from None

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> ParityConfig:
        """The settings of a running engine."""
        return cls.parse(dict(vllm_config.additional_config or {}))
