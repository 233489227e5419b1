"""The CUDA worker: vLLM's GPU worker on our attention backends."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes


class CudaParityWorker(Worker):
    """vLLM's GPU worker. It ran vLLM's GPU model runner unchanged on an H200."""

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        # Upstream asks every out-of-tree platform for a sleep-mode allocator, sleep mode or not.
        return nullcontext()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """One pass over a small batch compiles our Triton kernels before the first request.

        Upstream's warm-up is for kernels of vLLM's CUDA build, which an out-of-tree platform does not use.
        """
        self.model_runner._dummy_run(16, skip_eplb=True)
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)
        return CompilationTimes(language_model=0.0, encoder=0.0)
