"""What CANN requires of a call and torch_npu does not check: broken rules surface here instead of on a device.

``check(name, args, kwargs)`` is called once for every ``npu::`` op that the virtual NPU serves, with the op's full name and
the arguments as PyTorch's dispatcher hands them over; tensors may be npu, CPU or meta ones. It returns nothing, or raises
RuleError with the first rule that the call breaks. Ops without rules pass.

Every rule was read in a public document, named beside it. Rules about values, such as the range of slots, are looked at where
from npu_ops.virtual_npu import attention_rules, indexer, mla, moe_rules, quant, sparse_attention  # noqa: E402, F401
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# The documents, by the names under which they are published.
UPDATE = "CANN ops-transformer, attention/attention_update"
SCATTER = "torch_npu doc of npu_scatter_pa_kv_cache"
GATHER = "CANN ops-transformer, aclnnGatherPaKvCache and its kernel for A2 and A3"
ROTARY = "torch_npu doc of npu_rotary_mul"
NORM = "torch_npu doc of npu_rms_norm; aclnnRmsNorm for gamma in fp32"
SWIGLU = "torch_npu doc of npu_swiglu"

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INT32_MAX = 2**31 - 1
# What came instead of what a rule requires, from a call's arguments by name; None if the rule holds.
Broken = Callable[[Any], object]


class RuleError(ValueError):
    """A call that CANN documents as invalid.

    Attributes:
        rule: the rule that it breaks.
    """

    def __init__(self, op: str, rule: Rule, got: object) -> None:
        super().__init__(f"{op}: CANN requires {rule.text}, got {got} ({rule.source})")
        self.rule = rule


@dataclass(frozen=True)
class Rule:
    """One requirement.

    Attributes:
        text: what is required, to be read after "CANN requires".
        source: the document that says so.
        broken: finds what came instead.
    """

    text: str
    source: str
    broken: Broken


RULES: dict[str, list[Rule]] = {}
# The first version of the attention op has other names for the same arguments.
RENAMED: Mapping[str, str] = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
}


def check(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if the call breaks a rule.

    Args:
        name: the op, ``"npu::npu_rms_norm"``; the namespace and an overload may be left out.
        args: positional arguments.
        kwargs: keyword arguments.

    Raises:
        RuleError: with the text of the first rule that is broken, what came, and the document.
    """
    base = name.partition("::")[2] or name
    base = base.partition(".")[0]
    if base in RULES:
        call = bind(base, args, kwargs)
        for rule in RULES[base]:
            got = rule.broken(call)
            if got is not None:
                raise RuleError(base, rule, got)


def bind(base: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SimpleNamespace:
    """The arguments of a call by name, defaults included, from torch_npu's schema of the op."""
    defaults = _defaults(base)
    bound = {**defaults, **dict(zip(defaults, args, strict=False))}
    bound.update((RENAMED.get(key, key), value) for key, value in kwargs.items())
    return SimpleNamespace(**bound)


@functools.cache
def _defaults(base: str) -> dict[str, Any]:
    """Names of an op's arguments, in their order, with their defaults. Reading a schema takes longer than most rules."""
    schema = getattr(torch.ops.npu, base).default._schema
    return {RENAMED.get(argument.name, argument.name): argument.default_value for argument in schema.arguments}


def rule(text: str, source: str, *ops: str) -> Callable[[Broken], Broken]:
    """Make the decorated function, which returns what came instead or None, a rule of these ops."""

    def decorate(function: Broken) -> Broken:
        for op in ops:
            RULES.setdefault(op, []).append(Rule(text, source, function))
        return function

    return decorate


def unless(holds: object, got: object) -> object:
    """``got``, unless the rule holds."""
    return None if holds else got


def values(tensor: Tensor) -> list[Any] | None:
    """The numbers in a tensor, or None for one that has none."""
    from torch._subclasses.fake_tensor import FakeTensor

    return None if tensor.is_meta or isinstance(tensor, FakeTensor) else tensor.tolist()


def scattered(call: Any, *names: str) -> object:
    """Names and strides of the tensors that are not contiguous."""
    found = {name: tensor.stride() for name in names if (tensor := getattr(call, name, None)) is not None
             and not tensor.is_contiguous()}  # fmt: skip
    return found or None


# ---- merging partial results --------------------------------------------------------------------------------------------


@rule("update_type 0 or 1", UPDATE, "npu_attention_update")
def _update_type(c: Any) -> object:
    return unless(c.update_type in (0, 1), c.update_type)


@rule("1 to 16 partials, as many LSEs as outputs", UPDATE, "npu_attention_update")
def _partials(c: Any) -> object:
    return unless(1 <= len(c.lse) == len(c.local_out) <= 16, (len(c.lse), len(c.local_out)))


@rule("fp32 LSEs [M] and outputs [M, D] of one shape and dtype: fp32, fp16 or bf16", UPDATE, "npu_attention_update")
def _partial_shapes(c: Any) -> object:
    first = c.local_out[0]
    right = first.dim() == 2 and first.dtype in FLOATS
    right &= all(x.shape == first.shape and x.dtype == first.dtype for x in c.local_out)
    right &= all(x.shape == first.shape[:1] and x.dtype == torch.float32 for x in c.lse)
    return unless(right, [f"{x.dtype} {list(x.shape)}" for x in (*c.lse, *c.local_out)])


@rule("a head dim of 8 to 512 that is a multiple of 8", UPDATE, "npu_attention_update")
def _partial_dim(c: Any) -> object:
    width = c.local_out[0].shape[1]
    return unless(8 <= width <= 512 and width % 8 == 0, width)


@rule("contiguous partials", UPDATE, "npu_attention_update")
def _partials_contiguous(c: Any) -> object:
    return unless(all(x.is_contiguous() for x in (*c.lse, *c.local_out)), [x.stride() for x in (*c.lse, *c.local_out)])


# ---- paged cache --------------------------------------------------------------------------------------------------------


@rule("contiguous tensors", SCATTER, "npu_scatter_pa_kv_cache")
def _scatter_contiguous(c: Any) -> object:
    return scattered(c, "key", "value", "key_cache", "value_cache", "slot_mapping")


@rule("key, value and both caches in one dtype", SCATTER, "npu_scatter_pa_kv_cache")
def _scatter_dtypes(c: Any) -> object:
    dtypes = [x.dtype for x in (c.key, c.value, c.key_cache, c.value_cache)]
    return unless(len(set(dtypes)) == 1, dtypes)


@rule("rows [T, N, D] that fit caches [blocks, block_size, N, D] in cache_mode Norm", SCATTER, "npu_scatter_pa_kv_cache")
def _scatter_shapes(c: Any) -> object:
    if c.cache_mode not in (None, "Norm") or c.key.dim() != 3:
        return None
    pairs = (c.key, c.key_cache), (c.value, c.value_cache)
    right = all(cache.dim() == 4 and rows.shape[1:] == cache.shape[2:] for rows, cache in pairs)
    right = right and c.key.shape[:2] == c.value.shape[:2] and c.key_cache.shape[:2] == c.value_cache.shape[:2]
    return unless(right, [[list(x.shape) for x in pair] for pair in pairs])


@rule("one int32 or int64 slot to a row", SCATTER, "npu_scatter_pa_kv_cache")
def _slots(c: Any) -> object:
    slots = c.slot_mapping
    right = slots.dtype in (torch.int32, torch.int64) and (c.key.dim() != 3 or slots.shape == c.key.shape[:1])
    return unless(right, f"{slots.dtype} {list(slots.shape)} for {c.key.shape[0]} rows")


@rule("slots in [0, blocks * block_size)", SCATTER, "npu_scatter_pa_kv_cache")
def _slot_range(c: Any) -> object:
    slots, room = values(c.slot_mapping), c.key_cache.shape[0] * c.key_cache.shape[1]
    if c.cache_mode not in (None, "Norm") or c.key.dim() != 3 or not slots:
        return None
    return unless(0 <= min(slots) <= max(slots) < room, f"{min(slots)} to {max(slots)} of {room}")


@rule("distinct slots; for two equal rows to one slot, the order of which nobody can see, this passes", SCATTER,
      "npu_scatter_pa_kv_cache")  # fmt: skip
def _slots_distinct(c: Any) -> object:
    slots = values(c.slot_mapping)
    if c.key.dim() != 3 or not slots or len(set(slots)) == len(slots):
        return None
    first: dict[int, int] = {}
    same = [first.setdefault(slot, row) for row, slot in enumerate(slots)]
    again = [row for row, earlier in enumerate(same) if row != earlier]
    earlier = [same[row] for row in again]
    # As bytes: a padding row may hold NaN.
    equal = all(torch.equal(x[again].view(torch.uint8), x[earlier].view(torch.uint8)) for x in (c.key, c.value))
    return unless(equal, f"slot {slots[again[0]]} for rows {earlier[0]} and {again[0]}")


@rule("contiguous tensors", GATHER, "npu_gather_pa_kv_cache")
def _gather_contiguous(c: Any) -> object:
    return scattered(c, "key_cache", "value_cache", "block_tables", "seq_lens", "key", "value", "seq_offset")


@rule("caches and rows in one dtype: int8, fp16 or bf16", GATHER, "npu_gather_pa_kv_cache")
def _gather_dtypes(c: Any) -> object:
    dtypes = [x.dtype for x in (c.key_cache, c.value_cache, c.key, c.value)]
    return unless(len(set(dtypes)) == 1 and dtypes[0] in (torch.int8, torch.float16, torch.bfloat16), dtypes)


@rule("int32 block_tables [B, blocks], seq_lens [B] (cumulative: [B + 1]) and seq_offset [B]", GATHER, "npu_gather_pa_kv_cache")
def _gather_indices(c: Any) -> object:
    requests = c.block_tables.shape[0]
    right = c.block_tables.dim() == 2 and tuple(c.seq_lens.shape) == (requests + c.is_seq_lens_cumsum,)
    right = right and (c.seq_offset is None or tuple(c.seq_offset.shape) == (requests,))
    given = [x for x in (c.block_tables, c.seq_lens, c.seq_offset) if x is not None]
    return unless(right and all(x.dtype == torch.int32 for x in given), [f"{x.dtype} {list(x.shape)}" for x in given])


@rule("caches [blocks, block_size, N, D] and rows [R, N, D]", GATHER, "npu_gather_pa_kv_cache")
def _gather_shapes(c: Any) -> object:
    pairs = (c.key, c.key_cache), (c.value, c.value_cache)
    right = all(cache.dim() == 4 and rows.shape[1:] == cache.shape[2:] for rows, cache in pairs)
    return unless(right and c.key.shape[0] == c.value.shape[0], [[list(x.shape) for x in pair] for pair in pairs])


@rule("no empty tensor", GATHER, "npu_gather_pa_kv_cache")
def _gather_empty(c: Any) -> object:
    shapes = [list(x.shape) for x in (c.key_cache, c.value_cache, c.block_tables, c.seq_lens, c.key, c.value)]
    return unless(all(math.prod(shape) for shape in shapes), shapes)


@rule("tokens whose bytes are a multiple of 32 and at most 148 KiB", GATHER, "npu_gather_pa_kv_cache")
def _gather_rows(c: Any) -> object:
    sizes = [math.prod(x.shape[1:]) * x.element_size() for x in (c.key, c.value)]
    return unless(all(size % 32 == 0 and size <= 148 * 1024 for size in sizes), sizes)


@rule("caches of at most 2**31 - 1 elements, as offsets are int32", GATHER, "npu_gather_pa_kv_cache")
def _gather_size(c: Any) -> object:
    sizes = c.key_cache.numel(), c.value_cache.numel()
    return unless(max(sizes) <= INT32_MAX, sizes)


@rule("seq_offset in whole blocks: its remainder is dropped", GATHER, "npu_gather_pa_kv_cache")
def _gather_offset(c: Any) -> object:
    offsets = None if c.seq_offset is None else values(c.seq_offset)
    odd = [x for x in offsets or () if x % c.key_cache.shape[1]]
    return unless(not odd, f"{odd} with blocks of {c.key_cache.shape[1]}")


# ---- small ops ----------------------------------------------------------------------------------------------------------


@rule("4-D tensors in one dtype: fp16, bf16 or fp32", ROTARY, "npu_rotary_mul")
def _rotary_tensors(c: Any) -> object:
    given = c.input, c.r1, c.r2
    right = all(x.dim() == 4 for x in given) and len({x.dtype for x in given}) == 1 and c.input.dtype in FLOATS
    return unless(right, [f"{x.dtype} {list(x.shape)}" for x in given])


@rule("rotary_mode half or interleave", ROTARY, "npu_rotary_mul")
def _rotary_mode(c: Any) -> object:
    return unless(c.rotary_mode in ("half", "interleave"), c.rotary_mode)


@rule("an even head dim below 896", ROTARY, "npu_rotary_mul")
def _rotary_dim(c: Any) -> object:
    width = c.input.shape[-1]
    return unless(0 < width < 896 and width % 2 == 0, width)


@rule("factors as wide as the input that repeat over heads (and, in mode half, over the batch)", ROTARY, "npu_rotary_mul")
def _rotary_factors(c: Any) -> object:
    shape, factor = c.input.shape, c.r1.shape
    right = factor == c.r2.shape and factor[-1] == shape[-1] and all(a in (1, b) for a, b in zip(factor, shape, strict=True))
    return unless(right, [list(x.shape) for x in (c.input, c.r1, c.r2)])


@rule("an input of up to 8 dims in fp16, bf16 or fp32, and gamma over its last ones in that dtype or fp32", NORM,
      "npu_rms_norm", "npu_add_rms_norm")  # fmt: skip
def _norm_tensors(c: Any) -> object:
    x, gamma = getattr(c, "input", None), c.gamma
    x = c.x1 if x is None else x
    right = 1 <= x.dim() <= 8 and x.dtype in FLOATS and gamma.dtype in (x.dtype, torch.float32)
    right = right and gamma.dim() >= 1 and x.shape[-gamma.dim() :] == gamma.shape
    return unless(right, [f"{t.dtype} {list(t.shape)}" for t in (x, gamma)])


@rule("summands of one shape and dtype", NORM, "npu_add_rms_norm")
def _norm_summands(c: Any) -> object:
    given = c.x1, c.x2
    return unless(c.x1.shape == c.x2.shape and c.x1.dtype == c.x2.dtype, [f"{t.dtype} {list(t.shape)}" for t in given])


@rule("an input of 1 to 8 dims in fp16, bf16 or fp32 whose dim ``dim`` is even", SWIGLU, "npu_swiglu")
def _swiglu_input(c: Any) -> object:
    x = c.input
    return unless(1 <= x.dim() <= 8 and x.dtype in FLOATS and x.shape[c.dim] % 2 == 0, f"{x.dtype} {list(x.shape)}")


# At the end, as the module takes ``rule`` from here: its rules add themselves.
from npu_ops.virtual_npu import attention_rules, indexer, mla, moe_rules, quant, sparse_attention  # noqa: E402, F401
