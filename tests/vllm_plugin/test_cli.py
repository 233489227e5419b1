"""The command line: help, wrong usage, and a device that this machine does not have."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from npu_ops import device as devices
from vllm_plugin.cli import COMMANDS


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_plugin", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_help_lists_the_commands():
    done = cli("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_is_cheap(command):
    code = f"import sys; from vllm_plugin.cli import main\ntry: main(['{command}', '--help'])\nexcept SystemExit: pass\n"
    check = "assert not {'torch', 'vllm', 'transformers', 'openai'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"vllm_plugin {command}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "COMMAND"),
        (("dmeo",), "invalid choice: 'dmeo'"),
        (("demo", "--device", "tpu"), "invalid choice: 'tpu'"),
        (("demo", "--chunks", "512,none"), "a number of at least 1 is required, got 'none'"),
        (("demo", "--chunks", "0"), "a number of at least 1 is required, got '0'"),
        (("parity", "--devices", devices.CPU), "at least two different columns are compared"),
        (("parity", "--devices", f"{devices.CPU},{devices.CPU}"), "at least two different columns are compared"),
        (("parity", "--devices", devices.CPU, "--prompts", "0"), "a number of at least 1 is required"),
    ],
)
def test_wrong_usage_exits_with_2_and_one_line(arguments, message):
    done = cli(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [("parity", "--devices", "tpu,{}"), ("demo", "--device", "{}")])
def test_a_device_that_cannot_be_served_is_one_line(arguments):
    missing = next((name for name in (devices.NPU, devices.CUDA) if name not in devices.found_devices()), None)
    if missing is None:
        pytest.skip("this machine has every device")
    done = cli(*(argument.format(missing) for argument in arguments))
    assert done.returncode == 1
    assert done.stderr.startswith("vllm-npu-parity: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_model_without_tokenizer_is_one_line(tmp_path, device):
    # A machine that serves no such device says so before it looks at the model; that has its own test.
    done = cli("demo", "--device", device, "--model", str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert "no tokenizer of --model" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_stops_its_server(device, number):
    command = [sys.executable, "-m", "vllm_plugin", "demo", "--device", device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
        assert demo.stdout is not None
        assert any(line.startswith("vllm serve, chunks of 512 ...") for line in demo.stdout)
        servers = []
        while demo.poll() is None and not servers:
            servers = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
        demo.send_signal(number)
        said = demo.stdout.read()
        assert demo.wait() == 130, said
    assert said.strip() == "interrupted"
    assert servers
    assert not any(Path(f"/proc/{pid}").exists() for pid in servers)
