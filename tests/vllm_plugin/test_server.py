"""Child processes: started in a group of their own, watched, and stopped with everything they have started."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from vllm_plugin import server as servers
from vllm_plugin.demo import Answer, _common
from vllm_plugin.server import FEW_CORES, ChildProcess, ProcessError, VllmServer, child_environment, free_port, work_folder

SILENT = Console(quiet=True)
# Starts a grandchild, prints its id, and then does what the last line says.
PARENT = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
{}
"""
STUBBORN = """
for ending in (signal.SIGINT, signal.SIGTERM):
    signal.signal(ending, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def process(tmp_path: Path, code: str) -> ChildProcess:
    return ChildProcess([sys.executable, "-c", code], os.environ, tmp_path / "log")


def running(pid: int) -> bool:
    """Whether a process is there and no zombie: who has lost its parent may stay one in a container without init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


@pytest.mark.parametrize("ending", ["time.sleep(600)", "sys.exit(3)"], ids=["interrupted", "died by itself"])
def test_stop_leaves_no_orphan(tmp_path, ending):
    with process(tmp_path, PARENT.format(ending)) as parent:
        wait_until(parent.tail)
        grandchild = int(parent.tail()[0])
        assert running(grandchild)
    assert parent.exit_code() is not None
    wait_until(lambda: not running(grandchild))
    parent.stop()  # once more does nothing


def test_stop_kills_who_does_not_listen(tmp_path):
    with process(tmp_path, PARENT.format(STUBBORN)) as parent:
        wait_until(lambda: "ready" in parent.tail())
        parent.stop(grace_s=0.5)
    assert parent.exit_code() == -signal.SIGKILL


def test_an_exception_stops_the_process(tmp_path):
    with pytest.raises(KeyboardInterrupt), process(tmp_path, "import time; time.sleep(600)") as child:
        raise KeyboardInterrupt
    assert child.exit_code() is not None


def test_death_while_waiting_shows_the_end_of_the_log(tmp_path):
    logged = "(Worker pid=1) ERROR 11-29 15:39:29 [executor.py:953] ValueError: too little memory"
    code = f"print('like `OSError: x`')\nprint({logged!r})\nfor i in range(100): print('line', i)\nraise SystemExit(7)"
    with process(tmp_path, code) as child, pytest.raises(ProcessError) as error:
        child.wait("the child", lambda: False, SILENT, 60)
    lines = str(error.value).splitlines()
    assert lines[0] == "the child: the process ended with exit code 7."
    assert lines[1:3] == ["The first error in its log: ValueError: too little memory", "The end of its log:"]
    assert lines[3:-1] == [f"line {i}" for i in range(60, 100)]
    assert lines[-1] == f"The whole log: {tmp_path / 'log'}"


def test_waiting_ends_in_time(tmp_path):
    with process(tmp_path, "import time; time.sleep(600)") as child, pytest.raises(ProcessError, match="not done after 1 s"):
        child.wait("the child", lambda: False, SILENT, 1)


def test_waiting_for_a_process_to_end(tmp_path):
    with process(tmp_path, "print('[done]')") as child:
        assert child.wait("the child", lambda: child.exit_code() == 0, SILENT, 60) < 60
    assert child.tail() == ["[done]"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_inside_a_destructor_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "_interruptions", [])

    class Dying:
        def __del__(self) -> None:
            servers.interrupt(signal.SIGTERM, None)

    with pytest.raises(KeyboardInterrupt), ChildProcess(["sleep", "600"], os.environ, tmp_path / "log") as child:
        Dying()
        child.wait("the child", lambda: False, SILENT, 60)
    assert child.exit_code() is not None


def test_a_server_that_is_not_there_is_not_healthy(tmp_path, device):
    server = VllmServer("model", device, [], tmp_path / "log")
    assert not server.healthy()
    server.log.write_text("(Worker pid=1) INFO [__init__.py:37] Using ASCEND_FIA backend.\nUsing LBHNC KV cache layout.\n")
    assert server.attention_backends() == ["ASCEND_FIA"]


def test_environment_keeps_what_the_user_has_set():
    few = len(os.sched_getaffinity(0)) <= FEW_CORES
    name = "VLLM_CPU_NUM_OF_RESERVED_CPU"
    assert child_environment("cpu", {})["VLLM_NPU_PARITY_DEVICE"] == "cpu"
    assert child_environment("cpu", {}).get(name) == ("0" if few else None)
    assert child_environment("cpu", {name: "1"})[name] == "1"
    assert name not in child_environment("cpu", {"VLLM_CPU_OMP_THREADS_BIND": "0"})
    assert name not in child_environment("npu", {})
    assert child_environment("npu", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"})["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"


def test_ports_are_free():
    assert 0 < free_port() < 65536


def test_work_folder_stays_for_a_failed_process():
    with work_folder() as done:
        (done / "file").touch()
    assert not done.exists()
    with pytest.raises(ProcessError), work_folder() as failed:
        raise ProcessError("see the log")
    assert failed.exists()
    failed.rmdir()


def test_answers_are_measured_from_their_own_clock():
    answer = Answer("chat", 5, (1, 2, 3), "abc", 10.0, (10.5, 11.0, 11.5))
    assert (answer.ttft, answer.tokens_per_second) == (0.5, 2.0)
    assert [_common((1, 2, 3), other) for other in ((1, 2, 3), (1, 9, 3), (1,), ())] == [3, 1, 1, 0]
