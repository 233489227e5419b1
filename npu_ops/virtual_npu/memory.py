"""NPU tensors seen as CPU tensors: device memory of the virtual NPU is host memory, so both can name the same bytes."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

CPU, NPU = torch.device("cpu"), "npu"

# One flat CPU tensor for each (address, bytes, dtype): making it costs more than taking a view of it. It owns nothing, so
# an entry whose memory has been freed does no harm until the address is in use again, and then it is right again.
_flat: dict[tuple[int, int, torch.dtype], Tensor] = {}
_LIMIT = 8192


def on_cpu(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same bytes, with the same shape and strides; a CPU tensor is returned as it is.

    It keeps nothing alive: use it only while ``tensor`` lives.
    """
    if tensor.is_cpu:
        return tensor
    storage = tensor.untyped_storage()
    key = storage.data_ptr(), storage.nbytes(), tensor.dtype
    flat = _flat.get(key)
    if flat is None:
        if not key[0]:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
        if len(_flat) >= _LIMIT:
            _flat.clear()
        memory = torch._C._construct_storage_from_data_pointer(key[0], CPU, key[1])
        flat = _flat[key] = torch.empty(0, dtype=tensor.dtype, device=CPU).set_(memory)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def to_npu(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the NPU with the same strides; a tensor that repeats elements by stride 0 becomes contiguous."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        # The usual case, in a third of the time that a CPU tensor over the new memory takes.
        if size := tensor.nbytes:
            ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), size)
        return copy
    if 0 in tensor.stride():
        return to_npu(tensor.contiguous(), device)
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    on_cpu(copy).copy_(tensor)
    return copy
