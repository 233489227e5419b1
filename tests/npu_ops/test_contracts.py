"""What holds for every op: one stem, one signature, one schema, and what torch.library promises about it."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_ops.contract import NAMESPACE, OP_STEMS, PROVIDERS, ContractError, OpContract, all_contracts

ROOT = Path(__file__).parents[2]
PACKAGES = ("npu_ops", "npu_ops.reference", "npu_ops.ascend", "cuda_fallback")
CONTRACTS = all_contracts()
by_op = pytest.mark.parametrize("name", CONTRACTS)


def source(package: str, stem: str) -> Path:
    return ROOT / package.replace(".", "/") / f"{stem}.py"


def signature(path: Path, name: str) -> list[tuple[str, str, object]]:
    """Name, kind and default of every argument of a function, read without importing what the module imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert len(functions) == 1, f"{path} has {len(functions)} functions {name}"
    arguments, constants = functions[0].args, module_constants(tree)
    assert not arguments.vararg, f"{path}: {name} takes *{arguments.vararg}"
    assert not arguments.kwarg, f"{path}: {name} takes **{arguments.kwarg}"
    positional = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    rows = [(arg, "positional", default) for arg, default in zip(positional, missing + arguments.defaults, strict=True)]
    rows += [(arg, "keyword", default) for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return [(arg.arg, kind, value_of(default, constants) if default else "required") for arg, kind, default in rows]


def module_constants(tree: ast.Module) -> dict[str, object]:
    """Names that the module binds to literals, alone or several in one line."""
    found: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            names, values = ([target], [value])
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                names, values = target.elts, value.elts
            found |= {
                n.id: v.value
                for n, v in zip(names, values, strict=True)
                if isinstance(n, ast.Name) and isinstance(v, ast.Constant)
            }
    return found


def value_of(default: ast.expr, constants: dict[str, object]) -> object:
    if isinstance(default, ast.Name):
        return constants[default.id]
    return ast.literal_eval(default)


def public(contract: OpContract) -> Any:
    return getattr(importlib.import_module(f"npu_ops.{contract.stem}"), contract.name)


def test_stems_are_those_of_the_contracts() -> None:
    assert {contract.stem for contract in CONTRACTS.values()} == set(OP_STEMS)


@pytest.mark.parametrize("stem", OP_STEMS)
@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_every_stem(package: str, stem: str) -> None:
    assert source(package, stem).is_file(), f"{source(package, stem)} is missing"


@pytest.mark.parametrize("stem", OP_STEMS)
def test_every_stem_has_a_test(stem: str) -> None:
    assert (ROOT / "tests/npu_ops" / f"test_{stem}.py").is_file()


@by_op
@pytest.mark.parametrize("package", PACKAGES[1:])
def test_signatures_are_equal(package: str, name: str) -> None:
    stem = CONTRACTS[name].stem
    assert signature(source(package, stem), name) == signature(source("npu_ops", stem), name)


@by_op
def test_schema_repeats_the_public_signature(name: str) -> None:
    contract = CONTRACTS[name]
    parameters = inspect.signature(public(contract)).parameters.values()
    arguments = contract.op._schema.arguments
    assert [a.name for a in arguments] == [p.name for p in parameters]
    assert [a.kwarg_only for a in arguments] == [p.kind is p.KEYWORD_ONLY for p in parameters]
    for argument, parameter in zip(arguments, parameters, strict=True):
        assert argument.has_default_value() == (parameter.default is not parameter.empty), parameter.name
        if argument.has_default_value():
            assert argument.default_value == parameter.default, parameter.name


@by_op
def test_docstring_names_every_argument_and_the_errors(name: str) -> None:
    function = public(CONTRACTS[name])
    text = inspect.getdoc(function) or ""
    for section in ("Args:", "Raises:"):
        assert section in text
    assert [p for p in inspect.signature(function).parameters if f"    {p}: " not in text] == []
    assert "torch_npu" in (inspect.getmodule(function).__doc__ or "")


@by_op
def test_every_device_has_a_kernel(name: str) -> None:
    for key in ("CPU", *PROVIDERS):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key), key
    assert CONTRACTS[name].provider("CPU") is CONTRACTS[name].reference


def opchecks(contract: OpContract, results: list[torch.Tensor], args: tuple[Any, ...]) -> tuple[str, ...]:
    """The checks of opcheck: where a part of a result may hold anything, two runs need not agree.

    PyTorch compares no 8-bit floats, so there what an op writes into is looked at in its cases of other types.
    """
    shapes = [[r.shape for r in some] for some in (results, contract.defined(args, results))]
    runs_twice = ("test_aot_dispatch_dynamic",) if shapes[0] == shapes[1] else ()
    eight_bits = any(isinstance(x, torch.Tensor) and x.is_floating_point() and x.element_size() == 1 for x in args)
    schema = () if eight_bits else ("test_schema",)
    return (*schema, "test_autograd_registration", "test_faketensor", *runs_twice)


@by_op
def test_opcheck(name: str, device: str, call_op: Callable) -> None:
    # One dtype: what opcheck looks at (schema, fake shapes, autograd keys, dynamic shapes) does not depend on it.
    contract = CONTRACTS[name]
    refused: list[ContractError] = []
    cases = list(contract.cases(device, torch.bfloat16, 0))
    # Schema and fake are the same on every device; of an implementation a few cases show whether it keeps to them.
    for case in cases if device == "cpu" else cases[:4]:
        try:
            checks = opchecks(contract, call_op(contract, case), case.args)
        except ContractError as error:
            refused.append(error)
            continue
        results = torch.library.opcheck(contract.op, case.args, case.kwargs, test_utils=checks, raise_exception=False)
        assert set(results.values()) == {"SUCCESS"}, f"{case.name}: {results}"
    if refused:
        raise refused[0]


@by_op
def test_cases_repeat_themselves(name: str) -> None:
    first, again = (list(CONTRACTS[name].cases("cpu", torch.float32, 3)) for _ in range(2))
    assert len({case.name for case in first}) == len(first)
    torch.testing.assert_close([case.args for case in again], [case.args for case in first], rtol=0, atol=0, equal_nan=True)


def test_allocations_of_ops_are_poisoned_in_tests(device: str) -> None:
    for name in ("rms_norm", "swiglu"):
        contract = CONTRACTS[name]
        case = next(case for case in contract.cases(device, torch.bfloat16, 0) if case.name == "wide")
        assert contract.fake(*case.args, **case.kwargs).isnan().all()
    own = torch.zeros(4, device=device)
    assert not torch.empty_like(own).copy_(own).isnan().any()


def test_importing_contracts_imports_no_vendor() -> None:
    code = (
        "import sys, npu_ops.device, npu_ops.contract; npu_ops.contract.all_contracts();"
        "print([m for m in ('torch_npu', 'triton', 'vllm', 'cuda_fallback', 'npu_ops.ascend') if m in sys.modules])"
    )
    # PyTorch itself loads an installed torch_npu unless told not to.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == "[]"
