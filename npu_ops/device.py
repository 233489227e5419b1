"""What differs between device types outside of the ops: which there are, streams, memory, names.

With npu_ops.ascend the only place that names a vendor's module. Importing it imports torch and nothing else; torch_npu
is imported when somebody asks for an NPU: on the virtual NPU's stand-in runtime if VIRTUAL_NPU=1 asks for that.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

logger = logging.getLogger(__name__)

CPU, CUDA, NPU = "cpu", "cuda", "npu"


def found_devices() -> list[str]:
    """Device types that this process can use, as torch names them: "cpu", then "cuda" and "npu" if there is one."""
    found = [CPU]
    if torch.cuda.is_available():
        found.append(CUDA)
    if _has_npu():
        found.append(NPU)
    return found


@functools.cache
def _has_npu() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    try:
        _load_torch_npu()
    except (ImportError, OSError, RuntimeError) as error:
        # An installation that does not load is not the same as none: who installed it must learn why it is not used.
        logger.warning("torch_npu is installed but does not load, so no NPU is used: %s", error)
        return False
    return bool(torch.get_device_module(NPU).is_available())


def _load_torch_npu() -> None:
    from npu_ops import virtual_npu

    if virtual_npu.is_requested():
        virtual_npu.enable()
    else:
        importlib.import_module("torch_npu")


def module(device_type: str) -> ModuleType:
    """torch.cpu, torch.cuda or torch.npu. Raises RuntimeError for a device type that is not found here."""
    if device_type == NPU:
        _has_npu()  # registers torch.npu
    if device_type not in found_devices():
        raise RuntimeError(f"no {device_type!r} device found, only {found_devices()}. Check its driver or take another.")
    return torch.get_device_module(device_type)  # type: ignore[no-any-return]


def device_count(device_type: str) -> int:
    """Devices of this type that the process sees; 0 where there is none."""
    return int(module(device_type).device_count()) if device_type in found_devices() else 0


def device_name(device_type: str, index: int = 0) -> str:
    """The vendor's name of one device, for people to read."""
    if device_type == CPU:
        return platform.processor() or platform.machine()
    return str(module(device_type).get_device_name(index))


def synchronize(device: str | torch.device) -> None:
    """Wait until everything queued on ``device`` is done. Returns at once for the CPU."""
    device = torch.device(device)
    if device.type != CPU:
        module(device.type).synchronize(device)


def stream_type(device_type: str) -> type[Any]:
    """The Stream class of this device type; on the CPU one that does nothing."""
    return module(device_type).Stream  # type: ignore[no-any-return]


def event_type(device_type: str) -> type[Any]:
    """The Event class of this device type; on the CPU one that does nothing."""
    return module(device_type).Event  # type: ignore[no-any-return]


def memory_info(device_type: str, index: int = 0) -> tuple[int, int]:
    """Free and total memory of one device in bytes; for the CPU what the system could give without swapping."""
    if device_type == CPU:
        return _host_memory()
    free, total = module(device_type).mem_get_info(index)
    return int(free), int(total)


def _host_memory() -> tuple[int, int]:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    return free, total


def import_torch_npu() -> None:
    """Register the device type and the ops of torch_npu with PyTorch.

    Raises:
        RuntimeError: with the library that is missing, if CANN is not on the library path.
        ImportError: with the tool that is missing, if the virtual NPU cannot be built.
    """
    from npu_ops import virtual_npu

    try:
        _load_torch_npu()
    except (ImportError, OSError) as error:
        if virtual_npu.is_requested():
            raise  # says itself what is missing
        remedy = "Run: source /usr/local/Ascend/ascend-toolkit/set_env.sh"
        raise RuntimeError(f"torch_npu does not load: {error}. {remedy}") from error


def manual_seed_all(device_type: str, seed: int) -> None:
    """Seed the generators of every visible device of one type."""
    module(device_type).manual_seed_all(seed)


def compute_units(device_type: str, index: int = 0) -> int:
    """Streaming multiprocessors of a GPU, cube cores of an NPU, threads of a CPU."""
    if device_type == CPU:
        return torch.get_num_threads()
    properties = module(device_type).get_device_properties(index)
    return int(getattr(properties, "multi_processor_count", 0) or properties.cube_core_num)


def cuda_capability(index: int = 0) -> tuple[int, int]:
    """Compute capability (major, minor) of a visible GPU."""
    return torch.cuda.get_device_capability(index)
