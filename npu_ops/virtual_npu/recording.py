"""What torch_npu asks CANN for: its aclnn calls with all their arguments, as records that can be compared and read.

torch_npu's own host code for an op runs on the virtual NPU's tensors while calls are recorded; it checks its arguments,
prepares them and calls ``aclnn...GetWorkspaceSize``, which the stand-in library keeps. Values come from elsewhere.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

ACL_DTYPES = {
    0: "float32", 1: "float16", 2: "int8", 3: "int32", 4: "uint8", 6: "int16", 7: "uint16", 8: "uint32", 9: "int64",
    10: "uint64", 11: "float64", 12: "bool", 16: "complex64", 17: "complex128", 27: "bfloat16", 29: "int4", 34: "hifloat8",
    35: "float8_e5m2", 36: "float8_e4m3fn", 37: "float8_e8m0", 40: "float4_e2m1",
}  # fmt: skip
ACL_FORMATS = {-1: "undefined", 0: "NCHW", 1: "NHWC", 2: "ND", 3: "NC1HWC0", 4: "FRACTAL_Z", 27: "NDHWC", 29: "FRACTAL_NZ",
               30: "NCDHW", 47: "NCL"}  # fmt: skip


@dataclass(frozen=True)
class AclTensor:
    """A tensor as CANN gets it. ``storage`` is the shape of the memory that it lies in, ``offset`` counts elements."""

    shape: tuple[int, ...]
    dtype: str
    format: str
    stride: tuple[int, ...]
    offset: int
    storage: tuple[int, ...]


@dataclass(frozen=True)
class AclScalar:
    """A scalar with a type of its own."""

    dtype: str
    value: float | int | bool


# None: a handle that was made before the recording began.
Argument = AclTensor | AclScalar | tuple[Any, ...] | int | str | None


@dataclass(frozen=True)
class AclCall:
    """One aclnn call.

    Attributes:
        op: CANN's name of the function, without ``GetWorkspaceSize``.
        source: the PyTorch op that made the call, ``"npu::npu_rms_norm"``.
        arguments: in CANN's order, without the floating-point ones, results last. A null pointer reads as 0: registers do
            not tell which it is.
        floats: the floating-point arguments in their order. They travel in registers of their own, in which old values
            stay; so they are taken from the first on, as long as the op was called with that number.
    """

    op: str
    source: str
    arguments: tuple[Argument, ...]
    floats: tuple[float, ...]


class _Recorder:
    """The one recording that can be going on; the stand-in library keeps calls of the whole process."""

    def __init__(self) -> None:
        self.library: ctypes.CDLL | None = None
        self.calls: list[AclCall] | None = None
        self.aten = False
        self.runs_host = False


_recorder = _Recorder()


def attach(library: ctypes.CDLL) -> None:
    """Use this stand-in library."""
    library.virtual_npu_take.restype = ctypes.c_void_p
    library.virtual_npu_release.argtypes = [ctypes.c_void_p]
    _recorder.library = library


def wanted(is_aten: bool) -> bool:
    """Whether the host code of an op is to run."""
    return _recorder.calls is not None and (_recorder.aten or not is_aten)


def continues(is_aten: bool) -> bool:
    """Whether the host code of an op is to run as a part of another one's that is being recorded, which has called it."""
    return _recorder.runs_host and not is_aten


@contextmanager
def record(aten: bool = False) -> Iterator[list[AclCall]]:
    """Record the aclnn calls of the block, in the list that it is given.

    Args:
        aten: those of PyTorch's own ops too, not only of ``npu::`` and ``atb::`` ops.

    Raises:
        RuntimeError: if the virtual NPU is not enabled, or a recording is going on.
    """
    library = _recorder.library
    if library is None:
        raise RuntimeError("record() needs the virtual NPU. Call npu_ops.virtual_npu.enable() first.")
    if _recorder.calls is not None:
        raise RuntimeError("a recording is going on already. End it first.")
    calls: list[AclCall] = []
    _recorder.calls, _recorder.aten = calls, aten
    try:
        yield calls
    finally:
        _recorder.calls = None


def run_host(op: torch._ops.OpOverload, host: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Run torch_npu's own code for one op and keep the calls that it makes. Its results are dropped, its errors are not."""
    library, calls = _recorder.library, _recorder.calls
    assert library is not None
    assert calls is not None
    library.virtual_npu_record(1)
    # Ops that the host code itself calls count as part of this one.
    _recorder.calls, _recorder.runs_host = None, True
    try:
        host.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1), *args, **kwargs)
    finally:
        _recorder.calls, _recorder.runs_host = calls, False
        library.virtual_npu_record(0)
        taken = _take(library)
    numbers = _numbers(op, args, kwargs)
    name = op._schema.name
    calls.extend(_call(json.loads(line), name, *numbers) for line in taken)


def _take(library: ctypes.CDLL) -> list[str]:
    address = library.virtual_npu_take()
    if not address:
        return []
    text = ctypes.string_at(address).decode()
    library.virtual_npu_release(address)
    return text.splitlines()


def _numbers(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[float], set[int]]:
    """Floats and integers that the op was called with, defaults included."""
    floats: list[float] = []
    integers: set[int] = {0, 1}
    for index, argument in enumerate(op._schema.arguments):
        given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        for value in given if isinstance(given, list | tuple) else (given,):
            if isinstance(value, float):
                floats.append(value)
            elif isinstance(value, int):
                integers.add(int(value))
    return floats, integers


def _call(raw: dict[str, Any], source: str, floats: list[float], integers: set[int]) -> AclCall:
    arguments = tuple(_argument(value, integers) for value in raw["arguments"])
    return AclCall(raw["op"].removesuffix("GetWorkspaceSize"), source, arguments, tuple(_leading(raw["registers"], floats)))


def _leading(registers: Sequence[int], floats: list[float]) -> Iterator[float]:
    """The first registers, as long as they hold one of ``floats``, as a double or a float; each number counts once."""
    left = list(floats)
    for bits in registers:
        data = bits.to_bytes(8, "little")
        double, single = struct.unpack("<d", data)[0], struct.unpack("<f", data[:4])[0]
        found = next((x for x in left if x == double or (abs(x) < 3e38 and ctypes.c_float(x).value == single)), None)
        if found is None:
            return
        left.remove(found)
        yield found


def _argument(raw: Any, integers: set[int]) -> Argument:
    if isinstance(raw, int):
        return _integer(raw, integers)
    if not isinstance(raw, dict):
        return raw  # type: ignore[no-any-return]
    if raw.get("kind") == "tensor":
        return _tensor(raw)
    if raw.get("kind") == "scalar":
        return _scalar(raw["dtype"], raw["bits"])
    if raw.get("kind") == "bools":
        return tuple(bool(value) for value in raw["values"])
    return tuple(_argument(value, integers) if isinstance(value, dict) else value for value in raw.get("values", ["pointer"]))


def _tensor(raw: dict[str, Any]) -> AclTensor:
    dtype, form = raw["dtype"], raw["format"]
    return AclTensor(
        tuple(raw["shape"]),
        ACL_DTYPES.get(dtype, str(dtype)),
        ACL_FORMATS.get(form, str(form)),
        tuple(raw["stride"]),
        raw["offset"],
        tuple(raw["storage"]),
    )


def _integer(raw: int, integers: set[int]) -> int:
    """A register holds 64 bits; of a narrower argument the upper ones are left over from before.

    So of a number that cannot be right as it is, the low half is taken, or its low byte for a flag.
    """
    low = struct.unpack("<i", (raw & 0xFFFFFFFF).to_bytes(4, "little"))[0]
    byte = raw & 0xFF
    for candidate in (raw, low, byte):
        if candidate in integers:
            return candidate
    return raw if -(2**31) <= raw < 2**31 else low


def _scalar(dtype: int, bits: int) -> AclScalar:
    name = ACL_DTYPES.get(dtype, str(dtype))
    data = (bits & (1 << 64) - 1).to_bytes(8, "little")
    form = {"float32": "<f", "float64": "<d", "bool": "<?", "int32": "<i"}.get(name, "<q")
    return AclScalar(name, struct.unpack(form, data[: struct.calcsize(form)])[0])
