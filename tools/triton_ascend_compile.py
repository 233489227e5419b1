"""Compile Triton kernels ahead of time, on a machine with no device: the part that runs where the compiler is installed.

    python triton_ascend_compile.py JOB.json          # a job and its results: see tools/triton_ascend_check.py

With triton-ascend and ascendnpu-ir installed the targets are Ascend chips, with upstream Triton "cuda:90" and its like. Needs
neither torch nor CANN. Prints one JSON list of results.

Stages for Ascend: ttir, ttadapter (linalg), hivm (tiling, memory plan, synchronisation, library calls), link (the library
functions exist on the device). The last step to machine code is CANN's and does not run: its program ``hivmc`` is stood in
for by a script that hands back the module it was given.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

HIVMC = """#!/bin/sh
# Stands in for CANN's hivmc: answers the version probe, and keeps the module that it is handed.
if [ "$1" = "--version" ]; then echo "hivmc 1.2.0 (8796a8ac1508 2026-07-29)"; exit 0; fi
out=""; previous=""
for a in "$@"; do [ "$previous" = "-o" ] && out="$a"; previous="$a"; done
cp "$1" "$out.o"
"""
# triton-ascend asks an extension that it builds against CANN which chip there is; Triton's hook for caches hands it ours.
CACHE = """from triton.runtime.cache import FileCacheManager

class StandInCache(FileCacheManager):
    def get_file(self, filename):
        return {utils!r} if filename == "npu_utils.so" else super().get_file(filename)
"""
BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "index": 64}


def load(path: Path) -> ModuleType:
    """A module by its path: its package may need what is not installed here."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def prepare_ascend(folder: str, target: str) -> None:
    """Let triton-ascend compile for a chip without CANN, torch_npu or a device."""
    package = importlib.util.find_spec("ascendnpuir")
    assert package is not None, "ascendnpu-ir is not installed"
    assert package.submodule_search_locations is not None
    binaries = Path(package.submodule_search_locations[0]) / "bin"
    os.environ["PATH"] = f"{folder}:{binaries}:{os.environ['PATH']}"
    os.environ["TRITON_CACHE_MANAGER"] = "stand_in_cache:StandInCache"
    sys.path.insert(0, folder)
    utils = Path(folder) / "stand_in_utils.py"
    utils.write_text(f"def get_arch():\n    return {target!r}\n", encoding="utf-8")
    (Path(folder) / "stand_in_cache.py").write_text(CACHE.format(utils=str(utils)), encoding="utf-8")
    (Path(folder) / "hivmc").write_text(HIVMC, encoding="utf-8")
    (Path(folder) / "hivmc").chmod(0o755)


def compile_ascend(kernel: Any, launch: dict[str, Any], target: str) -> dict[str, Any]:
    """Every stage for one chip: memory by the byte, and notes on what fell back to scalar code."""
    import triton
    from triton.backends.ascend.compiler import AscendAttrsDescriptor
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: type for name, type in launch["signature"].items() if type != "constexpr"}
    attributes = AscendAttrsDescriptor.from_hints(dict.fromkeys(launch["divisible"], 16))
    source = ASTSource(fn=kernel, signature=signature, constants=launch["constants"], attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("npu", target, 0), options={})
    hivm = compiled.asm["npubin"].decode(errors="replace")
    if missing := undefined(hivm):
        return {"stage": "hivm", "error": f"undefined library functions {missing}"}
    return {"stage": "link", "memory": memory_peak(hivm), "scalar": scalar_code(hivm, compiled.asm["ttadapter"])}


def compile_cuda(kernel: Any, launch: dict[str, Any], target: str) -> dict[str, Any]:
    """Down to the machine code of one architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    hints = {(index,): [["tt.divisibility", 16]] for index in launch["divisible"]}
    source = ASTSource(fn=kernel, signature=launch["signature"], constexprs=launch["constants"], attrs=hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", int(target.partition(":")[2]), 32))
    return {"stage": list(compiled.asm)[-1], "memory": {"shared": compiled.metadata.shared}, "scalar": []}


def undefined(hivm: str) -> list[str]:
    """Library functions that the module declares and no device bitcode that it names defines."""
    declared = re.findall(r"func\.func private @(\w+)\(.*?\)(?: -> [^\n{]*?)? attributes \{[^\n]*llvm\.emit_c_interface", hivm)
    bitcode = b"".join(Path(path).read_bytes() for path in re.findall(r'hivm\.\w*_bitcode<"([^"]+)">', hivm))
    return sorted(name for name in set(declared) if f"_mlir_ciface_{name}".encode() not in bitcode)


def memory_peak(hivm: str) -> dict[str, int]:
    """Highest byte in use of each memory on the chip, from the planned addresses: ub is the unified buffer."""
    constants = {name: int(value) for name, value in re.findall(r"(%[\w#]+) = arith\.constant (-?\d+) : i64", hivm)}
    cast = r"pointer_cast\(([^)]*)\)[^:]*: memref<([^,>]+)(?:, strided<[^>]*>)?, #hivm\.address_space<(\w+)>>"
    peak: dict[str, int] = {}
    for addresses, shape, space in re.findall(cast, hivm):
        *sizes, type = shape.split("x")
        bits = BITS.get(type, 8)
        for size in sizes:
            bits *= int(size) if size.isdigit() else 0
        for address in addresses.split(","):
            start = constants.get(address.strip(), 0)
            peak[space] = max(peak.get(space, 0), start + (bits + 7) // 8)
    return peak


def scalar_code(hivm: str, linalg: str) -> list[str]:
    """What does not run on the vector unit: loops over single elements, element-wise access, division by way of floats."""
    notes = []
    loop = r"scf\.for %\S+ = (%\S+) to (%\S+) step %\S+[^\n]*\{\n((?:(?!scf\.for)[^\n]*\n)*?)[ ]*\}"
    one = {name for name, value in re.findall(r"(%[\w#]+) = arith\.constant (\d+) : index", hivm) if value == "1"}
    for _, stop, body in re.findall(loop, hivm):
        if "memref.load" in body and "memref.store" in body and "call @" not in body and stop not in one:
            notes.append(f"a scalar loop over elements up to {stop}")
    if discrete := len(re.findall(r"ExtractedLoadOrStore|DiscreteMemAccess", linalg)):
        notes.append(f"{discrete} element-by-element memory accesses")
    if division := len(re.findall(r"arith\.(?:divsi|divui|floordivsi|ceildivsi) [^\n]*: tensor<[^>\n]*xi(?:8|16|32)>", linalg)):
        notes.append(f"{division} integer divisions of tensors, exact below 2**24 only")
    return notes


def failure(error: Exception) -> dict[str, Any]:
    """The stage that was reached before an exception, and the line of its message that says what is wrong."""
    # triton-ascend names the step that failed.
    reached = {"ConvertTritonIRToLinalgIR": "ttir", "ConvertLinalgRToBinary": "ttadapter"}
    cause = error.__cause__ or error
    lines = [
        line.strip() for line in str(cause).splitlines() if re.search(r"\w", line) and not line.startswith(("///", "[Convert"))
    ]
    for pattern in (r"overflow, requires", r"error: "):
        lines = [line for line in lines if re.search(pattern, line)] or lines
    stage = reached.get(getattr(error, "stage_name", ""), "frontend")
    return {"stage": stage, "error": f"{type(cause).__name__}: {lines[0] if lines else ''}"[:400]}


def main() -> None:
    """Run the job in the file that is named on the command line."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    target, results = job["target"], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = f"{folder}/cache"
        build = compile_cuda
        if target.startswith("Ascend"):
            prepare_ascend(folder, target)
            build = compile_ascend
        module = load(Path(job["file"]))
        for launch in job["launches"]:
            start = time.monotonic()
            try:
                result = build(getattr(module, launch["kernel"]), launch, target)
            except Exception as error:
                result = failure(error)
            row: dict[str, Any] = {"memory": {}, "scalar": [], "error": None}
            row |= {"name": launch["name"], "target": target, "seconds": round(time.monotonic() - start, 2)}
            results.append(row | result)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
