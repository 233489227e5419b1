"""`vllm serve` as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request

import pytest

from vllm_plugin.demo_model import write_demo_checkpoint
from vllm_plugin.server import VllmServer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_demo_checkpoint(tmp_path_factory.mktemp("demo") / "model")


def _complete(url: str, prompt: str) -> str:
    body = json.dumps({"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]["text"]


def test_serves_completions_through_ascend_fia(device, model, tmp_path):
    arguments = ["--served-model-name", "demo", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(64 << 20)]
    server = VllmServer(str(model), device, arguments, tmp_path / "server.log")
    with server:
        deadline = 240
        for _ in range(deadline):
            if server.healthy():
                break
            assert server.exit_code() is None, server.failure("vllm serve ended")
            subprocess.run(["sleep", "1"], check=True)
        first, again = (_complete(server.url, "The long road") for _ in range(2))
        assert first == again
        assert len(first) > 0
    assert server.attention_backends() == ["ASCEND_FIA"]
    log = server.log.read_text()
    assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
    assert server.exit_code() == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--device", "tpu"], "vllm-npu-parity: unknown device 'tpu'. Choose one of: auto, npu, cuda, cpu, virtual-npu."),
        (["--device", "DEVICE", "--block-size", "17"], "a size of 16 to 256 in steps of 16 is required, got 17"),
    ],
    ids=["device", "block-size"],
)
def test_refuses_in_one_line(device, model, arguments, line):
    arguments = [device if word == "DEVICE" else word for word in arguments]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_NPU_PARITY_DEVICE"}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode != 0
    assert line in run.stdout + run.stderr
