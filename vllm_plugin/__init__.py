"""vLLM platform plugin: Ascend's long-context attention on NPUs, NVIDIA GPUs, CPUs and a virtual NPU.

Importing this package is cheap: it touches no device and imports neither torch nor torch_npu.
"""

from __future__ import annotations


def register() -> str | None:
    """Entry point ``vllm.platform_plugins``: the dotted name of our platform class, or None to leave vLLM alone.

    vLLM calls this in every process, more than once, while it is being imported, and swallows ordinary exceptions; so a
    device that was asked for and cannot be had ends the process with one line that says what to do.
    """
    from vllm_plugin import selection

    return selection.activate()


def register_plugins() -> None:
    """Entry point ``vllm.general_plugins``: hook layers, backends and settings into vLLM. Safe to call again."""
    from vllm_plugin import selection

    if selection.active():
        from vllm_plugin import hooks

        hooks.register()
    else:
        selection.explain_inactive()
