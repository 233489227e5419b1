"""Does a prompt of full length fit the memory that vLLM's profiling run has reserved for it? Tiny widths, real lengths.

usage: python -m benchmarks.mla_memory --out FILE [--length 131072] [--heads 16] [--chunk 8192]
Runs on the device of VLLM_NPU_PARITY_DEVICE, which must be an accelerator. The figures are bytes of activations: beside
weights, workspace and KV cache, which stay allocated.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    """Serve one prompt and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=131072, help="tokens of the prompt and the answer, and max_model_len")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--utilization", type=float, default=0.5)
    options = parser.parse_args()
    import torch
    from transformers import DeepseekV3Config
    from vllm import LLM, SamplingParams

    from npu_ops import device as devices
    from vllm_plugin.demo_model import BOS, EOS, VOCABULARY, write_checkpoint

    config = DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, moe_intermediate_size=64, num_hidden_layers=2,
        first_k_dense_replace=1, q_lora_rank=96, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        num_attention_heads=options.heads, num_key_value_heads=options.heads, n_routed_experts=12, n_shared_experts=1,
        num_experts_per_tok=2, n_group=4, topk_group=2, max_position_embeddings=options.length, topk_method="noaux_tc",
        scoring_func="sigmoid", bos_token_id=BOS, eos_token_id=EOS, tie_word_embeddings=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(write_checkpoint(Path(folder) / "model", config)), dtype="bfloat16", max_model_len=options.length,
            max_num_batched_tokens=options.chunk, gpu_memory_utilization=options.utilization,
        )  # fmt: skip
        core = llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker.worker
        stays = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        prompt = torch.randint(0, 256, (options.length - 8,), generator=torch.Generator().manual_seed(0)).tolist()
        llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        used, reserved = torch.accelerator.max_memory_allocated() - stays, worker.peak_activation_memory
        result = {
            "device": devices.device_name(worker.device.type),
            "torch": torch.__version__,
            "prompt": len(prompt),
            "heads": options.heads,
            "chunk": options.chunk,
            "reserved": reserved,
            "used": used,
            "used_of_reserved": used / reserved,
            "kv_cache": worker.available_kv_cache_memory_bytes,
            "stays": stays,
        }
        core.shutdown()
    print(result)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    assert 0.9 * reserved <= used <= reserved, "a prompt of full length must fit, with at most a tenth to spare"


if __name__ == "__main__":
    main()
