"""The out-of-tree platform, once for all devices, and the little in which NPU, CUDA and CPU differ for vLLM's front end.

vLLM imports this module while it is resolving the platform; workers and layers are named by strings, because importing
them from here would be circular.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

from npu_ops import device as devices
from npu_ops.fused_infer_attention import BLOCK_SIZES
from vllm_plugin import envs, selection
from vllm_plugin.config import ParityConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.selector import AttentionSelectorConfig

# FIA's paged form on Ascend advises 128 tokens to a block, and for prefill requires a multiple of it.
DEFAULT_BLOCK_SIZE = 128


class AscendParityPlatform(Platform):
    """What every device shares: out-of-tree dispatch, our attention backends, eager execution, validated settings."""

    _enum = PlatformEnum.OOT
    simple_compile_backend = "eager"
    worker_cls: str
    # Block sizes of the paged cache that the device's FIA takes.
    kernel_block_sizes: ClassVar[tuple[int, ...]] = BLOCK_SIZES

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        """Give ``vllm serve`` its --device flag and vLLM the names of our environment variables."""
        import vllm.envs

        vllm.envs.environment_variables.update(envs.as_vllm_variables())
        if parser is not None and "--device" not in parser._option_string_actions:
            parser.add_argument(
                "--device",
                choices=selection.DEVICES,
                default=selection.device(),
                help="Device that serves the model (vllm-npu-parity). auto: an NPU, else a GPU, else the CPU.",
            )

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Eager mode, every CustomOp dispatched out of tree: CUDA and CPU walk the path that the NPU walks."""
        from vllm.config import CompilationMode, CUDAGraphMode

        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        if "none" not in compilation.custom_ops and "all" not in compilation.custom_ops:
            compilation.custom_ops.append("all")

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Validate our settings and the block size; name our worker."""
        ParityConfig.of(vllm_config)
        cache, model = vllm_config.cache_config, vllm_config.model_config
        if cache.user_specified_block_size:
            _check_block_size(cache.block_size, is_mla=model is not None and model.use_mla)
        else:
            cache.block_size = DEFAULT_BLOCK_SIZE
        parallel = vllm_config.parallel_config
        if parallel.decode_context_parallel_size > 1 and model is not None and model.get_sliding_window() is not None:
            raise ValueError(
                "--decode-context-parallel-size: a sliding window cannot be served with a sharded KV cache, and this model has "
                "one. Leave the flag out."
            )
        if parallel.prefill_context_parallel_size > 1:
            raise ValueError(
                "--prefill-context-parallel-size: prefill context parallelism is not supported yet, got "
                f"{parallel.prefill_context_parallel_size}. Leave it out; --decode-context-parallel-size shards the KV cache."
            )
        if model is not None and hasattr(model.hf_config, "index_topk"):
            _write_topk_pattern(model.hf_config)
        if parallel.worker_cls == "auto":
            parallel.worker_cls = cls.worker_cls
        # vLLM's own settings for the device, where our platform derives from vLLM's (the CPU).
        super().check_and_update_config(vllm_config)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: AttentionSelectorConfig, num_heads: int | None = None
    ) -> str:
        """Our backend for this layer's shape.

        Raises:
            ValueError: with every reason, if none fits.
        """
        from vllm_plugin.attention import select_backend

        return select_backend(selected_backend, attn_selector_config, cls.get_device_capability())

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: Any) -> Any:
        """ASCEND_MLA prefills by itself; vLLM's layer wants a class to name."""
        from vllm_plugin.attention.mla_impl import AscendMlaPrefill

        return AscendMlaPrefill

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Replace the slot-mapping kernel where no Triton compiles for the device."""
        super().register_triton_kernel_overrides()
        from vllm.triton_utils import HAS_TRITON

        if not HAS_TRITON:
            from vllm_plugin import triton_overrides

            triton_overrides.register()

    @classmethod
    def import_ir_kernels(cls) -> None:
        """No vendor's IR kernels: our ops come through CustomOp.register_oot, the rest is vLLM's native PyTorch."""

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Refuse what the attention ops refuse, before a model is loaded."""
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype {dtype} is not supported. Start vLLM with --dtype bfloat16, float16 or float32.")

    @classmethod
    def inference_mode(cls) -> Any:
        """no_grad: custom ops and views over the paged cache work with it on every device."""
        return torch.no_grad()

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Attention is one opaque op, so that a later graph mode can split there."""
        return True

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Sliding-window and full layers keep groups of their own."""
        return True

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """The runner's list of caches is not indexed by layer here."""

    @classmethod
    def is_sleep_mode_available(cls) -> bool:
        """Not in this release."""
        return False


def _write_topk_pattern(config: Any) -> None:
    """Say which layers share their top-k in the one way that vLLM's model reads; it knows nothing of ``indexer_types``."""
    from sfa.sharing import TopkSharing

    sharing = TopkSharing.of(config)
    config.index_topk_pattern = "".join("F" if sharing.scores(layer) else "S" for layer in range(len(sharing.sources)))


def _check_block_size(block_size: int, is_mla: bool) -> None:
    if is_mla and block_size % DEFAULT_BLOCK_SIZE and block_size != 16:
        raise ValueError(
            "--block-size: 16 or a multiple of 128 is required for latent attention (MLA), which Ascend's FIA takes, "
            f"got {block_size}. Use --block-size 128."
        )
    if block_size not in BLOCK_SIZES:
        raise ValueError(
            f"--block-size: a size of 16 to 256 in steps of 16 is required, got {block_size}. Use --block-size 128."
        )


class CpuParityPlatform(AscendParityPlatform, CpuPlatform):
    """The reference device. Memory sizing, thread binding, kernels and environment are those of vLLM's own CPU platform."""

    _enum = PlatformEnum.OOT
    worker_cls = "vllm_plugin.devices.cpu.CpuParityWorker"
    # Workers of this process that are not shut down. Weak: of an engine that failed to start nobody shuts the worker down.
    workers: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def is_cpu(self) -> bool:
        """True but where a model lives: there layers must dispatch out of tree, as on an NPU.

        Everywhere else vLLM rightly treats this as its CPU: it binds worker processes to cores, picks defaults for CPUs, and
        keeps away from torch.accelerator when it shuts down.
        """
        return not self.workers

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """vLLM's settings for its CPU, less those for its own MLA kernels: ours take chunks, cached prefixes and any block."""
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunked, tokens, prefixes = (
            scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching,
        )  # fmt: skip
        block_size = cache.block_size if cache.user_specified_block_size else DEFAULT_BLOCK_SIZE
        super().check_and_update_config(vllm_config)
        if vllm_config.model_config is not None and vllm_config.model_config.use_mla:
            scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunked, tokens
            cache.enable_prefix_caching, cache.block_size = prefixes, block_size

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        """One CPU to a host."""
        return f"cpu-{device_id}"


class _AcceleratorPlatform(AscendParityPlatform):
    """NPU and CUDA through PyTorch's device-neutral torch.accelerator."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Workers are spawned: a forked process cannot use an accelerator that its parent has touched."""
        super().check_and_update_config(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Make ``device`` current in this thread."""
        torch.accelerator.set_device_index(device.index or 0)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed every visible device."""
        devices.manual_seed_all(cls.device_type, seed)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The vendor's product name."""
        return devices.device_name(cls.device_type, device_id)

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        """Unique among the devices of this host."""
        return f"{cls.get_device_name(device_id)}-{cls.visible_device_id_to_physical_device_id(device_id)}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes."""
        return devices.memory_info(cls.device_type, device_id)[1]

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        """Peak bytes allocated by this process, as vLLM's profiling expects."""
        return float(torch.accelerator.max_memory_allocated(device))

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Streaming multiprocessors, or cube cores."""
        return devices.compute_units(cls.device_type, device_id)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Host buffers are pinned, so that copies overlap."""
        return True


class CudaParityPlatform(_AcceleratorPlatform):
    """NVIDIA GPUs, served by cuda_fallback/."""

    device_name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    ray_device_key = "GPU"
    dist_backend = "nccl"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    worker_cls = "vllm_plugin.devices.cuda.CudaParityWorker"

    @classmethod
    def import_kernels(cls) -> None:
        """None needed: our kernels are Triton, compiled at first use."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        """Compute capability of a visible GPU."""
        return DeviceCapability(*devices.cuda_capability(device_id))

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """NCCL through torch.distributed."""
        return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

    @classmethod
    def get_punica_wrapper(cls) -> str:
        """LoRA by vLLM's Triton kernels."""
        return "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"


class NpuParityPlatform(_AcceleratorPlatform):
    """Ascend NPUs through torch_npu; the virtual NPU is the same platform on a stand-in CANN runtime."""

    device_name = "npu"
    device_type = "npu"
    dispatch_key = "PrivateUse1"
    ray_device_key = "NPU"
    dist_backend = "hccl"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    worker_cls = "vllm_plugin.devices.npu.NpuParityWorker"
    # Prefill wants multiples of 128 on Ascend.
    kernel_block_sizes = tuple(size for size in BLOCK_SIZES if size % DEFAULT_BLOCK_SIZE == 0)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Async scheduling off: vLLM's V1 runner does it with streams of torch.cuda. FIA's exact host lengths need that too."""
        super().check_and_update_config(vllm_config)
        vllm_config.scheduler_config.async_scheduling = False
        if vllm_config.speculative_config is not None:
            raise ValueError("speculative decoding is not supported on npu yet. Start vLLM without --speculative-config.")
        if vllm_config.cache_config.block_size not in cls.kernel_block_sizes:
            raise ValueError(
                "--block-size: Ascend's FIA requires a multiple of 128 for prefill, got "
                f"{vllm_config.cache_config.block_size}. Use --block-size 128."
            )

    @classmethod
    def import_kernels(cls) -> None:
        """torch_npu registers its ops when it is imported; it must be there before the first tensor is made."""
        devices.import_torch_npu()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """The torch slot mapping always: whether upstream's kernel compiles for Ascend is not known without an NPU."""
        from vllm_plugin import triton_overrides

        triton_overrides.register()

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """HCCL through torch.distributed."""
        return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

    @classmethod
    def get_punica_wrapper(cls) -> str:
        """LoRA in plain PyTorch, which runs on any device."""
        return "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"
