"""Everything that is hooked into vLLM once the platform is ours: backends by name, layers by class."""

from __future__ import annotations

import functools

from vllm.v1.attention.backends.registry import register_backend


@functools.cache
def register() -> None:
    """Register attention backends and layer replacements. Idempotent, as vLLM loads general plugins more than once."""
    from vllm_plugin import attention, layers

    for name, path in attention.BACKENDS.items():
        register_backend(name, path)
    layers.register()
