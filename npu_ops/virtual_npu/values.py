"""Values of ``npu::`` ops: what each computes, on CPU tensors, with npu_ops.reference as the definition.

Arguments and results are those of torch_npu's schemas. An argument whose effect is not computed here raises
NotImplementedError with its name. Calls that break CANN's rules do not come this far: rules.py refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from npu_ops.reference import attention_update, gather_kv_cache, rms_norm, rotary, scatter_kv_cache, swiglu

VALUES: dict[str, Callable[..., Any]] = {}

F = TypeVar("F", bound=Callable[..., Any])


def value(*names: str) -> Callable[[F], F]:
    """Give ops of torch_npu, ``"npu::npu_swiglu"``, the decorated function as their kernel, from the next enable() on.

    The function gets the op's arguments with every NPU tensor as a CPU tensor over the same memory. It writes into those that
    the op's schema marks as written, and returns the results as CPU tensors.
    """

    def decorate(function: F) -> F:
        VALUES.update(dict.fromkeys(names, function))
        return function

    return decorate


def refuse(op: str, **arguments: Any) -> None:
    """Raise if an argument that is not computed here was given: anything but None, False and 0."""
    for name, given in arguments.items():
        if isinstance(given, Tensor) or given not in (None, False, 0):
            raise NotImplementedError(f"{op}: the virtual NPU does not compute with {name}. Leave it out, or extend values.py.")


@value("npu::npu_rms_norm")
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The normalised input, and 1/rms in fp32 with the normalised dims kept as 1."""
    return _rms_norm(input.float(), gamma, epsilon, input.dtype)


@value("npu::npu_add_rms_norm")
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """npu_rms_norm of the sum, and the sum."""
    total = x1.float() + x2.float()
    return *_rms_norm(total, gamma, epsilon, x1.dtype), total.to(x1.dtype)


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One or several trailing dims are normalised: as many as gamma has."""
    rows = x.flatten(-gamma.dim()) if gamma.dim() > 1 else x
    normed = rms_norm.rms_norm(rows, gamma.flatten(), epsilon=epsilon).view(x.shape)
    rstd = torch.rsqrt(rows.square().mean(-1) + epsilon)
    return normed.to(dtype), rstd.view(*x.shape[: -gamma.dim()], *[1] * gamma.dim())


@value("npu::npu_swiglu")
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) * second half, along one dim."""
    return swiglu.swiglu(input.transpose(dim, -1)).transpose(dim, -1).contiguous()


@value("npu::npu_rotary_mul")
def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    """``input * r1 + rotated(input) * r2``; 4-D, factors as wide as the head and broadcast over the other dims."""
    refuse("npu_rotary_mul", rotate=rotate)
    width = input.shape[-1]
    half = slice(0, width // 2) if rotary_mode == "half" else slice(0, None, 2)
    other = slice(width // 2, None) if rotary_mode == "half" else slice(1, None, 2)
    if not (torch.equal(r1[..., half], r1[..., other]) and torch.equal(r2[..., half], r2[..., other])):
        return _rotary_mul(input, r1, r2, half, other)
    cos, sin = (part[..., half].expand(*input.shape[:-1], -1).reshape(-1, width // 2) for part in (r1, r2))
    rows = input.reshape(-1, 1, width)
    return rotary.rotary(rows, cos, sin, rotary_mode=rotary_mode).view(input.shape)


def _rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, half: slice, other: slice) -> Tensor:
    """The op takes factors that differ between the halves, which is no rotation and not in the reference."""
    rotated = torch.empty(x.shape)
    rotated[..., half], rotated[..., other] = -x[..., other].float(), x[..., half].float()
    return (x.float() * r1.float() + rotated * r2.float()).to(x.dtype)


@value("npu::npu_attention_update")
def npu_attention_update(lse: Sequence[Tensor], local_out: Sequence[Tensor], update_type: int) -> tuple[Tensor, Tensor | None]:
    """Merged output [M, D] of partials with LSEs [M]; the merged LSE for update_type 1 only."""
    out, total = attention_update.attention_update([x[:, None] for x in lse], [x[:, None] for x in local_out])
    return out[:, 0], total[:, 0] if update_type else None


@value("npu::npu_scatter_pa_kv_cache")
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Write rows into the slots of paged caches [blocks, block_size, heads, dim] (cache_mode Norm)."""
    op = "npu_scatter_pa_kv_cache"
    refuse(op, compress_lens=compress_lens, compress_seq_offsets=compress_seq_offsets, seq_lens=seq_lens)
    if cache_mode != "Norm":
        raise NotImplementedError(f"{op}: the virtual NPU knows cache_mode 'Norm', got {cache_mode!r}")
    scatter_kv_cache.scatter_kv_cache(key, value, key_cache, value_cache, slot_mapping.long())


@value("npu::npu_gather_pa_kv_cache")
def npu_gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Fill key and value with the rows that a paged cache holds of each sequence, packed."""
    if is_seq_lens_cumsum:
        ends = seq_lens.tolist()
        seq_lens = torch.tensor([end - start for start, end in pairwise(ends)])
    gather_kv_cache.gather_kv_cache(key_cache, value_cache, block_tables, seq_lens, key, value, seq_offset=seq_offset)


@value("npu::npu_dtype_cast", "npu::_npu_dtype_cast")
def npu_dtype_cast(self: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast, always into a tensor of its own."""
    return self.to(dtype, copy=True)


@value("npu::npu_dtype_cast_backward", "npu::_npu_dtype_cast_backward")
def npu_dtype_cast_backward(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """The cast back."""
    return grad.to(dtype, copy=True)


@value("npu::npu_format_cast", "npu::_npu_format_cast", "npu::_npu_format_cast.aclnn")
def npu_format_cast(self: Tensor, acl_format: int, *args: Any, **kwargs: Any) -> Tensor:
    """The same values: private formats are not kept, every tensor of the virtual NPU lies as its strides say."""
    return self.clone()


@value("npu::one_")
def one_(self: Tensor) -> Tensor:
    """Fill with 1."""
    return self.fill_(1)


@value("npu::npu_silu")
def npu_silu(self: Tensor) -> Tensor:
    """silu."""
    return torch.nn.functional.silu(self)


@value("npu::npu_fast_gelu", "npu::fast_gelu")
def npu_fast_gelu(self: Tensor) -> Tensor:
    """x * sigmoid(1.702 x)."""
    return (self.float() * torch.sigmoid(1.702 * self.float())).to(self.dtype)
