"""A child process that holds one real vLLM engine on one device and does what its standard input says, a JSON line at a time.

A process serves one platform for life, so each device needs a process of its own. The engine runs inside the child
(no engine-core process), which makes a second engine a matter of seconds: the imports are done by then.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from typing import Any

# Standard output belongs to the protocol; whatever vLLM and its libraries print goes to standard error.
_replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


class Host:
    """The commands. Each takes JSON values and returns one."""

    def __init__(self) -> None:
        self.llm: Any = None

    def start(self, model: str, options: dict[str, Any]) -> dict[str, Any]:
        """Replace the engine by one with these arguments of vllm.LLM."""
        from vllm import LLM

        self.stop()
        defaults = {
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 64 << 20,
            "dtype": "float32",
            "seed": 0,
            "disable_log_stats": False,
        }
        self.llm = LLM(model, **(defaults | options))
        return {"num_gpu_blocks": self._engine_core().vllm_config.cache_config.num_gpu_blocks}

    def _engine_core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def stop(self) -> None:
        """Shut the engine down and free its process groups."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            gc.collect()

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int | list[int],
        chunk: int | None = None,
        keep_cache: bool = False,
        seed: int | None = None,
    ) -> list[dict[str, Any]]:
        """Continuations of all prompts in one batch, at most ``chunk`` tokens to a step; greedy, or sampled with ``seed``."""
        from vllm import SamplingParams

        scheduler = self._engine_core().scheduler
        default = scheduler.scheduler_config.max_num_batched_tokens
        scheduler.max_num_scheduled_tokens = chunk or default
        if not keep_cache:
            assert self.llm.reset_prefix_cache(), "the prefix cache is emptied between runs"
        counts = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
        chosen = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
        params = [SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0, **chosen) for n in counts]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        scheduler.max_num_scheduled_tokens = default
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    step[token].logprob
                    for step, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
                ],
                "cached": output.num_cached_tokens,
            }
            for output in outputs
        ]

    def metric(self, name: str) -> float:
        """Value of one of vLLM's own counters."""
        return float(sum(metric.value for metric in self.llm.get_metrics() if metric.name == name))

    def cache_layers(self) -> dict[str, int]:
        """Layers that have a KV cache, and the bytes of one block in each."""
        worker = self._engine_core().model_executor.driver_worker.worker
        return {name: int(spec.page_size_bytes) for name, spec in worker.get_kv_cache_spec().items()}

    def cache_tokens(self) -> int:
        """Tokens of the KV cache, as vLLM has written them to its log."""
        return int(self._engine_core().vllm_config.cache_config.kv_cache_size_tokens)

    def memory(self, prompt: list[int], max_tokens: int) -> dict[str, int]:
        """Bytes of activations: what vLLM's profiling run has left free for them, and the most that a prompt takes.

        Both beside what stays allocated: weights, workspace and KV cache.
        """
        import torch

        worker = self._engine_core().model_executor.driver_worker.worker
        stays = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        self.generate([prompt], max_tokens)
        return {"reserved": worker.peak_activation_memory, "used": torch.accelerator.max_memory_allocated() - stays}

    def profile(self, prompts: list[list[int]], max_tokens: list[int], chunk: int) -> list[int]:
        """Attention launches of each engine step (one layer's share), read from a profile of torch."""
        from torch.profiler import ProfilerActivity, profile
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        self.llm.reset_prefix_cache()
        self._engine_core().scheduler.max_num_scheduled_tokens = chunk
        for index, (ids, count) in enumerate(zip(prompts, max_tokens, strict=True)):
            params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
            engine.add_request(str(index), {"prompt_token_ids": ids}, params)
        layers = self._engine_core().vllm_config.model_config.hf_config.num_hidden_layers
        launches = []
        while engine.has_unfinished_requests():
            with profile(activities=[ProfilerActivity.CPU]) as run:
                engine.step()
            count = sum(event.name == "npu_parity::fused_infer_attention" for event in run.events())
            launches.append(count // layers)
        # Under async scheduling a step may only collect what an earlier one has launched.
        return [count for count in launches if count]


def main() -> None:
    """Answer until standard input ends. An exception of a command is an answer too."""
    host = Host()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(host, request["command"])(**request["arguments"])}
        except Exception as error:
            # vLLM wraps the cause of a failed start; the innermost message is the one that users must understand.
            answer = {"error": "\n".join(_messages(error))}
        # What an engine that failed has left is dropped now, not in the middle of the next one.
        if "error" in answer:
            gc.collect()
        _replies.write(json.dumps(answer) + "\n")
        _replies.flush()
    with contextlib.suppress(Exception):
        host.stop()


def _messages(error: BaseException | None) -> list[str]:
    found = []
    while error is not None:
        found.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return found


if __name__ == "__main__":
    main()
