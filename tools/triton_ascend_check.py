"""Compile the Triton kernels of npu_ops/ascend for Ascend and for CUDA, with no device and no CANN.

    python tools/triton_ascend_check.py --setup       # once: triton-ascend in an environment of its own, about 720 MB
    python tools/triton_ascend_check.py [--target Ascend910B3,Ascend910_9382,cuda:90]

triton-ascend owns the folder ``triton``, as upstream Triton does, so the two need an environment each; this one lies in the
user's cache folder. The kernels are compiled as npu_ops/ascend launches them: launches are recorded with tensors that have no
memory. For each kernel and target: the stage reached, the bytes of memory on the chip, and what fell back to scalar code,
which is a failure. Nothing is run: values, speed and CANN's last step to machine code are not checked.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "npu_ops" / "ascend" / "kernels.py"
WORKER = ROOT / "tools" / "triton_ascend_compile.py"
ASCEND, CUDA = ("Ascend910B3", "Ascend910_9382"), ("cuda:90",)
# The last stage that can be reached: CANN's compiler, which makes machine code, is not on any package index.
LAST_STAGE = {"Ascend": "link", "cuda": "cubin"}
# triton-ascend 3.2.0 is the release for CANN 9 and wants Python 3.11; it imports pybind11 without asking for it.
PACKAGES = ("triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", "pybind11==3.*")
PYTHON = (3, 11)
# A unified buffer, less what double buffering of other tensors may take.
UB_BYTES = 192 * 1024
# Dtype, then elements of a token's keys and values: grouped heads, MLA's two parts, a width that is no power of two.
SHAPES = [
    ("bfloat16", 1024, 1024),
    ("bfloat16", 512, 64),
    ("bfloat16", 240, 240),
    ("float16", 1024, 1024),
    ("float32", 512, 64),
]
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64"}


def environment() -> Path:
    """Folder of the environment with triton-ascend, there or not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-npu-parity"
    return cache / "-".join(package.replace("==", "-") for package in PACKAGES[:2])


def is_ready() -> bool:
    """Whether the environment was set up to its end."""
    return (environment() / "ready").is_file()


def set_up() -> None:
    """Make the environment, or make it anew if a set-up was interrupted; a finished one is left alone."""
    folder = environment()
    if is_ready():
        print(f"{folder} is ready", file=sys.stderr)
        return
    name = f"python{PYTHON[0]}.{PYTHON[1]}"
    python = sys.executable if sys.version_info[:2] == PYTHON else shutil.which(name)
    if python is None:
        sys.exit(f"triton-ascend needs {name}, which is not on PATH. Install it, then run this again.")
    steps: list[tuple[str, list[str]]] = [
        ("virtual environment", [python, "-m", "venv", "--clear", str(folder)]),
        (" ".join(PACKAGES), [str(folder / "bin" / "pip"), "install", "--quiet", "--no-deps", *PACKAGES]),
    ]
    for number, (title, command) in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {title} in {folder}", file=sys.stderr, flush=True)
        done = subprocess.run(command, check=False, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
        if done.returncode:
            sys.exit(f"{command[0]} failed, see above. Check that pip reaches a package index, then run this again.")
    (folder / "ready").touch()


class Recorder:
    """Stands in for a kernel and keeps its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *args: Any, **options: Any) -> None:
        """The launch itself: types, and what Triton would specialise the kernel for."""
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | options
        launch: dict[str, Any] = {"kernel": self.kernel.__name__, "signature": {}, "constants": {}, "divisible": []}
        for index, parameter in enumerate(self.kernel.params):
            value = given[parameter.name]
            special = isinstance(value, int) and not parameter.do_not_specialize
            if parameter.is_constexpr or (special and value == 1):
                launch["signature"][parameter.name], launch["constants"][parameter.name] = "constexpr", value
                continue
            tensor = not isinstance(value, int | float)
            launch["signature"][parameter.name] = signature_type(value)
            if tensor or (special and value % 16 == 0):
                launch["divisible"].append(index)
        self.launches.append(launch)


def signature_type(value: Any) -> str:
    """Triton's name of a launch argument's type."""
    if isinstance(value, int | float):
        return "i32" if isinstance(value, int) else "fp32"
    return f"*{TYPES[str(value.dtype).removeprefix('torch.')]}"


def launches() -> list[dict[str, Any]]:
    """Every launch of a kernel of npu_ops/ascend, for shapes as models have them."""
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    import torch

    kernels: Any = importlib.import_module("npu_ops.ascend.kernels")

    def empty(*shape: int, dtype: str = "int32") -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    found: list[dict[str, Any]] = []
    real = kernels._gather_pages
    try:
        for dtype, width, value_width in SHAPES:
            kernels._gather_pages = recorder = Recorder(real)
            caches = [empty(64, 128, 1, columns, dtype=dtype) for columns in (width, value_width)]
            rows = [empty(500, 1, columns, dtype=dtype) for columns in (width, value_width)]
            kernels.gather_pages(*caches, empty(9, 16), empty(9), *rows, empty(9))
            name = f"gather_pages-{TYPES[dtype]}-{width}-{value_width}"
            found += [launch | {"name": name} for launch in recorder.launches]
    finally:
        kernels._gather_pages = real
    return found


def compile_all(jobs: Sequence[dict[str, Any]], targets: Sequence[str], file: Path = KERNELS) -> Iterator[dict[str, Any]]:
    """Results of compiling launches of kernels in ``file``: for Ascend in its environment, for CUDA in this one.

    Raises:
        RuntimeError: if a compiler ends without results.
    """
    for target in targets:
        python = str(environment() / "bin" / "python") if target.startswith("Ascend") else sys.executable
        with tempfile.NamedTemporaryFile("w", suffix=".json") as job:
            json.dump({"file": str(file), "launches": list(jobs), "target": target}, job)
            job.flush()
            run = subprocess.run([python, str(WORKER), job.name], capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(f"{WORKER.name} for {target} ended with {run.returncode}:\n{run.stderr[-2000:]}")
        yield from json.loads(run.stdout.splitlines()[-1])


def fault(result: dict[str, Any]) -> str | None:
    """Why a result is a failure."""
    if result["error"]:
        return str(result["error"])
    last = next(stage for family, stage in LAST_STAGE.items() if result["target"].startswith(family))
    if result["stage"] != last:
        return f"stops at {result['stage']}, not at {last}"
    if result["memory"].get("ub", 0) > UB_BYTES:
        return f"{result['memory']['ub']} bytes of unified buffer, of {UB_BYTES}"
    return "; ".join(result["scalar"]) or None


def line(result: dict[str, Any]) -> str:
    """One result for people."""
    memory = " ".join(f"{name}={size}" for name, size in sorted(result["memory"].items()))
    text = f"{result['name']:<30} {result['target']:<15} {result['stage']:<9} {result['seconds']:>5.2f} s  {memory}"
    problem = fault(result)
    return f"{'FAIL' if problem else 'ok':<5}{text}" + (f"\n     {problem}" if problem else "")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="install triton-ascend in an environment of its own, then stop")
    parser.add_argument("--target", default=",".join((*ASCEND, *CUDA)), help="comma-separated; default: %(default)s")
    options = parser.parse_args()
    if options.setup:
        set_up()
        return
    if "Ascend" in options.target and not is_ready():
        sys.exit(f"triton-ascend is not installed in {environment()}. Run: python tools/{Path(__file__).name} --setup")
    results = list(compile_all(launches(), options.target.split(",")))
    print("\n".join(map(line, results)))
    failed = sum(fault(result) is not None for result in results)
    print(f"{len(results) - failed} compiled, {failed} failed; compiled only, not run")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
