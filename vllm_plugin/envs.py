"""Every environment variable of the project, with its meaning. docs/configuration.md is generated from this file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from npu_ops.virtual_npu import settings as virtual_npu


@dataclass(frozen=True)
class Variable:
    """One environment variable: how to read it, and what to tell a user about it."""

    name: str
    default: str
    meaning: str

    def get(self) -> str:
        """The value in force now; read each time, so that a test or a child process sees its own."""
        return os.environ.get(self.name, self.default)


DEVICE = Variable(
    "VLLM_NPU_PARITY_DEVICE",
    "",
    "auto, npu, cuda, cpu or virtual-npu: the same as `vllm serve --device`, for the Python API. Set for child processes.",
)

VARIABLES: tuple[Variable, ...] = (
    DEVICE,
    *(Variable(v.name, v.default, v.meaning) for v in virtual_npu.VARIABLES),
)


def as_vllm_variables() -> dict[str, Callable[[], str]]:
    """The form of ``vllm.envs.environment_variables``, so that vLLM does not warn about names like its own."""
    return {variable.name: variable.get for variable in VARIABLES if variable.name.startswith("VLLM_")}
