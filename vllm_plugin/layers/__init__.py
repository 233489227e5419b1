"""Out-of-tree layer replacements: vLLM instantiates these in place of its own classes when the platform is ours."""

from __future__ import annotations


def register() -> None:
    """Register every replacement with vLLM's registry; once per process (vllm_plugin.hooks sees to it)."""
    from vllm_plugin.layers import activation, indexer, mla, moe, norm, rotary

    for module in (activation, indexer, mla, moe, norm, rotary):
        module.register()
