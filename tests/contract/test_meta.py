"""Contract check (b): torch_npu's own shape functions agree with our fakes, for every generated case.

npu_ops/ascend runs on fake NPU tensors, which have shapes and no values; torch_npu's schemas and shape functions look at the
arguments of every call. The same calls then run on the virtual NPU, whose results must have the shapes that were foretold.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from npu_ops.contract import OpCase, all_contracts
from npu_ops.device import NPU

CONTRACTS = all_contracts()
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def shapes(result: Any) -> list[tuple[Any, ...]]:
    return [(tuple(x.shape), x.dtype, x.device.type) for x in tree_leaves(result) if isinstance(x, Tensor)]


def hollow(x: Tensor) -> Tensor:
    """A fake NPU tensor of the same shape, strides and dtype."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=NPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONTRACTS)
def test_shapes_are_those_of_our_fake(name: str, dtype: str, cases: Callable, serve: Callable) -> None:
    contract, counted = CONTRACTS[name], 0
    for case in cases(name, DTYPES[dtype]):
        if name == "gather_kv_cache" and case.kwargs.get("seq_offset") is not None:
            continue  # goes to no operator of torch_npu
        with FakeTensorMode():
            served = serve(name, case, hollow)
            args, kwargs = tree_map(lambda x: hollow(x) if isinstance(x, Tensor) else x, (case.args, case.kwargs))
            promised = contract.fake(*args, **kwargs)
        if served is None:
            continue
        calls, result = served.calls, served.result
        assert shapes(result) == shapes(promised), case.name
        counted += len(calls)
    print(f"{name} {dtype}: {counted} calls")
    assert counted, f"no case of {name} reaches torch_npu"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONTRACTS)
def test_shape_functions_foretell_results(name: str, dtype: str, cases: Callable, serve: Callable) -> None:
    for case in cases(name, DTYPES[dtype]):
        served = serve(name, case, lambda x: copy(x).to(NPU))
        for call in served.calls if served else ():
            with FakeTensorMode():
                args, kwargs = tree_map(lambda x: hollow(x) if isinstance(x, Tensor) else x, (call.args, call.kwargs))
                foretold = call.op(*args, **kwargs)
            assert shapes(foretold) == shapes(call.result), f"{case.name}: {call.op}"


def copy(x: Tensor) -> Tensor:
    """A copy that mutating calls may write into."""
    return x.clone()


def test_a_wrong_fake_is_caught(cases: Callable, serve: Callable) -> None:
    case: OpCase = next(iter(cases("swiglu", torch.bfloat16)))
    with FakeTensorMode():
        result = serve("swiglu", case, hollow).result
        wrong = torch.empty_like(result, dtype=torch.float32)
    assert shapes(result) != shapes(wrong)


def test_schema_file_is_that_of_the_installed_version() -> None:
    tool = Path(__file__).parents[2] / "tools" / "torch_npu_schemas.py"
    run = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
