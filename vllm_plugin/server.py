"""Child processes that run the real vLLM: start, wait with a progress bar, stop with everything they have started."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_plugin import envs

TAIL = 40
# vLLM drains and joins its workers in a second or two; a worker in a long step may take longer.
GRACE_S = 20.0
# vLLM keeps one core free for its scheduler. Of few cores that is too many: on two, 16,000 tokens took 5 s to prefill
# without it and 9 s with it.
FEW_CORES = 4
# The last line of a traceback, bare or as a line of vLLM's log.
FIRST_ERROR = re.compile(r"^(?:\([^)]*\) [A-Z]+ [^\]]*\] )?(\w+(?:Error|Exception): .+)", re.MULTILINE)


# Signals that have asked this process to end.
_interruptions: list[int] = []


def interrupt(number: int, frame: FrameType | None) -> None:
    """Signal handler: KeyboardInterrupt, wherever this process is. Python loses what is raised inside a destructor, and
    waiting goes on; so it is kept, and raised again there.
    """
    _interruptions.append(number)
    raise KeyboardInterrupt


class ProcessError(Exception):
    """A child process failed. The text ends with the last lines of its log and the log's path."""


class ChildProcess:
    """A command in a process group of its own, with standard output and error in a log file. A context manager."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.command = list(command)
        self.environment = dict(environment)
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it. A session of its own keeps the terminal's Ctrl-C away: ``stop`` ends it in order."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop it, whatever happened."""
        self.stop()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the group."""
        assert self._process is not None, "not started"
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll() if self._process else None

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Interrupt the process, then end what is left of its group. Safe to call again.

        Args:
            grace_s: seconds for the interrupt to work, and for SIGTERM after it, before SIGKILL.
        """
        if self._process is None:
            return
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace_s)
        except BaseException:
            # A second Ctrl-C: no more patience, but still no orphans.
            self._signal_group(signal.SIGKILL)
            raise
        for ending in (signal.SIGTERM, signal.SIGKILL):
            if not self._signal_group(ending):
                break
            deadline = time.monotonic() + grace_s
            while self._signal_group(0) and time.monotonic() < deadline:
                self._process.poll()
                time.sleep(0.05)
        self._process.wait()

    def _signal_group(self, number: int) -> bool:
        """Whether anybody was there to be signalled."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def tail(self, lines: int = TAIL) -> list[str]:
        """The last lines of the log that are not empty."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 400 * lines))
            text = file.read().decode(errors="replace")
        return [line for line in text.replace("\r", "\n").splitlines() if line.strip()][-lines:]

    def failure(self, what: str) -> ProcessError:
        """An error that says ``what`` happened and shows the log's first error, which is the cause of the rest, and its end."""
        first = FIRST_ERROR.search(self.log.read_text(errors="replace"))
        cause = [f"The first error in its log: {first[1]}"] if first else []
        return ProcessError("\n".join([f"{what}.", *cause, "The end of its log:", *self.tail(), f"The whole log: {self.log}"]))

    def wait(self, title: str, done: Callable[[], bool], console: Console, timeout_s: float) -> float:
        """Show a progress bar with the last log line until ``done()``; returns the seconds that took.

        Raises:
            ProcessError: if the process dies before, or the time is over.
        """
        begin = time.monotonic()
        if not console.is_terminal:
            console.print(f"{title} ...")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(10),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[line]}", markup=True),
        )
        with progress_bar(*columns, console=console) as progress:
            task = progress.add_task(title, total=None, line="")
            while not done():
                if _interruptions:
                    raise KeyboardInterrupt
                if (code := self.exit_code()) is not None and not done():
                    raise self.failure(f"{title}: the process ended with exit code {code}")
                if time.monotonic() - begin > timeout_s:
                    raise self.failure(f"{title}: not done after {timeout_s:.0f} s")
                last = (self.tail(1) or [""])[0]
                progress.update(task, line=_shorten(last, max(20, console.width - len(title) - 26)))
                time.sleep(0.5)
        return time.monotonic() - begin


class VllmServer(ChildProcess):
    """``vllm serve`` on a free port of this host."""

    def __init__(self, model: str, device: str, arguments: Sequence[str], log: Path) -> None:
        self.port = free_port()
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model),
            *("--device", device, "--host", "127.0.0.1", "--port", str(self.port)),
            *arguments,
        ]
        super().__init__(command, child_environment(device), log)

    @property
    def url(self) -> str:
        """Root of the server, without a path."""
        return f"http://127.0.0.1:{self.port}"

    def healthy(self) -> bool:
        """Whether /health answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def attention_backends(self) -> list[str]:
        """Attention backends that the server's log says are in use."""
        return list(dict.fromkeys(re.findall(r"Using (\w+) backend", self.log.read_text(errors="replace"))))


def child_environment(device: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a process that serves ``device``: ``base`` (this process's own), and what it leaves open."""
    base = os.environ if base is None else base
    ours = {
        # torch_npu is loaded by name where an NPU is asked for; loaded unasked, it fails `import torch` without CANN.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONUNBUFFERED": "1",
    }
    chosen = {"VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU"} & base.keys()
    if device == "cpu" and len(os.sched_getaffinity(0)) <= FEW_CORES and not chosen:
        ours["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    return ours | dict(base) | {envs.DEVICE.name: device}


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """A new folder for a command's files. It stays where a process has failed, for its log."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-npu-parity-"))
    try:
        yield folder
    except Exception:
        raise
    except BaseException:  # interrupted: nobody will read the logs
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


def progress_bar(*columns: str | ProgressColumn, console: Console) -> Progress:
    """A bar that leaves nothing behind, and is not there at all where nobody would see it move."""
    return Progress(SpinnerColumn(), *columns, console=console, transient=True, disable=not console.is_terminal)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _shorten(line: str, width: int) -> str:
    """What a log line says, without the process, time and place before it."""
    line = re.sub(r"^(\([^)]*\) )?([A-Z]+ \S+ \S+ \[[^]]*\] )?", "", line)
    return escape(line if len(line) <= width else line[: width - 1] + "…")
