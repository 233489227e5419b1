"""Stand-ins for the CANN libraries that an installed torch_npu asks for, compiled from cann/ and from its own symbols.

The symbols come from the wheel itself: what its libraries need and nobody defines, and the names that they look up at run
time. One library holds everything; the others that torch_npu names are empty and depend on it, because looking a symbol
up in a library searches what it depends on. Needs gcc, and nm and readelf of binutils.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from npu_ops.virtual_npu.settings import Settings

SOURCES = Path(__file__).parent / "cann"
MAIN = "libascendcl.so"
# Opened by name at run time, so that no ELF header lists them.
OPENED = ("libopapi.so", "libhcomm.so", "libruntime.so", "libnnopbase.so", "libmsprofiler.so", "libascend_dump.so")
SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1",
          "ld-linux-x86-64.so.2")  # fmt: skip
# What would have to do something: graphs, kernels of one's own, memory of other processes. All else may say that it is done.
UNSUPPORTED = re.compile(
    r"aclmdlRI(?!CaptureGetInfo)\w*|aclrtIpc\w+|aclrtMem(Export|Import)\w+|aclrt(Value|LaunchKernel|Binary)\w+"
    r"|rtKernelLaunch\w*|aclshmem\w+|aclskOptimize"
)
TOOLS = ("gcc", "nm", "readelf")


class BuildError(ImportError):
    """The stand-in libraries cannot be made. The text says why and what to do."""


def libraries() -> Path:
    """The folder of the stand-in libraries for this torch_npu; built if it is not in the cache, by one process at a time.

    Raises:
        BuildError: if torch_npu or a tool is missing, the machine is no x86-64, or the compiler fails.
    """
    wheel, torch = _package("torch_npu"), _package("torch")
    if platform.machine() != "x86_64":
        raise BuildError(f"the virtual NPU needs an x86-64 machine, this is {platform.machine()}. Take another device.")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-npu-parity"
    folder = cache / f"virtual-npu-{_fingerprint(wheel, torch)}"
    if folder.is_dir():
        return folder
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise BuildError(f"the virtual NPU needs {', '.join(missing)} once, to compile. Run: apt-get install gcc binutils")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _build_into(folder, wheel, torch)
    return folder


def preload(folder: Path) -> ctypes.CDLL:
    """Load the stand-ins, so that torch_npu finds them by name; returns the one that holds the runtime."""
    main = ctypes.CDLL(str(folder / MAIN), mode=ctypes.RTLD_GLOBAL)
    for library in sorted(folder.glob("*.so")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return main


def configure(library: ctypes.CDLL, settings: Settings) -> None:
    """Tell the runtime what devices it has: virtual_npu_configure of cann/runtime.c."""
    function = library.virtual_npu_configure
    function.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    soc = settings.soc
    function(settings.devices, settings.memory, soc.name.encode(), settings.cann.encode(), soc.cube_cores, soc.vector_cores)


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        remedy = "Run: pip install --no-deps 'torch_npu==2.13.*'"
        raise BuildError(f"the virtual NPU needs {name}, which is not installed. {remedy}")
    return Path(spec.submodule_search_locations[0])


def _fingerprint(wheel: Path, torch: Path) -> str:
    """Changes with the libraries of both packages and with our own sources."""
    digest = hashlib.sha256()
    for library in [*_wheel_libraries(wheel), torch / "version.py"]:
        status = library.stat()
        digest.update(f"{library.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    for source in sorted([*SOURCES.iterdir(), Path(__file__)]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _build_into(folder: Path, wheel: Path, torch: Path) -> None:
    start = time.monotonic()
    _say("virtual NPU: compiling the stand-in CANN libraries, once for this torch_npu ...")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        _compile(made, wheel, torch)
        # Renaming is atomic: nobody ever sees half of it.
        made.rename(folder)
    _say(f" done in {time.monotonic() - start:.1f} s\n")


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _compile(folder: Path, wheel: Path, torch: Path) -> None:
    ours = _wheel_libraries(wheel)
    torchs = [torch / "lib" / f"lib{name}.so" for name in ("torch", "c10", "torch_cpu", "torch_python")]
    objects = folder.parent / "runtime.o"
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    include = wheel / "include" / "third_party" / "acl" / "inc"
    flags = ["-std=gnu11", "-O2", "-fPIC", "-w", f"-I{include}", f"-I{SOURCES}"]
    _run("gcc", *flags, "-r", "-nostdlib", *sources, "-o", str(objects))
    own = {line.split()[-1] for line in _run("nm", "--defined-only", str(objects)).splitlines() if " T " in line}
    known = _symbols([*ours, *torchs, *_system_libraries()], "--defined-only")
    wanted = (_symbols(ours, "--undefined-only") - known) | _looked_up(wheel)
    names = sorted(name for name in wanted - own if not name.startswith(("Py", "_Py")))
    stubs = folder.parent / "stubs.c"
    stubs.write_text('#include "stubs.h"\n' + "".join(f"{_form(name)}({name})\n" for name in names))
    main = folder / MAIN
    _run("gcc", *flags, "-shared", str(objects), str(stubs), "-lpthread", f"-Wl,-soname,{MAIN}", "-o", str(main))
    needed = set().union(*(_needed(library) for library in ours)) | set(OPENED)
    for name in sorted(needed - {path.name for path in [*ours, *torchs]} - set(SYSTEM) - {MAIN}):
        depends = [str(main), "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{name}"]
        _run("gcc", "-shared", "-Wl,--no-as-needed", "-x", "c", os.devnull, "-x", "none", *depends, "-o", str(folder / name))


def _form(name: str) -> str:
    """The macro of stubs.h for a symbol."""
    if name.endswith("GetWorkspaceSize"):
        return "RECORDED"
    return "UNSUPPORTED" if UNSUPPORTED.fullmatch(name) else "DONE"


def _wheel_libraries(wheel: Path) -> list[Path]:
    """What ``import torch_npu`` loads; torchair is loaded by nobody here."""
    return sorted(path for path in wheel.rglob("*.so") if "torchair" not in path.parts)


def _system_libraries() -> list[Path]:
    found = (Path(_run("gcc", f"-print-file-name={name}").strip()) for name in SYSTEM)
    return [path for path in found if path.is_absolute()]


def _symbols(paths: Iterable[Path], kind: str) -> set[str]:
    """Dynamic symbols of some libraries. Undefined weak ones may stay undefined and are left out."""
    lines = _run("nm", "-D", "--without-symbol-versions", kind, *map(str, paths)).splitlines()
    rows = (line.split() for line in lines)
    return {row[-1] for row in rows if len(row) > 1 and (kind == "--defined-only" or row[-2] == "U")}


def _looked_up(wheel: Path) -> set[str]:
    """Names that the libraries hand to dlsym. HCCL's are not among them: cann/hccl.c has those that work, and torch_npu
    says which one it misses.
    """
    found: set[str] = set()
    for name, pattern in (("libtorch_npu.so", rb"\0(acl[A-Za-z0-9_]{4,80})(?=\0)"),
                          ("libop_plugin_atb.so", rb"\0(Atb[A-Za-z0-9_]{4,80})(?=\0)")):  # fmt: skip
        found |= {match.decode() for match in re.findall(pattern, (wheel / "lib" / name).read_bytes())}
    return found


def _needed(library: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+?)\]", _run("readelf", "-d", str(library))))


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command[:3])} ... failed while the virtual NPU was compiled:\n{result.stderr[-2000:]}")
    return result.stdout
