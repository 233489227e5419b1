"""Checkpoints whose weights are constructed, not trained: exact associative recall at any length.

A prompt holds pairs "key value" among filler and ends in one of the keys; the greedy next token is that key's value. Random
weights hide faults at long range, as their attention is spread thin; here one token out of a million decides the answer.

The residual stream has four parts: a constant, the token's code, the code of the token before it, the answer's code. Codes are
64 signs, so that norms are the same for all tokens and RMSNorm multiplies by a constant.

Layer 0, the previous token. Queries and keys are constants, turned by rope alone. With a rope theta of 2^(pairs) the
frequencies are 1, 1/2, 1/4, ..., and their angles are exact in fp32. A query is turned back by one position, so that the
score of a key ``d`` positions from the one before is ``A * sum_i cos(d / 2^i)``, which has its peak at d = 0. For
2^m <= |d| < 2^(m+1) the terms from i = m on fall short of it by at least ``A * sum_j (1 - cos(2^-j)) = 0.623 A``, whatever
the others do: no distance comes close, up to the lowest frequency used. The layer copies the code of the token there.

Layer 1, the match. Queries are the token's own code, keys the code of the token before, values the token's own code: the last
token finds the place after its earlier self and copies what stands there into the answer, which the head reads.

The indexers do the same in 128 dimensions, layer 0 in their rope part, layer 1 beside it. Odd heads have the opposite query,
half as large again: their ReLU makes them silent where the others speak, and without it they would outvote them.

Heads carry their codes under signs of their own, so that heads out of order find nothing.

An answer that comes out whole has a logit of 16, any other token one of 4 at most. A partial one (a context chunk that counts
too little, heads left out) may still be first, but its probability falls: ask for ``LOGPROB`` as well.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from vllm_plugin.demo_model import BOS, EOS, byte_tokenizer

Kind = Literal["v32", "mla", "llama"]

# The log probability of a whole answer is above this, with a vocabulary of 512: it is -0.00033, and -0.00054 of 95 % of one.
LOGPROB = -0.0004

CODE = 64
# Parts of the residual stream, by their first dimension.
TOKEN, PREVIOUS, ANSWER, CONSTANT = 0, CODE, 2 * CODE, 3 * CODE
CONSTANT_VALUE = 8.0
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
# Lengths of the rotated vectors of layer 0 in each plane, and of queries and keys of layer 1 in each dimension.
TURN_QUERY = TURN_KEY = 16.0
MATCH_QUERY, MATCH_KEY = 4.0, 2.0
OPPOSITE = -1.5


def codes(vocabulary: int) -> Tensor:
    """A code of 64 signs to each token [vocabulary, 64]: no two agree or disagree in more than 40 places.

    The codewords (-1)^Tr(a x^3 + b x) over GF(64), of which there are 4,096. Their products are at most 16 (Gold, 1968,
    "Maximal recursive sequences with 3-valued recursive cross-correlation functions"), that of a code with itself is 64.
    """
    if vocabulary > CODE * CODE:
        raise ValueError(f"At most {CODE * CODE} codes of 64 signs exist, {vocabulary} are asked for.")

    def times(a: int, b: int) -> int:
        product = 0
        for bit in range(6):
            product ^= a << bit if b >> bit & 1 else 0
        for bit in range(10, 5, -1):  # modulo x^6 + x + 1
            product ^= 0b1000011 << (bit - 6) if product >> bit & 1 else 0
        return product

    def trace(x: int) -> int:
        total = 0
        for _ in range(6):
            total, x = total ^ x, times(x, x)
        return total

    cubes = [times(x, times(x, x)) for x in range(CODE)]
    linear = torch.tensor([[trace(times(b, x)) for x in range(CODE)] for b in range(CODE)])
    cubic = torch.tensor([[trace(times(a, cube)) for cube in cubes] for a in range(CODE)])
    return 1.0 - 2.0 * (cubic[:, None] ^ linear[None]).view(-1, CODE)[:vocabulary]


def write_needle(
    folder: Path,
    kind: Kind = "v32",
    *,
    heads: int = 4,
    kv_heads: int = 2,
    index_heads: int = 4,
    vocabulary: int = 512,
    topk: int = 64,
    hidden: int = 256,
    max_positions: int = 65536,
) -> Path:
    """Write config, safetensors in fp32 and tokenizer to ``folder``, and return it.

    Args:
        folder: made if it does not exist.
        kind: "v32", DeepSeek V3.2; "mla", V3, the same without indexer; "llama", grouped-query attention.
        heads: of queries; 128 in V3.2.
        kv_heads: of keys, in Llama.
        index_heads: 64 in V3.2.
        vocabulary: 320 to 4,096 tokens.
        topk: tokens that the indexer chooses; 2,048 in V3.2.
        hidden: width of the residual stream, at least 193.
        max_positions: tested up to 1,048,576; one of them is the answer's.
    """
    common = {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": heads, "max_position_embeddings": max_positions, "tie_word_embeddings": False,
        "bos_token_id": BOS, "eos_token_id": EOS,
    }  # fmt: skip
    latent = {
        "num_key_value_heads": heads, "q_lora_rank": 128, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": NOPE, "v_head_dim": VALUE, "rope_parameters": _rope(ROPE), "first_k_dense_replace": 2,
        "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    config: PretrainedConfig
    if kind == "v32":
        config = DeepseekV32Config(**common, **latent, index_topk=topk, index_n_heads=index_heads, index_head_dim=2 * CODE)
    elif kind == "mla":
        config = DeepseekV3Config(**common, **latent)
    else:
        config = LlamaConfig(**common, num_key_value_heads=kv_heads, head_dim=VALUE, rope_parameters=_rope(VALUE))
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        _construct(model)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return folder


def needle_prompt(length: int, depth_fraction: float, seed: int = 0, vocabulary: int = 512) -> tuple[list[int], int]:
    """A prompt and its answer.

    Every eighth token begins a pair of another key, and the last token asks for the one key that is there once before. The
    first token is filler: it has none before it, and would match itself.

    Args:
        length: tokens, at least 4.
        depth_fraction: where the pair stands, 0 at the beginning, 1 right before the question.
        seed: of all that is drawn.
        vocabulary: of the checkpoint.
    """
    generator = torch.Generator().manual_seed(seed)
    usable = torch.tensor([token for token in range(vocabulary) if token not in (BOS, EOS)])
    usable = usable[torch.randperm(len(usable), generator=generator)]
    keys, values, filler = usable.split([vocabulary // 4, vocabulary // 4, len(usable) - vocabulary // 4 * 2])

    def draw(tokens: Tensor, count: int) -> Tensor:
        return tokens[torch.randint(len(tokens), (count,), generator=generator)]

    tokens = draw(filler, length)
    starts = torch.arange(3, length - 1, 8)
    tokens[starts], tokens[starts + 1] = draw(keys[1:], len(starts)), draw(values[1:], len(starts))
    place = 1 + round(depth_fraction * (length - 4))
    tokens[place], tokens[place + 1], tokens[-1] = keys[0], values[0], keys[0]
    return tokens.tolist(), int(values[0])


def _rope(dims: int) -> dict[str, object]:
    """Frequencies of 1, 1/2, 1/4, ..."""
    return {"rope_type": "default", "rope_theta": 2.0 ** (dims // 2)}


def _signs(heads: int, width: int, seed: int) -> Tensor:
    return 1.0 - 2.0 * torch.randint(2, (heads, width), generator=torch.Generator().manual_seed(seed))


def _turned_back(pairs: int, start: float = 0.0) -> tuple[Tensor, Tensor]:
    """Both coordinates of unit vectors at the angle ``start``, turned back by one position."""
    angles = start - 0.5 ** torch.arange(pairs)
    return angles.cos(), angles.sin()


def _normed(squares: float, width: int) -> float:
    """What RMSNorm multiplies ``width`` elements by whose squares sum to ``squares``."""
    return math.sqrt(width / squares)


def _construct(model: PreTrainedModel) -> None:
    config, book = model.config, codes(model.config.vocab_size)
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    model.model.embed_tokens.weight[:, TOKEN : TOKEN + CODE] = book
    model.model.embed_tokens.weight[:, CONSTANT] = CONSTANT_VALUE
    # 16 for the answer, at most 4 for any other token.
    model.lm_head.weight[:, ANSWER : ANSWER + CODE] = book / 4
    first, second = (layer.self_attn for layer in model.model.layers)
    # The constant as layers 0 and 1 see it, after their norm over it and one or two codes.
    seen = [CONSTANT_VALUE * _normed(CONSTANT_VALUE**2 + parts * CODE, config.hidden_size) for parts in (1, 2)]
    if config.model_type == "llama":
        _llama_previous(first, config, seen[0])
        _llama_match(second, config, seen[1] / CONSTANT_VALUE)
        return
    _mla_previous(first, config, seen[0])
    _mla_match(second, config)
    if config.model_type == "deepseek_v32":
        _index_previous(first.indexer, config, seen[0])
        _index_match(second.indexer, config, seen[1])


def _diagonal(weight: Tensor, rows: int, columns: int, values: Tensor | float = 1.0, count: int = CODE) -> None:
    """Let ``count`` outputs from ``rows`` on be the inputs from ``columns`` on, times ``values``."""
    weight[torch.arange(rows, rows + count), torch.arange(columns, columns + count)] = values


def _twice(weight: Tensor, rows: int, columns: int, values: Tensor) -> None:
    """128 outputs from ``rows`` on are 64 inputs from ``columns`` on, twice, times ``values`` [128]."""
    for half in (0, CODE):
        _diagonal(weight, rows + half, columns, values[half : half + CODE])


def _write_answers(o_proj: Tensor, signs: Tensor, part: int) -> None:
    """The mean over heads, and over the two copies that a head has, goes to ``part`` of the residual stream."""
    heads = len(signs)
    for head, own in enumerate(signs / (2 * heads)):
        for half in (0, CODE):
            _diagonal(o_proj, part, head * VALUE + half, own[half : half + CODE])


def _mla_previous(attention: torch.nn.Module, config: PretrainedConfig, constant: float) -> None:
    heads, rank = config.num_attention_heads, config.q_lora_rank
    signs = _signs(heads, VALUE, 0)
    attention.q_a_proj.weight[0, CONSTANT] = 1.0
    q_b = attention.q_b_proj.weight.view(heads, NOPE + ROPE, rank)
    # Pairs of neighbours turn.
    q_b[:, NOPE::2, 0], q_b[:, NOPE + 1 :: 2, 0] = (TURN_QUERY / _normed(1, rank) * part for part in _turned_back(ROPE // 2))
    kv_a = attention.kv_a_proj_with_mqa.weight
    _diagonal(kv_a, 0, TOKEN)
    kv_a[LATENT::2, CONSTANT] = TURN_KEY / constant
    for own, rows in zip(signs, attention.kv_b_proj.weight.view(heads, NOPE + VALUE, LATENT), strict=True):
        _twice(rows, NOPE, 0, own / _normed(CODE, LATENT))
    _write_answers(attention.o_proj.weight, signs, PREVIOUS)


def _mla_match(attention: torch.nn.Module, config: PretrainedConfig) -> None:
    heads, rank = config.num_attention_heads, config.q_lora_rank
    key_signs, value_signs = _signs(heads, NOPE, 1), _signs(heads, VALUE, 2)
    _diagonal(attention.q_a_proj.weight, 0, TOKEN)
    _diagonal(attention.kv_a_proj_with_mqa.weight, 0, PREVIOUS)
    _diagonal(attention.kv_a_proj_with_mqa.weight, CODE, TOKEN)
    q_b = attention.q_b_proj.weight.view(heads, NOPE + ROPE, rank)
    kv_b = attention.kv_b_proj.weight.view(heads, NOPE + VALUE, LATENT)
    latent = _normed(2 * CODE, LATENT)
    for head in range(heads):
        _twice(q_b[head], 0, 0, MATCH_QUERY * key_signs[head] / _normed(CODE, rank))
        _twice(kv_b[head], 0, 0, MATCH_KEY * key_signs[head] / latent)
        _twice(kv_b[head], NOPE, CODE, value_signs[head] / latent)
    _write_answers(attention.o_proj.weight, value_signs, ANSWER)


def _voices(heads: int) -> Tensor:
    """Even heads agree with the query, odd ones oppose it."""
    return torch.tensor([1.0, OPPOSITE]).repeat(heads)[:heads]


def _index_previous(indexer: torch.nn.Module, config: PretrainedConfig, constant: float) -> None:
    heads, pairs = config.index_n_heads, ROPE // 2
    # Element i turns with element i + 32. Keys are (1, -1) in each plane, so that their LayerNorm finds a mean of 0.
    indexer.wk.weight[:pairs, CONSTANT], indexer.wk.weight[pairs:ROPE, CONSTANT] = 1.0, -1.0
    query = torch.cat(_turned_back(pairs, -math.pi / 4)) / _normed(1, config.q_lora_rank)
    indexer.wq_b.weight.view(heads, 2 * CODE, -1)[:, :ROPE, 0] = _voices(heads)[:, None] * query
    indexer.weights_proj.weight[:, CONSTANT] = 1.0 / constant


def _index_match(indexer: torch.nn.Module, config: PretrainedConfig, constant: float) -> None:
    heads = config.index_n_heads
    # What rope turns is the opposite of what it leaves alone, again for a mean of 0; queries have nothing there.
    _diagonal(indexer.wk.weight, 0, PREVIOUS, -1.0)
    _diagonal(indexer.wk.weight, ROPE, PREVIOUS)
    for voice, rows in zip(_voices(heads), indexer.wq_b.weight.view(heads, 2 * CODE, -1), strict=True):
        _diagonal(rows, ROPE, 0, voice / _normed(CODE, config.q_lora_rank))
    indexer.weights_proj.weight[:, CONSTANT] = 1.0 / constant


def _llama_previous(attention: torch.nn.Module, config: PretrainedConfig, constant: float) -> None:
    heads, kv_heads, pairs = config.num_attention_heads, config.num_key_value_heads, VALUE // 2
    signs, used = _signs(kv_heads, VALUE, 0), pairs // 2
    # Element i turns with element i + 64; the frequencies 1 to 2^-31 are used.
    query = attention.q_proj.weight.view(heads, 2, pairs, -1)[:, :, :used, CONSTANT]
    query[:] = TURN_QUERY / constant * torch.stack(_turned_back(used))
    attention.k_proj.weight.view(kv_heads, 2, pairs, -1)[:, 0, :used, CONSTANT] = TURN_KEY / constant
    for own, rows in zip(signs, attention.v_proj.weight.view(kv_heads, VALUE, -1), strict=True):
        _twice(rows, 0, TOKEN, own * CONSTANT_VALUE / constant)
    _write_answers(attention.o_proj.weight, signs.repeat_interleave(heads // kv_heads, 0), PREVIOUS)


def _llama_match(attention: torch.nn.Module, config: PretrainedConfig, seen: float) -> None:
    heads, kv_heads, pairs = config.num_attention_heads, config.num_key_value_heads, VALUE // 2
    key_signs, value_signs = _signs(kv_heads, CODE, 1), _signs(kv_heads, VALUE, 2)
    # The code lies where the frequencies are below 2^-31: within a million positions nothing turns there.
    still = torch.cat([torch.arange(start + pairs // 2, start + pairs) for start in (0, pairs)])
    spread = math.sqrt(VALUE / CODE)  # as many dimensions as under MLA would have
    share = heads // kv_heads
    for head in range(heads):
        own = key_signs[head // share] * MATCH_QUERY * spread / seen
        attention.q_proj.weight[head * VALUE + still, torch.arange(TOKEN, TOKEN + CODE)] = own
    for head in range(kv_heads):
        own = key_signs[head] * MATCH_KEY * spread / seen
        attention.k_proj.weight[head * VALUE + still, torch.arange(PREVIOUS, PREVIOUS + CODE)] = own
        _twice(attention.v_proj.weight, head * VALUE, TOKEN, value_signs[head] / seen)
    _write_answers(attention.o_proj.weight, value_signs.repeat_interleave(share, 0), ANSWER)
