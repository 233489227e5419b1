"""What the contract checks share: the cases, the calls that npu_ops/ascend makes for them, and how a call reads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from npu_ops import virtual_npu
from npu_ops.contract import ContractError, OpCase, all_contracts
from npu_ops.fused_infer_attention import build_case
from npu_ops.virtual_npu.recording import ACL_FORMATS, AclCall, AclScalar, AclTensor

KEY = "PrivateUse1"
NEED_TORCH_NPU = ("test_golden.py", "test_meta.py", "test_mutations.py", "test_rules.py")
# With blocks of 128, which CANN wants for more than one row a request: most of the contract's cases have smaller ones.
BATCHES: list[tuple[str, list[tuple[int, int]], tuple[int, int, int, int], dict[str, Any]]] = [
    ("prefill-b128", [(33, 33)], (8, 2, 128, 128), {"sparse_mode": 3}),
    ("mixed-b128", [(1, 50), (20, 20), (5, 200)], (4, 2, 64, 128), {"sparse_mode": 3, "return_softmax_lse": False}),
    ("window-b128", [(1, 300), (9, 140)], (4, 1, 128, 128), {"sparse_mode": 4, "pre_tokens": 99, "next_tokens": 0}),
    ("chunk-packed", [(7, 40), (16, 16)], (4, 4, 192, 0), {"sparse_mode": 0}),
]
# Formats that say no more than the number of dims.
PLAIN = (None, *(ACL_FORMATS[code] for code in (0, 2, 30, 47)))
NO_ORIGINS: Mapping[int, str] = {}


@dataclass(frozen=True)
class NpuCall:
    """One call of an operator of torch_npu, as the dispatcher gets it."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def named(self) -> dict[str, Any]:
        """All arguments that were given, by name."""
        names = [argument.name for argument in self.op._schema.arguments]
        return dict(zip(names, self.args, strict=False)) | self.kwargs


@dataclass(frozen=True)
class Served:
    """What npu_ops/ascend did for one case: its calls, its result, and the arguments that it was given."""

    calls: list[NpuCall]
    result: Any
    inputs: dict[str, Any]


class Spy(TorchDispatchMode):
    """Keeps the calls of torch_npu's operators that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[NpuCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func.namespace in ("npu", "atb"):
            self.calls.append(NpuCall(func, args, kwargs or {}, result))
        return result


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Checks that run torch_npu are left out where it is not installed, and with it the virtual NPU."""
    return True if collection_path.name in NEED_TORCH_NPU and not virtual_npu.is_enabled() else None


def more_cases(name: str, dtype: torch.dtype) -> Iterator[OpCase]:
    """Cases for what no case of the contract makes npu_ops/ascend do."""
    if name == "fused_infer_attention":
        for label, batch, shape, options in BATCHES:
            yield build_case(label, batch, shape, options, "cpu", dtype, 7)
        options = {"sparse_mode": 3, "learnable_sink": torch.linspace(-1, 1, 8).to(dtype), "return_softmax_lse": False}
        yield build_case("sink-inside", [(3, 60), (1, 9)], (8, 8, 128, 128), options, "cpu", dtype, 8)
    if name == "kv_quant_sparse_flash_attention":
        # bf16 calls of the contract have no LSE, because it is right within bf16 alone; with it the mapping goes another way.
        for case in all_contracts()[name].cases("cpu", dtype, 0):
            if case.name in ("holes", "decodes"):
                yield OpCase(f"{case.name}-lse", case.args, case.kwargs | {"return_softmax_lse": True})
    if name == "attention_update":  # more partials than CANN merges at once
        parts = torch.randn(20, 3, 2, 64).to(dtype)
        yield OpCase("twenty", (list(parts.float()[..., 0].unbind()), list(parts.unbind())))
    if name == "gather_kv_cache":  # without offsets, as CANN's own kernel takes it
        for case in all_contracts()[name].cases("cpu", dtype, 0):
            if case.kwargs.get("seq_offset") is not None:
                yield OpCase(f"{case.name}-from-0", case.args)


@contextmanager
def fresh_constants() -> Iterator[None]:
    """What a mapping keeps for a device, a mask or a matrix, must not come from, or go to, another kind of tensor."""
    from npu_ops.ascend.fused_infer_attention import _mask
    from npu_ops.ascend.hadamard_rotation import _matrix

    for kept in (_mask, _matrix):
        kept.cache_clear()
    yield
    for kept in (_mask, _matrix):
        kept.cache_clear()


def serve(name: str, case: OpCase, move: Callable[[Tensor], Tensor]) -> Served | None:
    """Run npu_ops/ascend on a case whose tensors ``move`` has moved; None where the mapping refuses it for CANN."""
    contract = all_contracts()[name]
    args, kwargs = tree_map(lambda x: move(x) if isinstance(x, Tensor) else x, (case.args, case.kwargs))
    inputs = dict(zip([argument.name for argument in contract.op._schema.arguments], args, strict=False)) | kwargs
    try:
        with fresh_constants(), Spy() as spy:
            result = contract.provider(KEY)(*args, **kwargs)
    except ContractError:
        return None
    return Served(spy.calls, result, inputs)


def tensor_text(x: Tensor | AclTensor) -> str:
    """``bfloat16[4,64]``, and what is unusual about it: strides, offset, format."""
    strides, offset, format = x.stride, getattr(x, "offset", 0), getattr(x, "format", None)
    if isinstance(x, Tensor):
        strides, offset = x.stride(), x.storage_offset()
    packed = [math.prod(x.shape[dim + 1 :]) for dim in range(len(x.shape))]
    notes = [f"strides {list(strides)}"] if list(strides) != packed and math.prod(x.shape) else []
    notes += [f"offset {offset}"] if offset else []
    notes += [str(format)] if format not in PLAIN else []
    size = ",".join(map(str, x.shape))
    return f"{str(x.dtype).removeprefix('torch.')}[{size}]" + (f"({', '.join(notes)})" if notes else "")


def listed(parts: Iterable[str]) -> str:
    """The parts with commas; three and more equal ones in a row are counted."""
    runs = [(part, len(list(group))) for part, group in itertools.groupby(parts)]
    return ", ".join(f"{part} x {count}" if count > 2 else ", ".join([part] * count) for part, count in runs)


def text(x: Any, origins: Mapping[int, str] = NO_ORIGINS) -> str:
    """An argument as it reads in a golden file; a tensor with the argument of ours whose memory it is."""
    if isinstance(x, Tensor):
        origin = origins.get(x.untyped_storage().data_ptr()) if x.numel() else None
        return (f"{origin}:" if origin else "") + tensor_text(x)
    if isinstance(x, AclTensor):
        return tensor_text(x)
    if isinstance(x, AclScalar):
        return f"{x.dtype}({x.value})"
    if isinstance(x, tuple | list):
        return f"[{listed(text(item, origins) for item in x)}]"
    return f"{x:.9g}" if isinstance(x, float) else repr(x)


def npu_line(call: NpuCall, inputs: Mapping[str, Any]) -> str:
    """``npu_swiglu(input=input:bfloat16[4,128], dim=-1)``."""
    origins = {x.untyped_storage().data_ptr(): name for name, value in inputs.items() for x in tree_leaves(value)
               if isinstance(x, Tensor) and x.numel()}  # fmt: skip
    given = ", ".join(f"{name}={text(value, origins)}" for name, value in call.named().items() if value is not None)
    return f"{call.op._schema.name.removeprefix('npu::')}({given})"


def cann_line(call: AclCall) -> str:
    """``aclnnSwiGlu(bfloat16[4,128], -1, bfloat16[4,64])``."""
    floats = f"; floats {listed(map(text, call.floats))}" if call.floats else ""
    return f"{call.op}({listed(map(text, call.arguments))}{floats})"


@pytest.fixture(autouse=True)
def below_autograd() -> Iterator[None]:
    """As PyTorch's dispatcher calls npu_ops/ascend: an op for training may come in another form above."""
    with torch._C._AutoDispatchBelowAutograd():
        yield


@pytest.fixture(name="serve")
def serve_fixture() -> Callable[..., Served | None]:
    """The function ``serve`` of this file."""
    return serve


@pytest.fixture
def lines() -> tuple[Callable[..., str], Callable[..., str]]:
    """The functions ``npu_line`` and ``cann_line`` of this file."""
    return npu_line, cann_line


@pytest.fixture
def cases() -> Callable[[str, torch.dtype], list[OpCase]]:
    """Cases of an op, on the CPU: the contract's own and those above."""

    def run(name: str, dtype: torch.dtype) -> list[OpCase]:
        return [*all_contracts()[name].cases("cpu", dtype, 0), *more_cases(name, dtype)]

    return run
