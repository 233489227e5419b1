"""A small seeded checkpoint with a byte-level tokenizer: what the demo serves and the tests compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

# One token to a byte, and two that are no byte: prompts of a known length are strings of that many letters.
BYTES = 256
BOS, EOS = BYTES, BYTES + 1
VOCABULARY = 320

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that maps each byte of UTF-8 to one token, with BOS and EOS beside them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def llama_config() -> PretrainedConfig:
    """Llama's shape at a few MB: 2 layers, 4 query heads on 2 KV heads, 64 wide, RoPE for 64 K positions."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=65536,
        rope_theta=500000.0,
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )


def write_checkpoint(
    folder: Path,
    config: PretrainedConfig,
    seed: int = 0,
    scale: float = 0.2,
    prepare: Callable[[PreTrainedModel], None] | None = None,
) -> Path:
    """Write config, safetensors and tokenizer of a randomly initialised model, and return the folder.

    ``scale`` is the standard deviation of the weights. It is ten times the usual one: activations then differ from token
    to token, so a wrong key or position changes the greedy choice and does not hide in near-uniform logits. ``prepare``
    changes weights that transformers does not draw at random.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config.initializer_range = scale
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    if prepare is not None:
        prepare(model)
    torch.set_rng_state(generator_state)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    # Without an end token a random model would stop wherever its noise says so.
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return folder


def write_demo_checkpoint(folder: Path) -> Path:
    """The demo's model: the Llama shape, seed 0."""
    return write_checkpoint(folder, llama_config())
