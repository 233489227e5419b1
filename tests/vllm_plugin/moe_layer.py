"""One rank of test_moe_layer.py: vLLM's DeepSeek experts against transformers', and what is refused.

Arguments: rank, number of ranks, "experts" for whole experts to each rank or "widths" for a part of each, a file to meet at.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV3Config, PretrainedConfig
from vllm.config import CompilationConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MoE
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

from npu_ops import device as devices
from vllm_plugin.layers import moe
from vllm_plugin.platform import CpuParityPlatform

RANK, RANKS, BY_EXPERTS, FILE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "experts", sys.argv[4]
DEVICE = torch.device(current_platform.device_type, RANK if current_platform.device_type != devices.CPU else None)
WIDTHS = {"hidden_size": 96, "moe_intermediate_size": 40, "hidden_act": "silu"}


def v2(**changes: Any) -> DeepseekV2Config:
    """Softmax, weights not renormalised, a scaling factor."""
    values = {"n_routed_experts": 24, "num_experts_per_tok": 4, "n_shared_experts": 2, "norm_topk_prob": False,
              "routed_scaling_factor": 16.0, "scoring_func": "softmax"}  # fmt: skip
    return DeepseekV2Config(**WIDTHS, **(values | changes))


def v3(**changes: Any) -> DeepseekV3Config:
    """Sigmoid, a correction bias, renormalised weights, a scaling factor."""
    values = {"n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 8, "topk_group": 3,
              "norm_topk_prob": True, "routed_scaling_factor": 2.5, "topk_method": "noaux_tc",
              "scoring_func": "sigmoid"}  # fmt: skip
    return DeepseekV3Config(**WIDTHS, **(values | changes))


CONFIGS = {
    "v2-lite": v2(topk_method="greedy", n_group=1, topk_group=1),
    "v2": v2(topk_method="group_limited_greedy", n_group=6, topk_group=2),
    "v3": v3(),
    "kimi-k2": v3(n_routed_experts=33, n_group=1, topk_group=1, routed_scaling_factor=2.827),
}


def oracle(config: PretrainedConfig) -> torch.nn.Module:
    """transformers' layer with random weights, of a size that keeps activations near 1."""
    # Not before vLLM has resolved the platform: transformers imports an installed torch_npu.
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    layer = DeepseekV3MoE(config) if isinstance(config, DeepseekV3Config) else DeepseekV2Moe(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    if isinstance(config, DeepseekV3Config):
        layer.gate.e_score_correction_bias.normal_(std=0.3)
    return layer


def load(layer: DeepseekV2MoE, source: torch.nn.Module) -> None:
    """Hand transformers' weights to vLLM's own loaders, which pick what is this rank's."""
    layer.gate.weight.data.copy_(source.gate.weight)
    if layer.gate.e_score_correction_bias is not None:
        layer.gate.e_score_correction_bias.data.copy_(source.gate.e_score_correction_bias)
    experts = layer.experts.routed_experts
    for index in range(len(source.experts.down_proj)):
        gate, up = source.experts.gate_up_proj[index].chunk(2)
        for name, tensor, shard in (("w13", gate, "w1"), ("w13", up, "w3"), ("w2", source.experts.down_proj[index], "w2")):
            weight = getattr(experts, f"{name}_weight")
            experts.weight_loader(weight, tensor, f"{name}_weight", shard_id=shard, expert_id=index)
    experts.quant_method.process_weights_after_loading(experts)
    shared = layer.shared_experts
    for part, name in enumerate(("gate_proj", "up_proj")):
        joined = shared.gate_up_proj
        joined.weight_loader(joined.weight, getattr(source.shared_experts, name).weight, part)
    shared.down_proj.weight_loader(shared.down_proj.weight, source.shared_experts.down_proj.weight)


def check(name: str, config: PretrainedConfig, vllm_config: VllmConfig, scale_outside: bool) -> None:
    """The same results for batches of any size, on every rank."""
    torch.manual_seed(5)
    source = oracle(config)
    with torch.device(DEVICE):
        layer = DeepseekV2MoE(config, vllm_config.parallel_config, prefix=f"{name}.{scale_outside}.mlp",
                              apply_routed_scale_to_output=scale_outside)  # fmt: skip
    assert isinstance(layer.experts, moe.ParityMoERunner)
    load(layer, source)
    for tokens in (1, 7, 130):
        x = torch.randn(tokens, config.hidden_size)
        with set_forward_context(None, vllm_config, num_tokens=tokens):
            got = layer(x.to(DEVICE))
        torch.testing.assert_close(got.cpu(), source(x[None])[0], atol=1e-4, rtol=1e-4)


def refused(reason: str, **changes: Any) -> None:
    """A layer of experts with one setting that is not supported ends with this reason."""
    options = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 32, "prefix": f"bad.{reason}"}
    try:
        FusedMoEFactory(**(options | changes))
    except (ValueError, NotImplementedError) as error:
        assert reason in str(error), error
    else:
        raise AssertionError(f"not refused: {reason}")


def check_refusals() -> None:
    """Everything that a model may ask for and the ops do not do."""
    refused("MoE routing by CustomRoutingRouter", custom_routing_function=lambda *args, **kwargs: None)
    refused("scores 'sqrtsoftplus'", scoring_func="sqrtsoftplus", e_score_correction_bias=torch.zeros(8))
    table = torch.zeros(10, 2, dtype=torch.int32)
    refused("routing by token ids", scoring_func="sigmoid", e_score_correction_bias=torch.zeros(8), hash_indices_table=table)
    refused("for image tokens", scoring_func="sigmoid", e_score_correction_bias=torch.zeros(8), bias_vl=torch.zeros(8))
    refused("MoE routing by ZeroExpertRouter", zero_expert_type="identity", e_score_correction_bias=torch.zeros(8))
    refused("quantised experts", quant_config=Fp8Config())
    refused("activation gelu", activation="gelu")
    refused("swiglu_limit", swiglu_limit=7.0)
    refused("biases", has_bias=True)
    refused("weights on the experts' input", apply_router_weight_on_input=True)
    refused("data parallelism", dp_size=2)


@torch.no_grad()
def main() -> None:
    """Build every layer on this rank."""
    load_general_plugins()
    CpuParityPlatform.workers.add(main)  # as a worker adds itself
    if DEVICE.type != devices.CPU:
        torch.accelerator.set_device_index(DEVICE.index)
    parallel = ParallelConfig(tensor_parallel_size=RANKS, enable_expert_parallel=BY_EXPERTS)
    config = VllmConfig(parallel_config=parallel, compilation_config=CompilationConfig(custom_ops=["all"]))
    with set_current_vllm_config(config):
        init_distributed_environment(RANKS, RANK, f"file://{FILE}", RANK, current_platform.dist_backend)
        initialize_model_parallel(RANKS)
        for name, model in CONFIGS.items():
            for scale_outside in (False, True):
                check(name, model, config, scale_outside)
        check_refusals()


if __name__ == "__main__":
    main()
    print("experts agree")
