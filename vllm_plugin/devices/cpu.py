"""The CPU worker: vLLM's own, run out of tree."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_plugin.platform import CpuParityPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CpuParityWorker(CPUWorker):
    """vLLM's CPU worker. Memory sizing, thread binding and model runner are inherited unchanged."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        CpuParityPlatform.hosts_model = True
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=is_driver_worker)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        # Upstream asks every out-of-tree platform for a sleep-mode allocator, sleep mode or not.
        return nullcontext()

    def shutdown(self) -> None:
        """Release the model; what is left of this process is a plain CPU process again."""
        super().shutdown()
        CpuParityPlatform.hosts_model = False
