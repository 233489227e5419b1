"""Prefills a needle model (tests/models/needle.py) of full DeepSeek V3.2 attention widths, chunk by chunk, and times each.

Usage, from the repository root: python -m benchmarks.needle --out result.json [--device cuda] [--lengths 131072,1048576]
The result is written after every chunk, so that a run that is cut short keeps what it has measured. The exit status is 1 if a
needle is not found.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

FULL = {"heads": 128, "index_heads": 64, "topk": 2048}
TINY = {"heads": 2, "index_heads": 4, "topk": 64}


def needle_module() -> ModuleType:
    """tests/models/needle.py, which is in no package."""
    path = Path(__file__).parents[1] / "tests" / "models" / "needle.py"
    spec = importlib.util.spec_from_file_location("parity_needle", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["parity_needle"] = module
    spec.loader.exec_module(module)
    return module


def prefill(llm: Any, tokens: list[int], record: dict[str, Any], save: Any) -> tuple[int, float]:
    """The greedy token after ``tokens`` and its logprob; seconds of every chunk go into ``record``."""
    import torch
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0)
    engine.add_request(f"needle-{len(tokens)}", {"prompt_token_ids": tokens}, params)
    begin = time.perf_counter()
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs += engine.step()
        torch.accelerator.synchronize() if torch.accelerator.is_available() else None
        record["seconds"].append(round(time.perf_counter() - start, 5))
        record["ttft"] = round(time.perf_counter() - begin, 3)
        record["peak_bytes"] = torch.accelerator.max_memory_allocated() if torch.accelerator.is_available() else None
        save()
    done = outputs[-1].outputs[0]
    return done.token_ids[0], done.logprobs[0][done.token_ids[0]].logprob


def main() -> int:
    """Run every length in one engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", default="32768,131072,1048575", help="prompt tokens; default: %(default)s")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="few heads and a top-k of 64")
    parser.add_argument("--c8", action="store_true", help="packed rows and int8 indexer keys")
    options = parser.parse_args()
    os.environ["VLLM_NPU_PARITY_DEVICE"] = options.device
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    needle = needle_module()
    lengths = [int(length) for length in options.lengths.split(",")]
    longest = max(lengths) + 1
    sizes = TINY if options.tiny else FULL
    result: dict[str, Any] = {"device": options.device, "chunk": options.chunk, **sizes, "c8": options.c8, "runs": []}
    begin = time.perf_counter()

    def save() -> None:
        options.out.write_text(json.dumps(result) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        model = needle.write_needle(Path(folder), "v32", max_positions=longest, **sizes)
        from vllm import LLM

        settings = {"sparse_kv_c8": True, "indexer_c8": True} if options.c8 else {}
        llm = LLM(
            str(model), dtype=options.dtype, max_model_len=longest, max_num_batched_tokens=options.chunk, max_num_seqs=2,
            enable_prefix_caching=False, additional_config=settings,
            kv_cache_memory_bytes=longest * (2048 if options.device == "cuda" else 4096) * 2,
        )  # fmt: skip
        result["start_seconds"] = round(time.perf_counter() - begin, 1)
        missed = 0
        for length in lengths:
            record: dict[str, Any] = {"length": length, "seconds": []}
            result["runs"].append(record)
            tokens, answer = needle.needle_prompt(length, 0.1, seed=5)
            token, logprob = prefill(llm, tokens, record, save)
            record |= {"found": token == answer, "logprob": logprob}
            missed += token != answer
            save()
            print({key: value for key, value in record.items() if key != "seconds"}, flush=True)
        llm.llm_engine.engine_core.shutdown()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
