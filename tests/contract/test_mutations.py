"""Which of the contract checks catches which mistake: calls of npu_ops/ascend, each with one thing made wrong.

a: the golden files; b: torch_npu's schemas and shape functions; c: the static check; d: CANN's rules. Nothing else is looked
at, so a mistake that shows in the values alone would be caught by none: then the op tests of the virtual NPU are the check.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from npu_ops import virtual_npu
from npu_ops.device import NPU
from npu_ops.virtual_npu import rules


def load(name: str) -> ModuleType:
    """A module of this folder: pytest gives test modules no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec
    assert spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STATIC = load("test_static")
Named = dict[str, Any]
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)


@dataclass(frozen=True)
class Mutation:
    """One mistake: the case that it is made in, what it does to the arguments by name, and the checks that catch it."""

    name: str
    op: str
    case: str
    change: Callable[[Named], Named]
    caught_by: str


def swap(first: str, second: str) -> Callable[[Named], Named]:
    return lambda given: given | {first: given[second], second: given[first]}


def put(name: str, change: Callable[[Any], Any]) -> Callable[[Named], Named]:
    return lambda given: given | {name: change(given[name])}


def rename(old: str, new: str) -> Callable[[Named], Named]:
    return lambda given: {new if name == old else name: value for name, value in given.items()}


def without(name: str) -> Callable[[Named], Named]:
    return lambda given: {key: value for key, value in given.items() if key != name}


def tokens_first(given: Named) -> Named:
    """The rows of a sequence as a batch of rows."""
    return given | {name: given[name].transpose(0, 2) for name in ("kv", "cos", "sin")}


def scattered(x: Tensor) -> Tensor:
    """The same values with other strides."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


ATTENTION, CASE = "fused_infer_attention", "mixed-b128"
LATENT = "latent-rows-h3b16-mask3"
SPARSE, PACKED = "sparse_flash_attention", "kv_quant_sparse_flash_attention"
MUTATIONS = [
    # The five that the project promises.
    Mutation("query and key swapped", ATTENTION, CASE, swap("query", "key"), "a+b+d"),
    Mutation("key and value swapped", ATTENTION, CASE, swap("key", "value"), "a"),
    Mutation("lengths swapped", ATTENTION, CASE, swap("actual_seq_qlen", "actual_seq_kvlen"), "a+d"),
    Mutation("head counts swapped", ATTENTION, CASE, swap("num_query_heads", "num_key_value_heads"), "a+b+d"),
    Mutation("window ends swapped", ATTENTION, "window-b128", swap("pre_tokens", "next_tokens"), "a"),
    Mutation("lengths as a tensor", ATTENTION, CASE, put("actual_seq_qlen", torch.tensor), "a+b"),
    Mutation("int64 block table", ATTENTION, CASE, put("block_table", Tensor.long), "a+d"),
    Mutation("float mask", ATTENTION, CASE, put("atten_mask", Tensor.float), "a+d"),
    Mutation("cache not contiguous", ATTENTION, CASE, put("key", scattered), "a+d"),
    # And others.
    Mutation("no mask", ATTENTION, CASE, without("atten_mask"), "a+d"),
    Mutation("small mask", ATTENTION, CASE, put("atten_mask", lambda x: x[:128, :128].contiguous()), "a+d"),
    Mutation("lengths not cumulative", ATTENTION, CASE, put("actual_seq_qlen", lambda x: [1, 20, 5]), "a+d"),
    Mutation("paged key lengths cumulative", ATTENTION, CASE, put("actual_seq_kvlen", lambda x: [50, 70, 999]), "a+d"),
    Mutation("first version's keyword", ATTENTION, CASE, rename("num_query_heads", "num_heads"), "a+b+c"),
    Mutation("no key", ATTENTION, CASE, without("key"), "a+b+c"),
    Mutation("scale forgotten", ATTENTION, CASE, without("softmax_scale"), "a"),
    Mutation("another layout", ATTENTION, CASE, put("input_layout", lambda x: "BSND"), "a+b"),
    Mutation("rope and latent parts swapped", ATTENTION, LATENT, swap("query", "query_rope"), "a+d"),
    Mutation("rope and latent caches swapped", ATTENTION, LATENT, swap("key", "key_rope"), "a+d"),
    Mutation("no rope part", ATTENTION, LATENT, without("query_rope"), "a+d"),
    Mutation("no rope cache", ATTENTION, LATENT, without("key_rope"), "a+d"),
    Mutation("heads not padded", ATTENTION, LATENT, put("num_query_heads", lambda x: 3), "a+d"),
    Mutation("causal decode without a mask", ATTENTION, LATENT, put("sparse_mode", lambda x: 0), "a+d"),
    Mutation("partials not flat", "attention_update", "pair", put("lse", lambda x: [part[None] for part in x]), "a+b+d"),
    Mutation("partial LSE in bf16", "attention_update", "pair", put("lse", lambda x: [part.bfloat16() for part in x]), "a+b+d"),
    Mutation("a slot of -1", "scatter_kv_cache", "odd", put("slot_mapping", lambda x: x.where(x < x.max(), -1)), "d"),
    Mutation("a slot twice", "scatter_kv_cache", "odd", put("slot_mapping", lambda x: x.where(x < x.max(), x.min())), "d"),
    Mutation("caches swapped", "scatter_kv_cache", "odd", swap("key_cache", "value_cache"), "a"),
    Mutation("default cache mode", "scatter_kv_cache", "odd", without("cache_mode"), "a"),
    Mutation("cumulative flag", "gather_kv_cache", "no-offset", put("is_seq_lens_cumsum", lambda x: True), "a+d"),
    Mutation("fp32 cache", "gather_kv_cache", "no-offset", put("key_cache", Tensor.float), "a+d"),
    Mutation("other rotation", "rotary", "full-half-float32", put("rotary_mode", lambda x: "interleave"), "a"),
    Mutation("angles in bf16", "rotary", "full-half-float32", put("r1", Tensor.bfloat16), "a+d"),
    Mutation("3-D input", "rotary", "full-half-float32", put("input", lambda x: x[0]), "a+b+d"),
    Mutation("epsilon forgotten", "rms_norm", "odd", without("epsilon"), "a"),
    Mutation("other dim", "swiglu", "odd", put("dim", lambda x: 0), "a+b+d"),
    Mutation("groups swapped", "moe_gating_top_k", "deepseek-v3", swap("k_group", "group_count"), "a+d"),
    Mutation("renormalised by CANN", "moe_gating_top_k", "qwen3", put("renorm", lambda x: 1), "a+d"),
    Mutation("other score of groups", "moe_gating_top_k", "deepseek-v3", put("group_select_mode", lambda x: 0), "a"),
    Mutation("scores not asked for", "moe_gating_top_k", "qwen3", put("out_flag", lambda x: False), "a"),
    Mutation("bf16 bias", "moe_gating_top_k", "kimi-k2", put("bias", Tensor.bfloat16), "a+d"),
    Mutation("all experts active", "moe_init_routing", "last-rank", put("active_expert_range", lambda x: [0, 16]), "a+b"),
    Mutation("indices the other way", "moe_init_routing", "odd", put("row_idx_type", lambda x: 1), "a"),
    Mutation("no counts", "moe_init_routing", "odd", put("expert_tokens_num_flag", lambda x: False), "a+b+d"),
    Mutation("int64 ids", "moe_init_routing", "odd", put("expert_idx", Tensor.long), "a+d"),
    Mutation("weight as stored", "grouped_matmul", "odd", put("weight", lambda x: [x[0].transpose(1, 2)]), "a+b+d"),
    Mutation("sizes as sums", "grouped_matmul", "odd", put("group_list_type", lambda x: 0), "a+d"),
    Mutation("a result to each group", "grouped_matmul", "odd", put("split_item", lambda x: 0), "a+d"),
    Mutation("an index of -1", "moe_token_unpermute", "odd", put("sorted_indices", lambda x: x.where(x > 0, -1)), "a+d"),
    Mutation("probs forgotten", "moe_token_unpermute", "odd", without("probs"), "a+b"),
    Mutation("a batch of tokens", "kv_rmsnorm_rope_cache", "odd", tokens_first, "a+b+d"),
    Mutation("rows not asked for", "kv_rmsnorm_rope_cache", "odd", without("is_output_kv"), "a"),
    Mutation("other cache mode", "kv_rmsnorm_rope_cache", "odd", put("cache_mode", lambda x: "PA_NZ"), "a"),
    Mutation("rope and latent caches swapped", "kv_rmsnorm_rope_cache", "odd", swap("k_cache", "ckv_cache"), "a+d"),
    Mutation("one slot twice", "kv_rmsnorm_rope_cache", "odd", put("index", lambda x: x.where(x < x.max(), x[0])), "a+d"),
    Mutation("angles of half width", "interleave_rope", "odd", put("cos", lambda x: x[..., :32]), "a+d"),
    Mutation("angles by head", "interleave_rope", "odd", put("sin", lambda x: x.expand(-1, 3, -1, -1)), "a+d"),
    Mutation("rope and latent parts swapped", SPARSE, "wide", swap("query", "query_rope"), "a+b+d"),
    Mutation("rope and latent caches swapped", SPARSE, "wide", swap("key", "key_rope"), "a+d"),
    Mutation("other mask", SPARSE, "wide", put("sparse_mode", lambda x: 3), "a"),
    Mutation("default attention mode", SPARSE, "wide", without("attention_mode"), "a+d"),
    Mutation("lengths swapped", SPARSE, "wide", swap("actual_seq_lengths_query", "actual_seq_lengths_kv"), "a+d"),
    Mutation("int64 indices", SPARSE, "wide", put("sparse_indices", Tensor.long), "a+d"),
    Mutation("-1 before others", SPARSE, "wide", put("sparse_indices", lambda x: x.flip(-1)), "a+d"),
    Mutation("scale forgotten", SPARSE, "wide", put("scale_value", lambda x: 1.0), "a"),
    Mutation("maximum and sum of pages", SPARSE, "wide", put("return_softmax_lse", lambda x: True), "a+b+d"),
    Mutation("heads not padded", SPARSE, "holes", put("query", lambda x: x[:, :3].contiguous()), "a+b+d"),
    Mutation("other tiles", PACKED, "odd", put("tile_size", lambda x: 64), "a+d"),
    Mutation("scales elsewhere", PACKED, "odd", put("quant_scale_repo_mode", lambda x: 0), "a+d"),
    Mutation("bytes without a sign", PACKED, "odd", put("key", lambda x: x.view(torch.uint8)), "a+d"),
    Mutation("no rope dims", PACKED, "odd", put("rope_head_dim", lambda x: 0), "a+b+d"),
    Mutation("blocks of rows", "pack_sparse_kv", "odd", put("row_block_size", lambda x: 128), "a+b+d"),
    Mutation("fp8", "pack_sparse_kv", "odd", put("dst_type", lambda x: 24), "a+b+d"),
    Mutation("no smallest scale", "pack_sparse_kv", "odd", without("min_scale"), "a"),
    Mutation(
        "lengths of the indexer swapped",
        "lightning_indexer",
        "decode",
        swap("actual_seq_lengths_query", "actual_seq_lengths_key"),
        "a+d",
    ),
    Mutation("keys for weights", "lightning_indexer", "decode", swap("key", "weights"), "a+b"),
    Mutation("layout of the keys left out", "lightning_indexer", "decode", without("layout_key"), "a+d"),
    Mutation("top-k of the document", "lightning_indexer", "decode", without("sparse_count"), "a+b"),
    Mutation("weights in fp32", "lightning_indexer", "odd", put("weights", Tensor.float), "a+d"),
    Mutation(
        "scales swapped", "quant_lightning_indexer", "decode-int8", swap("query_dequant_scale", "key_dequant_scale"), "a+d"
    ),
    Mutation("bf16 weights beside int8", "quant_lightning_indexer", "decode-int8", put("weights", Tensor.bfloat16), "a+d"),
    Mutation("a row of -1", "scatter_rows", "odd", put("indices", lambda x: x.where(x < x.max(), -1)), "d"),
    Mutation("rows and slots swapped", "scatter_rows", "odd", swap("indices", "updates"), "a+d"),
    Mutation("heads first", "transpose_batchmatmul", "values", put("perm_x1", lambda x: [0, 1, 2]), "a+b+d"),
    Mutation("weight as stored", "transpose_batchmatmul", "values", put("perm_x2", lambda x: [0, 2, 1]), "a+b+d"),
    Mutation("order forgotten", "transpose_batchmatmul", "values", without("perm_y"), "a+d"),
]


def lines_of(op: Any, given: Named, inputs: Named, lines: tuple, call: Any) -> list[str]:
    """What the golden file would say of a call, as far as it gets."""
    npu_line, cann_line = lines
    # That a call fails, and where, is for the other checks to say.
    with virtual_npu.record() as calls, contextlib.suppress(*REFUSALS):
        op(**given)
    return [npu_line(type(call)(op, (), given, None), inputs), *map(cann_line, calls)]


def foretold(op: Any, given: Named) -> object:
    """Shapes and dtypes from torch_npu's shape function, or that it or the schema refuses the call."""

    def hollow(x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if isinstance(x, Tensor) else x

    with FakeTensorMode():
        try:
            result = op(**tree_map(hollow, given))
        except REFUSALS:
            return "refused"
    return [(tuple(x.shape), x.dtype) for x in tree_leaves(result) if isinstance(x, Tensor)]


def static_faults(op: Any, given: Named) -> list[str]:
    """What the static check says of the call, written out."""
    written = ", ".join(f"{name}=x" for name in given)
    return STATIC.problems(f"torch_npu.{op._schema.name.removeprefix('npu::')}({written})")


def breaks_rule(op: Any, given: Named) -> bool:
    """Whether CANN's rules refuse the call; the rule's text is printed."""
    try:
        rules.check(op._schema.name, (), given)
    except rules.RuleError as error:
        print(error)
        return True
    return False


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_mutation_is_caught(
    mutation: Mutation, cases: Callable, serve: Callable, lines: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It would print a traceback for each refusal.
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
    case = next(case for case in cases(mutation.op, torch.bfloat16) if case.name == mutation.case)
    served = serve(mutation.op, case, lambda x: x.clone().to(NPU))
    call = served.calls[0]
    op, right = call.op, call.named()
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    wrong = mutation.change(defaults | right)
    golden = (Path(__file__).parent / "golden" / f"{mutation.op}.txt").read_text(encoding="utf-8")
    assert f"  {lines[0](call, served.inputs)}\n" in golden
    assert not breaks_rule(op, right)
    caught = []
    if lines_of(op, wrong, served.inputs, lines, call) != lines_of(op, defaults | right, served.inputs, lines, call):
        caught.append("a")
    promised = foretold(op, wrong)
    if promised != foretold(op, right):
        caught.append("b")
    if static_faults(op, wrong):
        caught.append("c")
    elif promised != "refused" and breaks_rule(op, wrong):
        caught.append("d")
    print(f"{mutation.name}: caught by {'+'.join(caught)}")
    assert "+".join(caught) == mutation.caught_by
