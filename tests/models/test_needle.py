"""The needle model answers right in transformers, at any depth and at far positions; without one of its parts it does not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from parity_needle import LOGPROB, NOPE, OPPOSITE, ROPE, codes, needle_prompt, write_needle
from transformers import AutoModelForCausalLM, PreTrainedModel

KINDS = ("v32", "mla", "llama")
DTYPES = (torch.float32, torch.bfloat16)
# By construction 16 for the answer and 4 at most for any other token. What attention leaks costs less than this.
MARGIN = 11.9
FAR = 1_048_576
TOPK = 64
HEADS = 2


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    sizes = {"heads": HEADS, "index_heads": HEADS, "topk": TOPK, "max_positions": FAR}
    return {kind: write_needle(tmp_path_factory.mktemp(kind), kind, **sizes) for kind in KINDS}


def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def answer_and_margin(model: PreTrainedModel, tokens: list[int], first: int = 0) -> tuple[int, float]:
    """The greedy next token, and how far its logit is above the second; ``first`` is the position of the first token."""
    positions = torch.arange(first, first + len(tokens))[None]
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), position_ids=positions, logits_to_keep=1).logits[0, -1].float()
    best = logits.topk(2)
    return int(best.indices[0]), float(best.values[0] - best.values[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "depths"), [(200, (0, 0.25, 0.5, 0.9, 1)), (1000, (0, 0.37, 0.99)), (4000, (0.37,))])
def test_the_needle_is_found(checkpoints, kind, dtype, length, depths):
    model = load(checkpoints[kind], dtype)
    for depth in depths:
        tokens, answer = needle_prompt(length, depth, seed=length)
        found, margin = answer_and_margin(model, tokens)
        assert found == answer, (kind, depth)
        assert margin > MARGIN, (kind, depth)


@pytest.mark.parametrize("kind", KINDS)
def test_the_needle_is_found_at_the_last_of_a_million_positions(checkpoints, kind):
    tokens, answer = needle_prompt(600, 0.3, seed=1)
    found, margin = answer_and_margin(load(checkpoints[kind], torch.bfloat16), tokens, first=FAR - len(tokens))
    assert found == answer
    assert margin > MARGIN


def test_heads_of_full_width(tmp_path):
    tokens, answer = needle_prompt(300, 0.4)
    model = load(write_needle(tmp_path, heads=128, index_heads=64, topk=TOPK), torch.bfloat16)
    found, margin = answer_and_margin(model, tokens)
    assert found == answer
    assert margin > MARGIN


def test_the_log_probability_tells_a_whole_answer_from_a_part(checkpoints):
    model = load(checkpoints["mla"], torch.float32)
    tokens, answer = needle_prompt(300, 0.4)

    def log_probability() -> float:
        with torch.no_grad():
            return float(model(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1].log_softmax(-1)[answer])

    assert LOGPROB < log_probability() < 0
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight *= 0.95
    assert answer_and_margin(model, tokens)[0] == answer
    assert log_probability() < LOGPROB


def test_a_vocabulary_and_a_stream_of_other_sizes(tmp_path):
    tokens, answer = needle_prompt(300, 0.4, vocabulary=2000)
    found, margin = answer_and_margin(load(write_needle(tmp_path, vocabulary=2000, hidden=384), torch.bfloat16), tokens)
    assert found == answer
    assert margin > MARGIN


BREAKS = {
    "indexer of layer 0": lambda model: model.model.layers[0].self_attn.indexer.wq_b.weight.zero_(),
    "indexer of layer 1": lambda model: model.model.layers[1].self_attn.indexer.wq_b.weight.zero_(),
    "rope of layer 0": lambda model: model.model.layers[0].self_attn.q_b_proj.weight.zero_(),
    "match of layer 1": lambda model: model.model.layers[1].self_attn.q_b_proj.weight.zero_(),
    "order of heads": lambda model: _roll_heads(model.model.layers[1].self_attn.o_proj.weight),
}


def _roll_heads(weight: torch.Tensor) -> None:
    weight.copy_(weight.view(len(weight), -1, 128).roll(1, 1).flatten(1))


@pytest.mark.parametrize("part", BREAKS)
def test_without_one_of_its_parts_it_finds_nothing(checkpoints, part):
    model = load(checkpoints["v32"], torch.float32)
    prompts = [needle_prompt(1000, depth, seed=7) for depth in (0.4, 0.8)]
    assert all(answer_and_margin(model, tokens)[0] == answer for tokens, answer in prompts)
    with torch.no_grad():
        BREAKS[part](model)
    assert all(answer_and_margin(model, tokens)[0] != answer for tokens, answer in prompts)


def test_without_relu_the_indexer_chooses_all_but_the_needle(checkpoints):
    model, captured = load(checkpoints["v32"], torch.float32), {}
    indexer = model.model.layers[1].self_attn.indexer
    for name in ("wq_b", "k_norm", "weights_proj"):
        getattr(indexer, name).register_forward_hook(lambda _, __, output, name=name: captured.update({name: output[0]}))
    tokens, answer = needle_prompt(1000, 0.4)
    answer_and_margin(model, tokens)
    # Rope turns only what is 0 in these queries.
    per_head = captured["wq_b"][-1].view(HEADS, 128) @ captured["k_norm"].T
    for scores, chosen in ((per_head.relu(), True), (per_head, False)):
        best = (captured["weights_proj"][-1] @ scores).topk(TOPK).indices.tolist()
        assert (tokens.index(answer) in best) is chosen


@pytest.fixture(scope="module")
def far_rope():
    """vLLM's two ropes in bf16, as it serves a million positions with: [interleaved, NeoX]."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    parameters = {"rope_type": "default", "rope_theta": 2.0 ** (ROPE // 2)}
    with set_current_vllm_config(VllmConfig()):
        return [get_rope(ROPE, FAR, neox, parameters, torch.bfloat16) for neox in (False, True)]


def first_layer(folder: Path) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Attention of layer 0 in bf16, its input and its compressed query for any token."""
    model = load(folder, torch.bfloat16)
    layer = model.model.layers[0]
    hidden = layer.input_layernorm(model.model.embed_tokens.weight[:1])
    return layer.self_attn, hidden, layer.self_attn.q_a_layernorm(layer.self_attn.q_a_proj(hidden))


@torch.no_grad()
def turned(rope: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, position: int) -> torch.Tensor:
    """Scores [heads, position + 1] of the query [heads, 64] at ``position`` over one key [1, 64] at each position up to it."""
    keys = key.expand(position + 1, ROPE).contiguous()
    _, keys = rope.forward_native(torch.arange(position + 1), keys.clone(), keys)
    query, _ = rope.forward_native(torch.tensor([position]), query.reshape(1, -1).clone(), key.clone())
    return query.view(-1, ROPE).float() @ keys.float().T


@pytest.mark.parametrize("position", [100, 131_071, 777_777, FAR - 1])
def test_attention_to_the_previous_token_at_far_positions(checkpoints, far_rope, position):
    attention, hidden, compressed = first_layer(checkpoints["v32"])
    query = attention.q_b_proj(compressed).view(-1, NOPE + ROPE)[:, NOPE:]
    key = attention.kv_a_proj_with_mqa(hidden)[:, -ROPE:]
    weights = torch.softmax(turned(far_rope[0], query, key, position) * attention.scaling, -1)
    assert weights.shape == (HEADS, position + 1)
    assert (weights[:, position - 1] > 0.9999).all()


@pytest.mark.parametrize("position", [100, 131_071, 777_777, FAR - 1])
def test_the_indexer_chooses_the_previous_token_first_at_far_positions(checkpoints, far_rope, position):
    attention, hidden, compressed = first_layer(checkpoints["v32"])
    indexer = attention.indexer
    query, key = indexer.wq_b(compressed).view(-1, 128), indexer.k_norm(indexer.wk(hidden))
    assert not query[:, ROPE:].any()
    scores = turned(far_rope[1], query[:, :ROPE], key[:, :ROPE], position).relu()
    best = (indexer.weights_proj(hidden).float() @ scores).squeeze(0).topk(4)
    assert best.indices[0] == position - 1
    assert sorted(best.indices.tolist()) == [position - 3, position - 2, position - 1, position]
    assert best.values[0] / best.values[1] > 1.015


def hadamard(width: int) -> torch.Tensor:
    """Sylvester's matrix, orthonormal: the sign of (i, j) is the parity of the bits they share."""
    return torch.tensor([[1.0 - 2.0 * ((i & j).bit_count() % 2) for j in range(width)] for i in range(width)]) / math.sqrt(
        width
    )


def quantised(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows as they come back from int8 or fp8, with one scale to a row."""
    top = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = rows.abs().amax(-1, keepdim=True) / top
    steps = rows / scale
    return (steps.round() if dtype == torch.int8 else steps).to(dtype).float() * scale


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantised_indexer_chooses_it_too(checkpoints, far_rope, dtype):
    attention, hidden, compressed = first_layer(checkpoints["v32"])
    indexer = attention.indexer
    seen = 2**18  # of the last positions: a million take long to quantise
    with torch.no_grad():
        query, key = indexer.wq_b(compressed).view(-1, 128), indexer.k_norm(indexer.wk(hidden)).expand(seen, 128)
        positions = torch.arange(FAR - seen, FAR)
        turned_keys = far_rope[1].forward_native(positions, key[:, :ROPE].clone(), key[:, :ROPE].contiguous())[1]
        turned_query = far_rope[1].forward_native(torch.tensor([FAR - 1]), query[:, :ROPE].reshape(1, -1), key[:1, :ROPE])[0]
        # Beside what rope turns both are 0 in this layer. Rotated, what is left of H has 64 rows.
        rotation = hadamard(128)[:ROPE]
        keys, queries = (quantised(rows.float() @ rotation, dtype) for rows in (turned_keys, turned_query.view(-1, ROPE)))
        best = (keys @ queries.T).relu().sum(-1).topk(4)
    assert best.indices[0] == seen - 2
    assert sorted(best.indices.tolist()) == [seen - 4, seen - 3, seen - 2, seen - 1]


def test_no_distance_comes_near_the_previous_token():
    """The bound that the module's docstring states, at every distance up to a million, in fp64."""
    distance = torch.arange(1, FAR, dtype=torch.float64)
    short = sum(1 - torch.cos(distance * 0.5**i) for i in range(ROPE // 2))
    bound = sum(1 - math.cos(0.5**i) for i in range(12))
    assert 0.623 < bound < short.min()


def test_scores_of_layer_one_leave_nothing_to_a_million_others(checkpoints):
    """A stranger's code agrees to a quarter at most: its share is e^-55, and that of a million of them e^-41."""
    attention = load(checkpoints["v32"], torch.float32).model.layers[1].self_attn
    query = attention.q_b_proj.weight.view(HEADS, NOPE + ROPE, -1)[:, :NOPE, :64].sum(-1).abs() * math.sqrt(128 / 64)
    key = attention.kv_b_proj.weight.view(HEADS, 2 * NOPE, -1)[:, :NOPE, :64].sum(-1).abs() * math.sqrt(512 / 128)
    match = (query * key).sum(-1) * attention.scaling
    assert (0.75 * match - math.log(FAR) > 41).all()


def test_codes():
    book = codes(4096)
    assert set(book.unique().tolist()) == {-1.0, 1.0}
    for rows in book.split(512):
        products = (rows @ book.T).abs()
        assert int((products == 64).sum()) == len(rows)
        assert products[products < 64].max() == 16
    # The opposing heads of the indexers stay below a match: 1.5 * 16 < 64, and with ReLU dropped outvote it: 1 - 1.5 < 0.
    assert -OPPOSITE * 16 < 64
    assert 1 + OPPOSITE < 0
    with pytest.raises(ValueError, match="At most 4096 codes"):
        codes(4097)


@pytest.mark.parametrize("length", [4, 5, 50, 100_000])
@pytest.mark.parametrize("depth", [0, 0.5, 1])
def test_prompts(length, depth):
    tokens, answer = needle_prompt(length, depth, seed=3)
    key = tokens[-1]
    place = tokens.index(key)
    assert len(tokens) == length
    assert tokens.count(key) == 2
    assert tokens.count(answer) == 1
    assert tokens[place + 1] == answer
    assert place == 1 + round(depth * (length - 4))
    assert needle_prompt(length, depth, seed=3) == (tokens, answer)
    assert needle_prompt(length, depth, seed=4) != (tokens, answer)
