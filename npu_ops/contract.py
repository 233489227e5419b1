"""What one operator promises, and its registration with PyTorch's dispatcher.

Every op has one stem. ``npu_ops/<stem>.py`` holds the public function and its contract, ``npu_ops/reference/<stem>.py``
the semantics in plain PyTorch (which is also the CPU implementation), ``npu_ops/ascend/<stem>.py`` the mapping onto
torch_npu, ``cuda_fallback/<stem>.py`` the NVIDIA kernels. All four have a function of the same name and signature.
PyTorch chooses by the device of the tensors, so nothing in this project asks "which device is this?".
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

NAMESPACE = "npu_parity"

# Where the implementation for a dispatch key lives. CPU is missing on purpose: the reference is the CPU implementation.
PROVIDERS: Mapping[str, str] = {"CUDA": "cuda_fallback", "PrivateUse1": "npu_ops.ascend"}

_library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_contracts: dict[str, OpContract] = {}


class ContractError(ValueError):
    """A call that breaks an op's contract. The text says what is required, what came, and what to do."""


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted difference from the fp32 reference: ``|out - ref| <= atol + rtol * |ref|``."""

    atol: float
    rtol: float


# Elementwise ops round once: the relative bound is a few units in the last place of each type's mantissa.
ELEMENTWISE: Mapping[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(1e-6, 1e-5),
    torch.float16: Tolerance(1e-3, 2e-3),
    torch.bfloat16: Tolerance(1e-3, 1.6e-2),
}
# Indices and copies are exact.
EXACT: Mapping[torch.dtype, Tolerance] = dict.fromkeys(ELEMENTWISE, Tolerance(0.0, 0.0))


@dataclass(frozen=True)
class OpCase:
    """One generated call: a name for the test's id, positional and keyword arguments on one device."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OpContract:
    """Everything tests, benchmarks and the doctor need to know about one op.

    Attributes:
        name: operator name below the namespace, also the name of the function in each provider module.
        stem: module name, the same in every provider package.
        schema: argument and result part of the torch.library schema, ``"(Tensor x) -> Tensor"``.
        reference: semantics in plain PyTorch; registered for the CPU.
        fake: shapes and dtypes of the results from those of the arguments.
        cases: generator ``(device, dtype, seed) -> OpCase``s, small and adversarial.
        tolerance: per dtype, against the reference evaluated in fp32. Integer results are exact.
        defined: what of the results, ``(args, results)``, the contract defines; the rest may hold anything.
    """

    name: str
    stem: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    cases: Callable[[str, torch.dtype, int], Iterator[OpCase]]
    tolerance: Mapping[torch.dtype, Tolerance]
    defined: Callable[[tuple[Any, ...], list[torch.Tensor]], list[torch.Tensor]] = lambda args, results: results

    @property
    def op(self) -> torch._ops.OpOverload:
        """The registered overload, for torch.library.opcheck and profiles."""
        packet = getattr(getattr(torch.ops, NAMESPACE), self.name)
        return packet.default  # type: ignore[no-any-return]

    @property
    def mutates(self) -> bool:
        """Whether a call writes into one of its arguments."""
        return "!" in self.schema

    def bound(self, dtype: torch.dtype) -> Tolerance:
        """What a result may be off by; an LSE of a 16-bit call is fp32 and held to that, integers are exact."""
        return self.tolerance[dtype] if dtype.is_floating_point else Tolerance(0.0, 0.0)

    def provider_name(self, dispatch_key: str) -> str:
        """Dotted name of the function that serves ``dispatch_key`` ("CPU", "CUDA" or "PrivateUse1")."""
        return f"{PROVIDERS.get(dispatch_key, 'npu_ops.reference')}.{self.stem}.{self.name}"

    def provider(self, dispatch_key: str) -> Callable[..., Any]:
        """Import that function. Raises ImportError where its package (triton, torch_npu) is missing."""
        module, _, name = self.provider_name(dispatch_key).rpartition(".")
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def register(contract: OpContract) -> OpContract:
    """Define the op and its implementations; kernels other than the reference are imported at the first call."""
    _library.define(f"{contract.name}{contract.schema}")  # type: ignore[no-untyped-call]
    _library.impl(contract.name, contract.reference, "CPU")  # type: ignore[no-untyped-call]
    for key in PROVIDERS:
        _library.impl(contract.name, _lazy(contract, key), key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{contract.name}", contract.fake, lib=_library)
    _contracts[contract.name] = contract
    return contract


def _lazy(contract: OpContract, dispatch_key: str) -> Callable[..., Any]:
    @functools.cache
    def resolve() -> Callable[..., Any]:
        return contract.provider(dispatch_key)

    def call(*args: Any, **kwargs: Any) -> Any:
        return resolve()(*args, **kwargs)

    return call


def require(condition: bool, op: str, required: str, got: object, remedy: str) -> None:
    """Raise a ContractError in the project's one form unless ``condition`` holds."""
    if not condition:
        raise ContractError(f"{op}: {required} is required, got {got}. {remedy}")


def all_contracts() -> Mapping[str, OpContract]:
    """Every op of the project by name."""
    for stem in OP_STEMS:
        importlib.import_module(f"npu_ops.{stem}")
    return dict(_contracts)


OP_STEMS: tuple[str, ...] = (
    "attention_update",
    "dynamic_quant",
    "fused_infer_attention",
    "gather_kv_cache",
    "grouped_matmul",
    "hadamard_rotation",
    "interleave_rope",
    "kv_quant_sparse_flash_attention",
    "kv_rmsnorm_rope_cache",
    "lightning_indexer",
    "moe_gating_top_k",
    "moe_init_routing",
    "moe_token_unpermute",
    "pack_sparse_kv",
    "quant_lightning_indexer",
    "rms_norm",
    "rotary",
    "scatter_kv_cache",
    "scatter_rows",
    "sparse_flash_attention",
    "swiglu",
    "transpose_batchmatmul",
)
