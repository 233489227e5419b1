"""Parity: the same prompts on several devices and in transformers, token by token. "Is my NPU right?"

Every column (a device, or transformers) runs in a process of its own. The first column is the base. What is compared:

1. Logprobs, teacher-forced. Each column scores the *base's* answer: prompt and answer are read in one forward pass, and
   the logprob that the column gives to each of the base's tokens must be within the tolerance of the base's own, at
   every position. This stays meaningful after a divergence, and holds the base's decode against the column's prefill.
2. Greedy tokens. In fp32 each column's own answer must equal the base's. In 16 bit rounding may turn a near tie around:
   tokens must be equal up to the first divergence, and there the base's best two tokens must be closer than the
   tolerance.

The tolerance is an absolute difference of natural logprobs, by default that of the dtype in TOLERANCES. transformers
always computes in fp32 on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from npu_ops import virtual_npu
from vllm_plugin import selection
from vllm_plugin.demo import default_dtype, memory_options, positive, prepare_imports, prompts_of, write_model
from vllm_plugin.server import ChildProcess, child_environment, work_folder

ORACLE = "transformers"
# fp32: sums in another order, with room for deep models. 16 bit: each logit, of size 10, is rounded by 2^-9 (bf16) or 2^-12
# (fp16) of itself, and hidden states in every layer; twice the difference seen on the demo model between cpu and fp32.
TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "float16": 6e-2, "bfloat16": 6e-1}
# Prompt lengths in tokens, in turn: one, around a block edge (128), several blocks, and more than one chunk (512).
LENGTHS = (1, 17, 127, 128, 129, 300, 700, 1100)
CHUNK = 512
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Answer:
    """What one column says to one prompt.

    Attributes:
        tokens: its greedy continuation.
        logprobs: of these tokens.
        gaps: at each position, logprob of the best token less that of the second.
        scores: logprobs that this column gives to the base's tokens; empty in the base.
    """

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]
    scores: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """One answer held against the base's.

    Attributes:
        equal: tokens before the first divergence.
        worst: largest logprob difference over the base's tokens.
        faults: one line for each breach of the rule.
    """

    equal: int
    worst: float
    faults: list[str]


def compare(base: Answer, other: Answer, dtype: str, tolerance: float) -> Comparison:
    """Apply the rule above to one prompt."""
    faults = []
    differences = [abs(a - b) for a, b in zip(base.logprobs, other.scores, strict=True)]
    worst = max(differences, default=0.0)
    # A NaN is not within any tolerance.
    bad = next((index for index, value in enumerate(differences) if not value <= tolerance), None)
    if bad is not None:
        faults.append(
            f"token {bad + 1}: logprob {other.scores[bad]:.6f}, base {base.logprobs[bad]:.6f}: "
            f"they differ by {differences[bad]:.1e}, more than {tolerance:g}"
        )
    pairs = zip(base.tokens, other.tokens, strict=True)
    equal = next((index for index, (a, b) in enumerate(pairs) if a != b), len(base.tokens))
    if equal < len(base.tokens):
        what = f"token {equal + 1} is {other.tokens[equal]}, base {base.tokens[equal]}"
        if dtype == "float32":
            faults.append(what)
        elif not base.gaps[equal] <= tolerance:
            faults.append(f"{what}: no near tie, the base's best two are {base.gaps[equal]:.1e} apart")
    return Comparison(equal, worst, faults)


@dataclass(frozen=True)
class Run:
    """Everything that was asked and answered; written by --json as it is. The first column is the base."""

    model: str
    dtype: str
    tolerance: float
    prompts: list[list[int]]
    columns: dict[str, list[Answer]]


def conclude(run: Run, file: Path | None, console: Console) -> int:
    """Print the table and every fault, write ``file`` if there is one, and return the exit status."""
    base, *others = run.columns
    table = Table(title=f"Parity with {base}, {run.dtype}, tolerance {run.tolerance:g}", title_justify="left")
    table.add_column("prompt tokens", justify="right")
    for name in others:
        table.add_column(f"{name}: equal tokens", justify="right")
        table.add_column("worst logprob difference", justify="right")
    faults = []
    for index, prompt in enumerate(run.prompts):
        row = [f"{len(prompt):,}"]
        for name in others:
            expected = run.columns[base][index]
            result = compare(expected, run.columns[name][index], run.dtype, run.tolerance)
            row += [f"{result.equal}/{len(expected.tokens)}", f"{result.worst:.1e}"]
            faults += [f"{name}, prompt {index + 1} ({len(prompt)} tokens): {fault}" for fault in result.faults]
        table.add_row(*row)
    console.print(table)
    for fault in faults:
        console.print(f"[bold red]differs[/] {fault}", highlight=False, soft_wrap=True)
    verdict = "[bold red]No parity.[/]" if faults else "[bold green]Parity.[/]"
    console.print(f"{verdict} {', '.join(others)} against {base}: {len(faults)} faults.")
    if file:
        file.write_text(json.dumps({"parity": not faults, "faults": faults, **asdict(run)}, indent=1))
        console.print(f"Written to {file}")
    return 1 if faults else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    known = ", ".join(name for name in selection.DEVICES if name != "auto")
    parser.add_argument("--devices", required=True, help=f"with commas, the base first: {known}")
    parser.add_argument("--model", help="default: a small seeded one")
    parser.add_argument("--oracle", choices=[ORACLE], help="a further column that is no device")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write tokens, logprobs and the result there")
    parser.add_argument("--prompts", type=positive, default=8, help="number of prompts; default: %(default)s")
    parser.add_argument("--max-tokens", type=positive, default=16, help="tokens of each answer; default: %(default)s")
    parser.add_argument("--dtype", choices=sorted(TOLERANCES), help="default: float32, with an NPU bfloat16")
    parser.add_argument("--tolerance", type=float, help=f"of a logprob; default by dtype: {dict(TOLERANCES)}")


def run(args: argparse.Namespace) -> int:
    """Run all columns, print and write the comparison, and return 0 if it is within the tolerance."""
    console = Console()
    if args.json is not None and not args.json.parent.is_dir():
        raise argparse.ArgumentError(None, f"--json: an existing folder is required, got {str(args.json.parent)!r}")
    devices = [_device(name) for name in args.devices.split(",")]
    names = [*devices, *([args.oracle] if args.oracle else [])]
    if len(set(names)) < len(names) or len(names) < 2:
        wanted = f"at least two different columns are compared: two --devices, or one and --oracle {ORACLE}"
        raise argparse.ArgumentError(None, wanted)
    prepare_imports()
    dtype = args.dtype or default_dtype(devices)
    tolerance = TOLERANCES[dtype] if args.tolerance is None else args.tolerance
    columns: dict[str, list[Answer]] = {}
    with work_folder() as folder:
        model = args.model or write_model(folder / "model", console)
        # Token ids, so that every column reads the same, whatever its tokenizer would add.
        prompts = prompts_of(model, [LENGTHS[index % len(LENGTHS)] for index in range(args.prompts)])
        for name in names:
            job = {
                "model": model,
                "prompts": prompts,
                "forced": [answer.tokens for answer in columns[names[0]]] if columns else [],
                "max_tokens": args.max_tokens,
                "dtype": dtype,
                "memory": memory_options(args.model, name),
            }
            columns[name] = _column(name, job, folder, console)
    return conclude(Run(args.model or "demo", dtype, tolerance, prompts, columns), args.json, console)


def _device(name: str) -> str:
    """The device, or the one line why it cannot be served."""
    if not name:
        raise argparse.ArgumentError(None, "--devices: names separated by commas are required, got an empty one")
    device = selection.choose(selection.requested([], {"VLLM_NPU_PARITY_DEVICE": name}), selection.Machine.read())
    assert device is not None, "a device that is asked for is served or refused"
    if device == "virtual-npu":
        selection.enable_virtual_npu()
    return device


def _column(name: str, job: Mapping[str, Any], folder: Path, console: Console) -> list[Answer]:
    """Run one column's worker and read its answers."""
    request, answers = folder / f"{name}-job.json", folder / f"{name}-answers.json"
    request.write_text(json.dumps({"column": name, **job}))
    command = [sys.executable, "-m", "vllm_plugin.parity", str(request), str(answers)]
    environment = child_environment("cpu" if name == ORACLE else name)
    with ChildProcess(command, environment, folder / f"{name}.log") as worker:
        seconds = worker.wait(name, lambda: worker.exit_code() == 0, console, TIMEOUT_S)
    console.print(f"{name}: {seconds:.0f} s")
    return [Answer(**answer) for answer in json.loads(answers.read_text())]


# The worker: one column, in a process of its own.


def answer_with_vllm(job: Mapping[str, Any]) -> list[Answer]:
    """Greedy answers by vllm.LLM on the device that the environment names, then scores of the forced answers."""
    from vllm import LLM, SamplingParams

    longest = max(len(prompt) for prompt in job["prompts"]) + job["max_tokens"] + 1
    llm = LLM(
        job["model"],
        dtype=job["dtype"],
        max_model_len=longest,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=len(job["prompts"]),
        **job["memory"],
        enable_prefix_caching=False,
        seed=0,
    )
    greedy = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, logprobs=2)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    answers = [_answer(output.outputs[0]) for output in llm.generate(prompts, greedy)]
    if not job["forced"]:
        return answers
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    whole = [{"prompt_token_ids": [*p, *tokens]} for p, tokens in zip(job["prompts"], job["forced"], strict=True)]
    scored = []
    for answer, forced, output in zip(answers, job["forced"], llm.generate(whole, score), strict=True):
        steps = output.prompt_logprobs[-len(forced) :]
        scores = [step[token].logprob for step, token in zip(steps, forced, strict=True)]
        scored.append(Answer(answer.tokens, answer.logprobs, answer.gaps, scores))
    return scored


def _answer(output: Any) -> Answer:
    logprobs, gaps = [], []
    for token, step in zip(output.token_ids, output.logprobs, strict=True):
        best, second, *_ = sorted((entry.logprob for entry in step.values()), reverse=True)
        logprobs.append(step[token].logprob)
        gaps.append(best - second)
    return Answer(list(output.token_ids), logprobs, gaps)


def answer_with_transformers(job: Mapping[str, Any]) -> list[Answer]:
    """Greedy answers by generate() in fp32 on the CPU, and scores of the forced answers by one forward pass each."""
    if virtual_npu.is_requested():  # another column's device: beside it, transformers loads only this way
        virtual_npu.enable()
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    # As with vLLM's ignore_eos: an end token is a token like any other.
    model.generation_config.eos_token_id = None

    def logprobs(prompt: list[int], tokens: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits.float(), dim=-1)

    def of(table: torch.Tensor, tokens: list[int]) -> list[float]:
        return [float(row[token]) for row, token in zip(table, tokens, strict=True)]

    answers = []
    with torch.inference_mode():
        for prompt, forced in zip(job["prompts"], job["forced"], strict=True):
            inputs = torch.tensor([prompt])
            options = {"do_sample": False, "max_new_tokens": job["max_tokens"], "pad_token_id": 0}
            output = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
            tokens = output[0, len(prompt) :].tolist()
            table = logprobs(prompt, tokens)
            best = table.topk(2).values
            gaps = (best[:, 0] - best[:, 1]).tolist()
            answers.append(Answer(tokens, of(table, tokens), gaps, of(logprobs(prompt, forced), forced)))
    return answers


def main(request: str, answers: str) -> None:
    """Entry point of a worker."""
    job = json.loads(Path(request).read_text())
    work = answer_with_transformers if job["column"] == ORACLE else answer_with_vllm
    Path(answers).write_text(json.dumps([asdict(answer) for answer in work(job)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
