"""Attention backends, one file each, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.attention.selector import AttentionSelectorConfig

BACKENDS: Mapping[str, str] = {
    "ASCEND_FIA": "vllm_plugin.attention.fia.AscendFiaBackend",
    "ASCEND_MLA": "vllm_plugin.attention.mla.AscendMlaBackend",
    "ASCEND_SFA": "vllm_plugin.attention.sfa.AscendSfaBackend",
}


def select_backend(selected: Any, config: AttentionSelectorConfig, capability: DeviceCapability | None) -> str:
    """Dotted name of the backend for a layer of this shape.

    Args:
        selected: the user's --attention-backend, or None.
        config: head size, dtypes and features of the layer.
        capability: CUDA compute capability, or None on other devices.

    Raises:
        ValueError: naming every reason, if the layer needs what no backend of ours has.
    """
    from vllm.logger import init_logger
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_plugin import hooks

    # vLLM looks the backend up by name; a script that builds a layer without an engine has not loaded general plugins.
    hooks.register()

    if selected is not None and selected.name not in BACKENDS:
        raise ValueError(f"--attention-backend {selected.name} is not one of ours. Choose one of: {', '.join(BACKENDS)}.")
    fitting = "ASCEND_SFA" if config.use_sparse else "ASCEND_MLA" if config.use_mla else "ASCEND_FIA"
    name = selected.name if selected is not None else fitting
    backend: type[AttentionBackend] = resolve_obj_by_qualname(BACKENDS[name])
    reasons = backend.validate_configuration(device_capability=capability, **config._asdict())
    if reasons:
        raise ValueError(f"{name} cannot serve this model: {'; '.join(reasons)}.")
    init_logger("vllm.npu_parity").info_once("Using %s backend.", name)
    return BACKENDS[name]
