"""Mixtures of experts through npu_ops: vLLM leaves unquantised experts of an out-of-tree platform to the platform.

Three of vLLM's classes are replaced. The runner, which keeps the shared experts, the scaling of the output and the all-reduce
over the ranks, gets a router of ours; the container of the experts refuses what is not supported; the method multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from npu_ops.grouped_matmul import grouped_matmul
from npu_ops.moe_gating_top_k import SIGMOID, SOFTMAX, moe_gating_top_k
from npu_ops.moe_init_routing import moe_init_routing
from npu_ops.moe_token_unpermute import moe_token_unpermute
from npu_ops.swiglu import swiglu

SCORES = {"softmax": SOFTMAX, "sigmoid": SIGMOID}


class ParityRouter(BaseRouter):
    """The choice of experts that one of vLLM's routers describes, through npu_ops.moe_gating_top_k.

    Args:
        upstream: the router that vLLM made for the layer; its settings are taken over.

    Raises:
        ValueError: for routing that the op does not have.
    """

    def __init__(self, upstream: FusedMoERouter) -> None:
        known = isinstance(upstream, GroupedTopKRouter | FusedTopKBiasRouter | FusedTopKRouter)
        scores = getattr(upstream, "scoring_func", None)
        if not known or scores not in SCORES:
            raise ValueError(
                f"MoE routing by {type(upstream).__name__} with scores {scores!r} is not supported. Softmax and sigmoid "
                "routing is, with groups, a correction bias and a scaling factor."
            )
        if getattr(upstream, "bias_vl", None) is not None:
            raise ValueError("A correction bias of its own for image tokens is not supported.")
        if getattr(upstream, "num_fused_shared_experts", 0):
            raise ValueError("Shared experts inside the routed ones are not supported. Switch their fusion off.")
        super().__init__(upstream.top_k, upstream.global_num_experts, upstream.eplb_state)
        self._upstream = upstream
        self._options: dict[str, Any] = {"norm_type": SCORES[scores], "renorm": int(upstream.renormalize)}
        self._bias: Tensor | None = getattr(upstream, "e_score_correction_bias", None)
        if not isinstance(upstream, FusedTopKRouter):  # which knows no factor
            self._options["routed_scaling_factor"] = upstream.routed_scaling_factor
        if isinstance(upstream, GroupedTopKRouter):
            groups = {"group_count": upstream.num_expert_group, "k_group": upstream.topk_group}
            self._options |= groups | {"group_select_mode": int(self._bias is not None)}

    @property
    def routing_method_type(self) -> RoutingMethodType:
        """vLLM's name for this routing."""
        return self._upstream.routing_method_type

    def _compute_routing(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return moe_gating_top_k(router_logits, self.top_k, bias=self._bias, **self._options)


class ParityMoERunner(MoERunner):
    """vLLM's runner on our router. Shared experts run before the routed ones: vLLM's side stream is for its own CUDA build."""

    def __init__(self, layer_name: str, moe_config: FusedMoEConfig, router: FusedMoERouter, *args: Any, **kwargs: Any) -> None:
        super().__init__(layer_name, moe_config, ParityRouter(router), *args, **kwargs)


class ParityRoutedExperts(RoutedExperts):
    """The experts of one rank, which follow each other.

    Raises:
        ValueError: with the reason, for experts that the method below cannot serve.
    """

    def __init__(
        self,
        layer_name: str,
        params_dtype: torch.dtype,
        moe_config: FusedMoEConfig,
        quant_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if reason := _unsupported(moe_config, quant_config, kwargs):
            raise ValueError(f"{layer_name}: {reason}")
        super().__init__(layer_name, params_dtype, moe_config, quant_config, *args, **kwargs)
        local = self.expert_map_manager.get_local_expert_ids()
        if local != list(range(local[0], local[-1] + 1)):
            raise ValueError(f"{layer_name}: experts of a rank must follow each other. Use --expert-placement-strategy linear.")
        self.active_expert_range = (local[0], local[-1] + 1)


def _unsupported(config: FusedMoEConfig, quant_config: Any, options: dict[str, Any]) -> str | None:
    """Why a layer of experts cannot be served, or None."""
    parallel = config.moe_parallel_config
    swiglu_changes = [name for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta") if options.get(name) is not None]
    reasons = {
        "MoE routing by token ids is not supported.": config.has_hash_routing,
        "quantised experts are not supported yet. Serve a checkpoint in bf16, fp16 or fp32.": quant_config is not None,
        "MoE with data parallelism is not supported yet. Use --tensor-parallel-size, with --enable-expert-parallel if the "
        "experts shall stay whole.": parallel.dp_size > 1,
        "MoE with prefill context parallelism is not supported yet.": parallel.pcp_size > 1,
        "LoRA on experts is not supported yet.": config.is_lora_enabled,
        f"experts with activation {config.activation.value} are not supported. SiLU with a gate is.":
            config.activation != MoEActivation.SILU,
        f"experts with {', '.join(swiglu_changes)} are not supported.": bool(swiglu_changes),
        "experts with biases are not supported.": config.has_bias,
        "router weights on the experts' input are not supported.": bool(options.get("apply_router_weight_on_input")),
    }  # fmt: skip
    return next((reason for reason, applies in reasons.items() if applies), None)


class ParityMoEMethod(UnquantizedFusedMoEMethod):
    """Experts in bf16, fp16 or fp32 as four calls; weights stay as vLLM loads them, [experts, out, in]."""

    @property
    def is_monolithic(self) -> bool:
        """False: the router is not part of the method."""
        return False

    def process_weights_after_loading(self, layer: ParityRoutedExperts) -> None:
        """Nothing to prepare."""

    def apply(
        self,
        layer: ParityRoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """The routed experts' part of the result, [T, hidden], of this rank alone; the runner adds up the ranks."""
        rows, row_idx, counts = moe_init_routing(
            x, topk_ids, expert_num=layer.global_num_experts, active_expert_range=layer.active_expert_range
        )
        hidden = swiglu(grouped_matmul(rows, layer.w13_weight.transpose(1, 2), counts))
        return moe_token_unpermute(grouped_matmul(hidden, layer.w2_weight.transpose(1, 2), counts), row_idx, topk_weights)


def register() -> None:
    """Put the three in place of vLLM's classes."""
    UnquantizedFusedMoEMethod.register_oot(ParityMoEMethod, name="UnquantizedFusedMoEMethod")
    RoutedExperts.register_oot(ParityRoutedExperts, name="RoutedExperts")
    MoERunner.register_oot(ParityMoERunner, name="MoERunner")
