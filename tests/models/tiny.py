"""Tiny seeded checkpoints of the architectures that the end-to-end tests serve. Written once to a folder, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Gemma3TextConfig,
    GlmMoeDsaConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

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


# The widths that Ascend's FIA takes in its MLA form, as in every DeepSeek; only the numbers of heads and layers are small. CANN
# wants at least 3 experts to a group.
_MLA = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    **_COMMON,
}


def deepseek_v2() -> DeepseekV2Config:
    """V2-Lite: no query compression; routing by softmax within the best expert groups."""
    return DeepseekV2Config(
        q_lora_rank=None,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=12,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        **_MLA,
    )


def deepseek_v3(**changes: object) -> DeepseekV3Config:
    """V3: query compression, YaRN, sigmoid routing with a correction bias and a scaling factor."""
    values = {
        "q_lora_rank": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_scaling": {
            # Unequal scales: YaRN then changes the length of rotated vectors, not only the softmax scale.
            "rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
        # Read by vLLM; transformers knows no other way for V3.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        **_MLA,
        **changes,
    }  # fmt: skip
    return DeepseekV3Config(**values)


def kimi_k2() -> DeepseekV3Config:
    """Kimi K2 is DeepSeek V3 with one expert group, more experts and other factors."""
    return deepseek_v3(n_group=1, topk_group=1, n_routed_experts=16, num_attention_heads=2, num_key_value_heads=2,
                       routed_scaling_factor=2.827)  # fmt: skip


# A small top-k, so that short contexts are past it. Many heads in the indexer: with few, ReLU leaves keys at a score of exactly
# 0, and which of those are picked is nobody's contract.
_SPARSE = {
    "q_lora_rank": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "index_topk": 64,
    "index_n_heads": 16,
    "index_head_dim": 128,
    **_MLA,
}


def deepseek_v32(**changes: object) -> DeepseekV32Config:
    """V3 with sparse attention: an indexer whose rope rotates halves."""
    values = {"n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid", **_SPARSE, **changes}
    return DeepseekV32Config(**values)


def glm_moe_dsa(**changes: object) -> GlmMoeDsaConfig:
    """GLM-5: wider heads, and the indexer's rope rotates neighbours."""
    values = {"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", **_SPARSE,
              "qk_nope_head_dim": 192, "v_head_dim": 256, **changes}  # fmt: skip
    return GlmMoeDsaConfig(**values)


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": llama,
    "llama_mqa": lambda: llama(num_key_value_heads=1),
    "qwen3": qwen3,
    "gemma3": gemma3,
    "qwen3_moe": qwen3_moe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": kimi_k2,
    "deepseek_v32": deepseek_v32,
    "glm_moe_dsa": glm_moe_dsa,
    # Four layers, of which the third and fourth use what the second has picked.
    "glm_shared": lambda: glm_moe_dsa(num_hidden_layers=4, indexer_types=["full", "full", "shared", "shared"]),
}


def write(name: str, folder: Path) -> Path:
    """Write the checkpoint ``name`` below ``folder`` and return its path."""
    return write_checkpoint(folder / name, CONFIGS[name](), prepare=_draw_correction_bias)


def _draw_correction_bias(model: PreTrainedModel) -> None:
    """Expert choice by score alone and by score plus bias must differ; transformers starts the bias at 0."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)
