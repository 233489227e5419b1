"""What every test shares: the devices, a seed of its own, poisoned allocations, and one way to check an op.

A test with an argument ``device`` runs on every device of ``--device`` (all that are found, if it is not given); one
with an argument ``op_case`` runs on every generated case of the ops that its module lists in ``OPS``; one with an
argument ``source_file`` on every Python file of the project outside of its module's ``HOMES``.
"""

from __future__ import annotations

import ctypes.util
import importlib
import importlib.util
import math
import os
import random
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from npu_ops import device as devices
from npu_ops import virtual_npu
from npu_ops.contract import NAMESPACE, ContractError, OpCase, OpContract, all_contracts

ROOT = Path(__file__).parent
PROJECT = {"npu_ops", "cuda_fallback", "dsa_cp", "sfa", "mla_workspace", "sleep_mode", "planner", "vllm_plugin"}
# Test rooms in which the project's own allocations are poisoned; an engine under test is left alone.
OP_ROOMS = {"npu_ops", "cuda_fallback", "mla_workspace"}
VIRTUAL = "virtual-npu"
# What PyTorch calls a device of ours, where the two names differ.
TORCH_NAMES = {VIRTUAL: devices.NPU}
KNOWN_DEVICES = (devices.CPU, devices.CUDA, devices.NPU, VIRTUAL)

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=20, database=None)
hypothesis.settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        action="append",
        metavar="|".join(KNOWN_DEVICES),
        help="run on this device; several with commas or repeated; default: every device that is found",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_DEVICES] = _chosen_devices(config.getoption("--device"))


_DEVICES = pytest.StashKey[list[str]]()


def _enable_virtual_npu() -> None:
    # As much as an NPU has: op tests reach for indices past 2^31, in memory that nobody touches.
    os.environ.setdefault("VIRTUAL_NPU_MEMORY", "64GiB")
    try:
        virtual_npu.enable()
    except (ImportError, RuntimeError, ValueError) as error:
        raise pytest.UsageError(f"--device {VIRTUAL}: {error}") from error


def _has_cann() -> bool:
    return any(Path("/dev").glob("davinci*")) or bool(ctypes.util.find_library("ascendcl"))


if importlib.util.find_spec("torch_npu") and not _has_cann():
    # Before any other conftest: transformers imports a torch_npu that is installed, and here it loads only this way.
    _enable_virtual_npu()


def _chosen_devices(option: list[str] | None) -> list[str]:
    names = [name for part in option or [] for name in part.split(",") if name]
    if unknown := sorted(set(names) - set(KNOWN_DEVICES)):
        raise pytest.UsageError(f"--device: one of {KNOWN_DEVICES} is required, got {unknown}")
    if VIRTUAL in names:
        _enable_virtual_npu()
    found = devices.found_devices()
    if virtual_npu.is_enabled():
        found = [VIRTUAL if name == devices.NPU else name for name in found]
    if missing := [name for name in names if name not in found]:
        # A device that was asked for and is not there is an error, never a run of skipped tests.
        raise pytest.UsageError(f"--device: {missing} asked for, only {found} found on this machine")
    return list(dict.fromkeys(names)) or found


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Which devices the tests run on, and what is left out for them."""
    lines = [f"devices: {', '.join(config.stash[_DEVICES])}"]
    if VIRTUAL not in config.stash[_DEVICES]:
        why = f"--device {VIRTUAL} runs it" if virtual_npu.is_enabled() else "it needs torch_npu, which is not installed"
        lines.append(f"tests/virtual_npu is not collected: {why}")
    elif devices.CPU in config.stash[_DEVICES]:
        lines.append("tests/e2e leaves cpu out: beside a torch_npu without CANN vLLM does not load on it")
    return lines


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests of the virtual NPU run where it is the device."""
    ours = collection_path.is_relative_to(ROOT / "virtual_npu")
    return True if ours and VIRTUAL not in config.stash[_DEVICES] else None


# What the contract allows on every device and CANN does not: the mapping says so, and these tests stop there.
NPU_LIMITS = ("a block size of 128 or 256 for more than one row a request", "a cache of at most 2147483647 elements")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    except ContractError as error:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if parameters.get("device") == devices.NPU and any(limit in str(error) for limit in NPU_LIMITS):
            pytest.xfail(f"refused on NPUs, as documented: {error}")
        raise


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = {name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark.args[0])}
    if "device" in metafunc.fixturenames and "device" not in own:
        names = metafunc.config.stash[_DEVICES]
        # Ops know PyTorch's name of a device; an engine is started with ours.
        engine = metafunc.definition.path.is_relative_to(ROOT / "e2e")
        if engine and VIRTUAL in names:
            names = [name for name in names if name != devices.CPU]
        metafunc.parametrize("device", names if engine else [TORCH_NAMES.get(name, name) for name in names], ids=names)
    if "op_case" in metafunc.fixturenames:
        cases = [
            pytest.param((contract, dtype, case.name), id=f"{name}-{str(dtype)[6:]}-{case.name}")
            for name in metafunc.module.OPS
            for contract in [all_contracts()[name]]
            for dtype in contract.tolerance
            for case in contract.cases(devices.CPU, dtype, 0)
        ]
        metafunc.parametrize("op_case", cases)
    if "source_file" in metafunc.fixturenames:
        hidden = re.compile(r"(^|/)(\.(?!ci/)|build/|dist/|shared/|[^/]*\.egg-info/)")
        names = sorted(path.relative_to(ROOT.parent).as_posix() for path in ROOT.parent.rglob("*.py"))
        paths = [name for name in names if not hidden.search(name) and not name.startswith(metafunc.module.HOMES)]
        metafunc.parametrize("source_file", [ROOT.parent / path for path in paths], ids=paths)


def _names(argnames: str | list[str]) -> list[str]:
    return [name.strip() for name in argnames.split(",")] if isinstance(argnames, str) else list(argnames)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """A number of the test's own, the same in every run; torch and random start from it."""
    value = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(value)
    random.seed(value)
    return value


ALLOCATORS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
KEYS = {
    devices.CPU: torch._C.DispatchKey.CPU,
    devices.CUDA: torch._C.DispatchKey.CUDA,
    devices.NPU: torch._C.DispatchKey.PrivateUse1,
}


class PoisonedAllocations(TorchDispatchMode):
    """Fills what the project allocates uninitialised with NaN, so that a row which nobody writes is seen.

    A mode is off while its own handler runs. A call of one of our ops is therefore sent on to the device's kernel with
    the mode on again, past the dispatcher's key for modes: else the kernel's allocations would go unseen.
    """

    # opcheck sends an op that both writes and returns through one.
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if func.namespace == NAMESPACE:
            tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, Tensor)]
            if all(type(item) is Tensor for item in tensors):  # not under opcheck's fake tensors
                with self:
                    return func._op_dk(KEYS[tensors[0].device.type], *args, **kwargs)
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name in ALLOCATORS and result.is_floating_point() and _caller() in PROJECT:
            result.fill_(math.nan)
        return result


def _caller() -> str:
    """Top package of the code that called into torch."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"].split(".")[0] in ("torch", __name__.split(".")[0]):
        frame = frame.f_back
    return str(frame.f_globals["__name__"].split(".")[0])


@pytest.fixture(autouse=True)
def op_room(request: pytest.FixtureRequest) -> Iterator[None]:
    """In tests of ops: poisoned allocations, and one thread, as on small tensors threads mostly wait for each other."""
    if not request.path.is_relative_to(ROOT) or request.path.relative_to(ROOT).parts[0] not in OP_ROOMS:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with PoisonedAllocations():
        yield
    torch.set_num_threads(threads)


def _results(contract: OpContract, args: tuple[Any, ...], returned: Any) -> list[Tensor]:
    """What a call hands over: its return values, and the arguments that it wrote into."""
    written = [i for i, a in enumerate(contract.op._schema.arguments) if a.alias_info and a.alias_info.is_write]
    return [*_returned(returned), *(args[i] for i in written)]


def _returned(value: Any) -> list[Tensor]:
    if value is None:
        return []
    return list(value) if isinstance(value, tuple) else [value]


def call(contract: OpContract, case: OpCase) -> list[Tensor]:
    """Results of the public function on copies of the case's arguments; what it may not write must stay as it was."""
    args, kwargs = tree_map(lambda x: _copy(x) if isinstance(x, Tensor) else x, (case.args, case.kwargs))
    function = getattr(importlib.import_module(f"npu_ops.{contract.stem}"), contract.name)
    results = _results(contract, args, function(*args, **kwargs))
    written = {result.data_ptr() for result in results}
    for before, after in zip(tree_flatten(case.args)[0], tree_flatten(args)[0], strict=True):
        if isinstance(before, Tensor) and before.numel() and after.data_ptr() not in written:
            torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True, msg=f"{case.name}: input changed")
    if not contract.mutates:
        inputs = {x.untyped_storage().data_ptr() for x in tree_flatten(args)[0] if isinstance(x, Tensor) and x.numel()}
        shared = [r for r in results if r.numel() and r.untyped_storage().data_ptr() in inputs]
        assert not shared, f"{case.name}: a result shares memory with an argument"
    return results


def _copy(x: Tensor) -> Tensor:
    """A copy with the same strides; clone() would drop those of a slice."""
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    storage = torch.zeros(span, dtype=x.dtype, device=x.device)
    return storage.as_strided(x.shape, x.stride()).copy_(x) if x.numel() else x.clone()


def expected(contract: OpContract, case: OpCase) -> list[Tensor]:
    """Results of the reference on the CPU, with everything lifted to fp32."""

    def lift(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return (x.float() if x.is_floating_point() else x).to(devices.CPU, copy=True)

    args, kwargs = tree_map(lift, (case.args, case.kwargs))
    return contract.defined(args, _results(contract, args, contract.reference(*args, **kwargs)))


def check(contract: OpContract, case: OpCase) -> list[Tensor]:
    """Assert that the op equals its reference within its tolerance, on the device of the case's tensors."""
    results = call(contract, case)
    promised = _returned(contract.fake(*case.args, **case.kwargs))
    returned = results[: len(promised)]
    assert [(r.shape, r.dtype, r.device) for r in returned] == [(p.shape, p.dtype, p.device) for p in promised]
    assert all(r.is_contiguous() for r in returned), f"{case.name}: a result is not contiguous"
    for result, wanted in zip(contract.defined(case.args, results), expected(contract, case), strict=True):
        bound = contract.bound(result.dtype)
        torch.testing.assert_close(
            result.float().cpu(),
            wanted.float(),
            atol=bound.atol,
            rtol=bound.rtol,
            equal_nan=True,
            msg=lambda text: f"{contract.name} {case.name}: {text}",
        )
    return results


@pytest.fixture
def check_op(device: str, seed: int) -> Callable[[tuple[OpContract, torch.dtype, str]], None]:
    """Check one generated case, named as ``op_case`` names it, on the test's device."""

    def run(named: tuple[OpContract, torch.dtype, str]) -> None:
        contract, dtype, name = named
        case = next(case for case in contract.cases(device, dtype, seed) if case.name == name)
        check(contract, case)

    return run


@pytest.fixture
def call_op() -> Callable[[OpContract, OpCase], list[Tensor]]:
    """The function ``call`` of this file."""
    return call
