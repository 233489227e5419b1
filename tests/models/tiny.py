"""Tiny seeded checkpoints of the architectures that the end-to-end tests serve. Written once to a folder, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from vllm_plugin.demo_model import BOS, EOS, VOCABULARY, write_checkpoint

_COMMON = {
    "vocab_size": VOCABULARY,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def llama(**changes: object) -> LlamaConfig:
    """Grouped-query attention: 4 query heads on 2 KV heads."""
    values = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        **_COMMON,
        **changes,
    }
    return LlamaConfig(**values)


def qwen3() -> Qwen3Config:
    """Norms on query and key heads; 3 heads of 64 on a hidden size of 128, so head_dim is not hidden/heads."""
    return Qwen3Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        **_COMMON,
    )


def gemma3() -> Gemma3TextConfig:
    """Sliding and full layers in turn (two KV groups), a window of 40 that is no multiple of the block size."""
    return Gemma3TextConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=40,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        **_COMMON,
    )


def qwen3_moe() -> Qwen3MoeConfig:
    """7 experts, which 2 ranks share unevenly, 3 to a token; widths that are no powers of two."""
    return Qwen3MoeConfig(
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=72,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        **_COMMON,
    )


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": llama,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "qwen3_moe": qwen3_moe,
}


def write(name: str, folder: Path) -> Path:
    """Write the checkpoint ``name`` below ``folder`` and return its path."""
    return write_checkpoint(folder / name, CONFIGS[name]())
