"""pytest plugin for the runs of vLLM's tests: what a vLLM worker process has that a bare test process lacks."""

from __future__ import annotations

import pytest


def pytest_sessionstart() -> None:
    """Load the general plugins and apply the platform's Triton overrides, as every worker of vLLM does first."""
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    current_platform.register_triton_kernel_overrides()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test as one that holds no device.

    The mark is vLLM's own. Without it conftest.py collects garbage for half a second after each test and empties the
    accelerator's cache, which fails on a machine that has no accelerator.
    """
    for item in items:
        item.add_marker("skip_global_cleanup")
