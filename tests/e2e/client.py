"""The test process's side of engine_host.py, and transformers as the oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class HostError(Exception):
    """What the engine raised, innermost cause last."""


@dataclass(frozen=True)
class Completion:
    """One greedy continuation: token ids, their logprobs, and how many prompt tokens came from the prefix cache."""

    tokens: list[int]
    logprobs: list[float]
    cached: int = 0


class EngineHost:
    """One child process, one device, one engine at a time."""

    def __init__(self, device_name: str, log: Path) -> None:
        self.log = log
        self._current: tuple[Any, ...] | None = None
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "engine_host.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            # vLLM binds CPU ranks to NUMA nodes of their own, of which a test machine has one.
            env={"VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ, "VLLM_NPU_PARITY_DEVICE": device_name},
        )

    def _call(self, command: str, **arguments: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"command": command, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise HostError("the engine's process died:\n" + "\n".join(self.log.read_text().splitlines()[-30:]))
        answer = json.loads(line)
        if "error" in answer:
            self._current = None
            raise HostError(answer["error"])
        return answer["result"]

    def engine(self, model: Path, **options: Any) -> EngineHost:
        """Start an engine with these arguments of vllm.LLM, unless it is the one that runs."""
        wanted = (str(model), json.dumps(options, sort_keys=True))
        if wanted != self._current:
            self._call("start", model=str(model), options=options)
            self._current = wanted
        return self

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | Sequence[int],
        chunk: int | None = None,
        keep_cache: bool = False,
        seed: int | None = None,
    ) -> list[Completion]:
        """Continuations of one batch, at most ``chunk`` tokens to a step; greedy, or sampled with ``seed``."""
        answers = self._call(
            "generate", prompts=list(prompts), max_tokens=max_tokens, chunk=chunk, keep_cache=keep_cache, seed=seed
        )
        return [Completion(**answer) for answer in answers]

    def metric(self, name: str) -> float:
        """Value of one of vLLM's own counters."""
        return float(self._call("metric", name=name))

    def cache_layers(self) -> dict[str, int]:
        """Layers that have a KV cache, and the bytes of one block in each."""
        return dict(self._call("cache_layers"))

    def cache_tokens(self) -> int:
        """What vLLM's line "KV cache size" says; vLLM prints a line once, and not again for another engine of this process."""
        return int(self._call("cache_tokens"))

    def memory(self, prompt: Sequence[int], max_tokens: int) -> dict[str, int]:
        """Bytes of activations that vLLM has reserved, and the most that this prompt used."""
        return dict(self._call("memory", prompt=list(prompt), max_tokens=max_tokens))

    def profile(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], chunk: int) -> list[int]:
        """FIA launches of each step, for one layer."""
        return list(self._call("profile", prompts=list(prompts), max_tokens=list(max_tokens), chunk=chunk))

    def close(self) -> None:
        """End the child and wait for it."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=60)


class Oracle:
    """transformers on the CPU in fp32."""

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    @contextmanager
    def hooked(self, name: str, hook: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Within, ``hook(module, inputs, output)`` replaces what the modules of this name return."""
        modules = [module for path, module in self._model.named_modules() if path.rpartition(".")[2] == name]
        handles = [module.register_forward_hook(hook) for module in modules]
        assert handles
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Token ids that greedy decoding appends to ``prompt``."""
        ids = torch.tensor([list(prompt)])
        # The mask is explicit: generate() would take every 0 in a random prompt for padding.
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [int(token) for token in out[0, len(prompt) :]]

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Logprob of each of ``tokens`` after ``prompt`` and the tokens before it."""
        logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0].float()
        rows = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """``length`` token ids of the byte range."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return [int(token) for token in torch.randint(0, 256, (length,), generator=generator)]
