"""The NPU worker: vLLM's GPU worker on torch_npu, HCCL and torch.accelerator.

Not run on an NPU yet; docs/devices.md says what has been run and where.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform
from vllm.utils.mem_utils import MemorySnapshot
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.utils import request_memory
from vllm.v1.worker.worker_base import CompilationTimes

from npu_ops import device as devices

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class NpuParityWorker(Worker):
    """vLLM's GPU worker with the parts that name CUDA replaced."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        devices.import_torch_npu()
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=is_driver_worker)
        self.parallel_config.disable_custom_all_reduce = True

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        # Upstream asks every out-of-tree platform for a sleep-mode allocator, sleep mode or not.
        return nullcontext()

    def init_device(self) -> None:
        """Take one NPU, join the process groups, then measure the memory that is left (HCCL's buffers are in by then)."""
        index = current_platform.logical_device_id_to_visible_device_id(self._node_rank())
        visible = torch.accelerator.device_count()
        if index >= visible:
            raise RuntimeError(
                f"rank {self.rank} needs NPU {index}, but {visible} are visible. "
                "Lower --tensor-parallel-size, or show more in ASCEND_RT_VISIBLE_DEVICES."
            )
        self.device = torch.device(current_platform.device_type, index)
        current_platform.set_device(self.device)
        current_platform.check_if_supports_dtype(self.model_config.dtype)
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, current_platform.dist_backend
        )
        set_random_seed(self.model_config.seed)
        gc.collect()
        torch.accelerator.empty_cache()
        self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config, 0)
        self._init_workspace_and_model_runner()

    def _node_rank(self) -> int:
        """Rank of this worker among all workers of the host, data-parallel replicas included."""
        parallel = self.parallel_config
        replica: int | None = parallel.data_parallel_rank_local
        if replica is None or parallel.distributed_executor_backend in ("ray", "external_launcher"):
            return int(self.local_rank)
        return int(self.local_rank + replica * parallel.world_size)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """One pass over a small batch loads the kernels before the first request; upstream's warm-up names CUDA."""
        self.model_runner._dummy_run(16, skip_eplb=True)
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)
        return CompilationTimes(language_model=0.0, encoder=0.0)
