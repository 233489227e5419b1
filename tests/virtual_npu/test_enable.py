"""How a process gets onto the virtual NPU, and what it is told when it cannot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from npu_ops.virtual_npu import build
from npu_ops.virtual_npu.settings import Settings, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("16GiB", 16 << 30), ("1.5 GiB", 3 << 29), ("512mib", 512 << 20), ("2GB", 2 * 10**9)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"VIRTUAL_NPU_MEMORY": "much"}, "VIRTUAL_NPU_MEMORY: bytes or a size such as 512MiB is required, got 'much'"),
        ({"VIRTUAL_NPU_COUNT": "0"}, "VIRTUAL_NPU_COUNT: a number of 1 to 64 is required, got '0'"),
        ({"VIRTUAL_NPU_SOC": "A7"}, "VIRTUAL_NPU_SOC: one of A2, A3, 950 or a name such as Ascend910B1 is required, got"),
        ({"VIRTUAL_NPU_CANN": "new"}, "VIRTUAL_NPU_CANN: a version such as 9.1.0 is required, got 'new'"),
    ],
)
def test_settings_that_mean_nothing(environment, message):
    with pytest.raises(ValueError, match=message):
        Settings.read(environment)


@pytest.mark.parametrize(("visible", "count"), [(None, 4), ("0,1", 2), ("3", 1), ("1,9,2", 1), ("", 0), ("-1", 0)])
def test_visible_devices(visible, count):
    environment = {"VIRTUAL_NPU_COUNT": "4"} | ({} if visible is None else {"ASCEND_RT_VISIBLE_DEVICES": visible})
    assert Settings.read(environment).devices == count


def test_defaults():
    settings = Settings.read({})
    assert (settings.devices, settings.memory, settings.soc.name, settings.cann) == (2, 16 << 30, "Ascend910B3", "9.1.0")


@pytest.mark.parametrize(("soc", "name", "version"), [("A3", "Ascend910_9382", 253), ("950", "Ascend950PR_9589", 260)])
def test_soc_and_version_are_what_torch_npu_sees(in_process, soc, name, version):
    out = in_process(
        "import torch_npu; from torch_npu.npu.utils import get_cann_version; npu = torch.npu\n"
        "print(npu.get_device_name(), torch_npu.npu.get_soc_version(), npu.device_count(), get_cann_version('CANN'))",
        VIRTUAL_NPU_SOC=soc,
        VIRTUAL_NPU_COUNT="3",
        VIRTUAL_NPU_CANN="8.5.0",
    )
    assert out.split() == [name, str(version), "3", "8.5.0"]


def test_it_imports_nothing_of_vllm(in_process):
    assert in_process("import sys; print([m for m in ('vllm', 'vllm_plugin', 'triton') if m in sys.modules])").strip() == "[]"


def test_standard_output_stays_the_programs(in_process):
    assert in_process("torch.ones(1, device='npu').sum()") == ""  # device-literal: the child's own device


def test_too_late(in_process):
    said = in_process(
        "import sys, types; sys.modules['torch_npu'] = types.ModuleType('torch_npu')\n"
        "from npu_ops import virtual_npu; virtual_npu.enable()",
        prelude="",
        check=False,
    )
    assert "torch_npu was imported before the virtual NPU was enabled. Call npu_ops.virtual_npu.enable() first" in said


def test_no_compiler(in_process, tmp_path):
    said = in_process("", check=False, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "the virtual NPU needs gcc, nm, readelf once, to compile. Run: apt-get install gcc binutils" in said


def test_no_torch_npu():
    with pytest.raises(
        ImportError, match=r"needs torch_npux, which is not installed\. Run: pip install --no-deps 'torch_npu=="
    ):
        build._package("torch_npux")


def test_several_processes_build_at_once(in_process, tmp_path):
    children = (
        "import subprocess, sys\n"
        "code = 'from npu_ops.virtual_npu import build; print(build.libraries())'\n"
        "runs = [subprocess.Popen([sys.executable, '-c', code], stdout=-1, stderr=-1, text=True) for _ in range(3)]\n"
        "out = [run.communicate() for run in runs]\n"
        "assert not any(run.returncode for run in runs), out\n"
        "assert len({o for o, _ in out}) == 1\n"
        "print(sum('compiling' in e for _, e in out))"
    )
    assert in_process(children, prelude="", XDG_CACHE_HOME=str(tmp_path)).strip() == "1"
    (made,) = (tmp_path / "vllm-npu-parity").glob("virtual-npu-*")
    assert (made / "libascendcl.so").exists()
    assert not list((tmp_path / "vllm-npu-parity").glob("tmp*"))


def test_the_switch_reaches_npu_ops(in_process):
    code = "from npu_ops import device; print(device.found_devices(), device.memory_info('npu'))"
    out = in_process(code, prelude="", VIRTUAL_NPU="1", VIRTUAL_NPU_MEMORY="1GiB")
    assert out.startswith("['cpu', 'npu']")
    assert "1073741824" in out
    said = in_process(code, prelude="", check=False)
    assert "no 'npu' device found" in said


def test_the_documents_example_runs(in_process):
    page = (Path(__file__).parents[2] / "docs" / "virtual_npu.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    out = in_process(example, prelude="")
    assert "aclnnRmsNorm" in out
    assert "(1e-06,)" in out


def test_what_the_runtime_cannot_do_says_so(in_process):
    said = in_process(
        "graph = torch.npu.NPUGraph()\nx = torch.ones(2, device='npu')\n"  # device-literal: the child's own device
        "with torch.npu.graph(graph):\n    y = x + 1\n",
        check=False,
    )
    assert "AclmdlRICaptureBegin" in said
    assert "This feature is not supported" in said
