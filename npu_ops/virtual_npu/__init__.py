"""The real torch_npu on a machine with no NPU and no CANN: stand-in runtime, CPU kernels over the same memory.

    from npu_ops import virtual_npu
    virtual_npu.enable()          # before torch_npu is imported
    import torch
    torch.ones(3, device="npu") + 1

It depends on torch and torch_npu alone. docs/virtual_npu.md says what it proves and what it does not, settings.py which
environment variables it reads.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from npu_ops.virtual_npu.recording import AclCall

# torch_npu would queue copies to a thread of its own, past kernels that run at once; torch would load torch_npu by itself,
# before the stand-ins are there. Children inherit both, and the switch.
ENVIRONMENT: Mapping[str, str] = {"TASK_QUEUE_ENABLE": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "VIRTUAL_NPU": "1"}

T = TypeVar("T")

_enabled: list[str] = []  # the folder of the stand-ins, once they are in use


def enable() -> None:
    """Load torch_npu on the stand-in runtime; from here on ``npu`` is a device of this process and its children.

    Safe to call again. The first call on a machine compiles the stand-ins (a few seconds, told on stderr).

    Raises:
        RuntimeError: if torch_npu was imported before.
        BuildError: an ImportError, if torch_npu, gcc or binutils are missing.
        ValueError: if an environment variable of ours makes no sense.
    """
    if _enabled:
        return
    if "torch_npu" in sys.modules:
        raise RuntimeError(
            "torch_npu was imported before the virtual NPU was enabled. Call npu_ops.virtual_npu.enable() first, and set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 where torch is imported before that."
        )
    from npu_ops.virtual_npu import build
    from npu_ops.virtual_npu.settings import Settings

    settings = Settings.read()
    folder = build.libraries()
    os.environ.update(ENVIRONMENT)
    library = build.preload(folder)
    build.configure(library, settings)
    # torch_npu prints a remark on a missing CANN; standard output belongs to the program.
    with contextlib.redirect_stdout(sys.stderr):
        importlib.import_module("torch_npu")
    from npu_ops.virtual_npu import kernels, recording

    recording.attach(library)
    kernels.install()
    _enabled.append(str(folder))


def is_enabled() -> bool:
    """Whether ``npu`` means the virtual NPU in this process."""
    return bool(_enabled)


def is_requested(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for the virtual NPU (VIRTUAL_NPU=1)."""
    return environ.get("VIRTUAL_NPU", "0") not in ("", "0")


def in_one_piece(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """``function(*args, **kwargs)`` for a composition of PyTorch's own ops, which the NPU runs one by one.

    On the virtual NPU each of them would be the CPU's on the same memory, so all of it runs on CPU views of the arguments;
    while aten calls are being recorded, op by op. Elsewhere, and without a tensor in its memory, this is a plain call.
    """
    if not _enabled:
        return function(*args, **kwargs)
    from npu_ops.virtual_npu import kernels

    return kernels.in_one_piece(function, args, kwargs)  # type: ignore[no-any-return]


def record(aten: bool = False) -> AbstractContextManager[list[AclCall]]:
    """Record the aclnn calls that torch_npu makes in a ``with`` block; see recording.record."""
    from npu_ops.virtual_npu import recording

    return recording.record(aten)
