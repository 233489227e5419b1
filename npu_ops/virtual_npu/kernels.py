"""CPU kernels behind the npu dispatch key.

Every aten op that torch_npu registers for the NPU runs PyTorch's own CPU kernel over the same memory; every ``npu::`` and
``atb::`` op runs the kernel that values.py has for it. An op without either raises NotImplementedError with its name: the
stand-in runtime executes nothing, so torch_npu's own kernel would hand back whatever the memory held before. Ops that
only allocate, make views or ask the host stay torch_npu's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from npu_ops.virtual_npu import attention, moe, quant, random, recording, rules, sparse_attention, values
from npu_ops.virtual_npu.memory import CPU, NPU, on_cpu, to_npu

KEY = "PrivateUse1"

# torch_npu's own host code is right for these: memory, views, and questions to the host.
KEPT_ATEN = {
    "_has_compatible_shallow_copy_type", "_pin_memory", "_reshape_alias", "alias", "as_strided", "empty", "empty_like",
    "empty_strided", "empty_with_swapped_memory", "is_pinned", "new_empty", "new_empty_strided", "record_stream", "resize_",
    "set_", "squeeze", "unfold", "unsqueeze", "view", "view_as_complex", "view_as_real",
}  # fmt: skip
KEPT_NPU = {
    "empty_with_format", "get_npu_format", "get_storage_size", "npu_change_data_ptr", "set_op_timeout_ms",
    "super_kernel_scope_begin", "super_kernel_scope_end", "unsafe_empty_with_format",
}  # fmt: skip
# Ops that take tensors of the host beside those of the device.
MIXES = {"copy_", "index", "index_put", "index_put_", "_index_put_impl_",
         "_unsafe_index", "_pack_padded_sequence", "histogram", "tensor_split"}  # fmt: skip

assert attention.OP and moe.OPS and quant.OP and sparse_attention.SFA  # imported for the kernels that they add to values.VALUES

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Put the CPU kernels in the place of torch_npu's. Call once, after torch_npu is imported."""
    libraries = {space: torch.library.Library(space, "IMPL") for space in ("aten", "npu", "atb")}  # type: ignore[no-untyped-call]
    _libraries.extend(libraries.values())  # a library that is collected takes its kernels with it
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        if space not in libraries or not torch._C._dispatch_has_kernel_for_dispatch_key(name, KEY):
            continue
        op = _overload(space, rest)
        kernel = op and _kernel(op, name, rest.partition(".")[0])
        if kernel:
            libraries[space].impl(rest, kernel, KEY, allow_override=True)  # type: ignore[no-untyped-call]


def in_one_piece(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A composition of aten ops on CPU tensors over the memory of NPU tensors; see virtual_npu.in_one_piece."""
    if recording.wanted(is_aten=True) or not any(_in_memory(x) for x in (*args, *kwargs.values())):
        return function(*args, **kwargs)
    call = _Call(function.__qualname__, mixes=False, aliases=True)
    lowered = [call.lower(x) for x in args]
    return call.lift(function(*lowered, **{key: call.lower(x) for key, x in kwargs.items()}))


def _in_memory(x: Any) -> bool:
    """Whether ``x`` is a tensor in memory of the NPU, which a fake or meta tensor is not."""
    return isinstance(x, Tensor) and x.device.type == NPU and not isinstance(x, FakeTensor)


def _overload(space: str, name: str) -> torch._ops.OpOverload | None:
    """The op, or None for a kernel that torch_npu registers under a name that nobody defines."""
    base, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, space), base, None)
    return getattr(packet, overload or "default", None)


def _kernel(op: torch._ops.OpOverload, name: str, base: str) -> Callable[..., Any] | None:
    if name.startswith("aten::"):
        if base in KEPT_ATEN:
            return None
        return _recorded(op, SPECIAL.get(base) or _lowered(op, op, name), is_aten=True)
    if base in KEPT_NPU:
        return None
    value = values.VALUES.get(name)
    if value is None:
        return _unknown(name)
    checked = _checked(name, _lowered(op, value, name))
    # The classes of the ATB library are more than symbols: its ops cannot run on a stand-in.
    return checked if name.startswith("atb::") else _recorded(op, checked)


def _unknown(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{name}: the virtual NPU does not know what this op computes. Give it a kernel: "
            f"@npu_ops.virtual_npu.values.value({name!r}), before enable()"
        )

    return refuse


def _checked(name: str, value: Callable[..., Any]) -> Callable[..., Any]:
    """``value`` for calls that keep CANN's rules; others raise."""

    def call(*args: Any, **kwargs: Any) -> Any:
        rules.check(name, args, kwargs)
        return value(*args, **kwargs)

    return call


def _recorded(op: torch._ops.OpOverload, value: Callable[..., Any], is_aten: bool = False) -> Callable[..., Any]:
    """``value``, after torch_npu's own host code has run if calls are being recorded."""
    host = torch.library.get_kernel(op, KEY)

    def call(*args: Any, **kwargs: Any) -> Any:
        if recording.wanted(is_aten):
            recording.run_host(op, host, args, kwargs)
        elif recording.continues(is_aten):
            host.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1), *args, **kwargs)
        return value(*args, **kwargs)

    return call


def _lowered(op: torch._ops.OpOverload, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``function`` on CPU tensors as a kernel for NPU tensors."""
    arguments = op._schema.arguments
    base = op._schema.name.partition("::")[2]
    mixes = base in MIXES
    outs = [a.name for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write]
    takes_generator = any(str(a.type) == "Optional[Generator]" for a in arguments)
    draws_from_default = torch.Tag.nondeterministic_seeded in op.tags and not takes_generator
    aliases = any(result.alias_info is not None for result in op._schema.returns)
    plain = not (takes_generator or outs or draws_from_default)

    def run(*args: Any, **kwargs: Any) -> Any:
        call = _Call(name, mixes, aliases)
        lower = call.lower
        lowered = [lower(x) for x in args]
        named = {key: lower(x) for key, x in kwargs.items()} if kwargs else kwargs
        if plain:
            return call.lift(function(*lowered, **named))
        if takes_generator:
            _pass_generator(arguments, lowered, named, call)
        if outs:
            return call.run_out(function, lowered, named, [key for key in outs if key in named])
        if draws_from_default:
            with random.as_default(call.draw(None)):
                return call.lift(function(*lowered, **named))
        return call.lift(function(*lowered, **named))

    return run


def _pass_generator(arguments: Sequence[Any], args: list[Any], kwargs: dict[str, Any], call: _Call) -> None:
    """Make an op that draws without naming a generator draw from the device's."""
    for index, argument in enumerate(arguments):
        if argument.name != "generator":
            continue
        if index < len(args):
            args[index] = call.draw(args[index])
        else:
            kwargs["generator"] = call.draw(kwargs.get("generator"))


class _Call:
    """One call of a kernel: which CPU tensor stands for which NPU tensor, and where results belong."""

    __slots__ = ("aliases", "device", "mixes", "name", "pairs")

    def __init__(self, name: str, mixes: bool, aliases: bool) -> None:
        self.name = name
        self.mixes = mixes
        self.aliases = aliases  # whether a result can be an argument, or a view of one
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.device: torch.device | None = None

    def lower(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            if x.is_cpu:
                if x.dim() and not self.mixes:
                    raise RuntimeError(f"{self.name}: all tensors must be on one device, found {NPU} and cpu")
                return x
            return self._lower_tensor(x)
        if isinstance(x, (list, tuple)):  # half the time of list | tuple, which is built each time
            return [self.lower(item) for item in x] if x and not isinstance(x[0], int | float) else x
        if isinstance(x, torch.device) and x.type == NPU:
            self.device = x
            return CPU
        return x

    def _lower_tensor(self, x: Tensor) -> Tensor:
        for known, lowered in self.pairs:
            if known is x:
                return lowered
        if self.device is None:
            self.device = x.device
        elif self.pairs and x.dim() and self.device != x.device and not self.mixes:
            raise RuntimeError(f"{self.name}: all tensors must be on one device, found {self.device} and {x.device}")
        lowered = on_cpu(x)
        self.pairs.append((x, lowered))
        return lowered

    def lift(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            return self._lift_tensor(result)
        if isinstance(result, tuple):
            return tuple(self.lift(item) for item in result)
        if isinstance(result, list):
            return [self.lift(item) for item in result]
        return result

    def _lift_tensor(self, result: Tensor) -> Tensor:
        """The argument that ``result`` is, a view of one that it looks into, or a new tensor."""
        if not self.aliases:
            return to_npu(result, self.target())
        for tensor, lowered in self.pairs:
            if result is lowered:
                if tensor.shape != result.shape:
                    tensor.resize_(result.shape)
                return tensor
        address = result.untyped_storage().data_ptr()
        for tensor, lowered in self.pairs if address else ():
            if lowered.untyped_storage().data_ptr() == address:
                # The CPU's storage of an NPU tensor begins where the NPU's does, so that offsets are equal.
                if tensor.dtype == result.dtype:
                    return tensor.as_strided(result.shape, result.stride(), result.storage_offset())
                view = torch.empty(0, dtype=result.dtype, device=tensor.device)
                return view.set_(tensor.untyped_storage(), result.storage_offset(), result.shape, result.stride())
        return to_npu(result, self.target())

    def target(self) -> torch.device:
        """The device of the call's tensors, else the current one."""
        return self.device if self.device is not None else torch.device(NPU)

    def draw(self, generator: torch.Generator | None) -> torch.Generator:
        """A CPU generator that stands for ``generator``, or for the default one of the call's device."""
        if generator is not None and generator.device.type == CPU.type:
            return generator
        if generator is None:
            module = torch.get_device_module(NPU)
            index = self.target().index
            generator = module.default_generators[module.current_device() if index is None else index]
        return random.next_draw(generator)

    def run_out(self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], outs: Iterable[str]) -> Any:
        """Write into out= tensors, which the op may have to enlarge: memory of the NPU cannot be, so scratch tensors take
        the place of those that are empty.
        """
        wanted = {key: kwargs[key] for key in outs}
        scratch = {k: torch.empty(0, dtype=t.dtype) for k, t in wanted.items() if isinstance(t, Tensor) and not t.numel()}
        result = function(*args, **{**kwargs, **scratch})
        for key, filled in scratch.items():
            out = next(tensor for tensor, lowered in self.pairs if lowered is wanted[key])
            out.resize_(filled.shape)
            on_cpu(out).copy_(filled)
            self.pairs.append((out, filled))
        return self.lift(result)


def _to_copy(
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """A cast, to any device: copies of the virtual NPU are done before they return."""
    copy: Tensor = torch.ops.aten._to_copy.default(on_cpu(x), dtype=dtype, memory_format=memory_format)
    target = x.device if device is None else device
    if target.type == NPU:
        return to_npu(copy, target)
    if pin_memory:
        copy = copy.pin_memory()
    return copy


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """copy_ with its arguments the other way round."""
    on_cpu(target).copy_(on_cpu(source))
    return target


def _copy_from_and_resize(source: Tensor, target: Tensor) -> Tensor:
    """How results of ops that fall back to the CPU get into out= tensors."""
    if target.shape != source.shape:
        target.resize_(source.shape)
    return _copy_from(source, target)


# aten ops that PyTorch has no CPU kernel for, or whose result is not always on the device.
SPECIAL: dict[str, Callable[..., Tensor]] = {
    "_to_copy": _to_copy,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
}
