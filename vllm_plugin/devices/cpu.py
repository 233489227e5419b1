"""The CPU worker and model runner: vLLM's own, run out of tree."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.workspace import init_workspace_manager

from vllm_plugin.platform import CpuParityPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CpuParityModelRunner(CPUModelRunner):
    """vLLM's CPU model runner, with seeded requests that survive a chunked prompt.

    After a chunk that does not end the prompt, upstream takes the sampled token back by moving the request's random
    generator back, which a CPU generator cannot do: the engine died of one request with a seed. Here the generator's
    state is saved before sampling and put back, and upstream does not get to see the generator of such a request.
    """

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        generators = self.input_batch.generators
        states = {row: generators[row].get_state() for row in self._unfinished_rows() if row in generators}
        output = super()._sample(logits, spec_decode_metadata)
        for row, state in states.items():
            generators[row].set_state(state)
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        hidden = {row: generators.pop(row) for row in self._unfinished_rows() if row in generators}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(hidden)

    def _unfinished_rows(self) -> list[int]:
        """Rows of the batch whose prompt goes on after this step."""
        mask = self.discard_request_mask.np[: self.input_batch.num_reqs]
        return [int(row) for row in np.nonzero(mask)[0]]


class CpuParityWorker(CPUWorker):
    """vLLM's CPU worker. Memory sizing and thread binding are inherited unchanged."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        CpuParityPlatform.workers.add(self)
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=is_driver_worker)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        # Upstream asks every out-of-tree platform for a sleep-mode allocator, sleep mode or not.
        return nullcontext()

    def init_device(self) -> None:
        """Upstream's set-up, then our model runner: upstream's names its own class, and a runner without a model is cheap."""
        super().init_device()
        init_workspace_manager(self.device)  # vLLM's GPU worker does: layers share scratch memory through it
        self.model_runner = CpuParityModelRunner(self.vllm_config, self.device)

    def shutdown(self) -> None:
        """Release the model; what is left of this process is a plain CPU process again."""
        super().shutdown()
        CpuParityPlatform.workers.discard(self)
