"""Engines and checkpoints that the end-to-end tests share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# pytest's importlib mode puts no test folder on the path; these are helpers, not tests.
client = _load("parity_e2e_client", Path(__file__).parent / "client.py")
tiny = _load("parity_tiny_models", Path(__file__).parent.parent / "models" / "tiny.py")
needle = _load("parity_needle", Path(__file__).parent.parent / "models" / "needle.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts an engine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of a tiny checkpoint by name; written at first use."""
    folder = tmp_path_factory.mktemp("checkpoints")
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = tiny.write(name, folder)
        return written[name]

    return get


@pytest.fixture(scope="session")
def oracle(checkpoint: Callable[[str], Path]) -> Callable[[str], object]:
    """transformers' model of the same name."""
    loaded: dict[str, object] = {}

    def get(name: str) -> object:
        if name not in loaded:
            loaded[name] = client.Oracle(checkpoint(name))
        return loaded[name]

    return get


@pytest.fixture(scope="session")
def _hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    hosts: dict[str, object] = {"log folder": tmp_path_factory.mktemp("engine-logs")}
    yield hosts
    for host in hosts.values():
        if isinstance(host, client.EngineHost):
            host.close()


@pytest.fixture
def host(device: str, _hosts: dict[str, object]) -> object:
    """The process that holds this device's engine."""
    if device not in _hosts:
        folder = _hosts["log folder"]
        assert isinstance(folder, Path)
        _hosts[device] = client.EngineHost(device, folder / f"{device}.log")
    return _hosts[device]
