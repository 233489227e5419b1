"""The demo: the real ``vllm serve``, one long prompt among short chats, and the same answers at several chunk sizes.

Chunked prefill cuts a long prompt into chunks of at most --max-num-batched-tokens tokens, and each chunk shares its
batch with the tokens of all requests that decode. What a request is answered must not depend on where the cuts fall.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_plugin import selection
from vllm_plugin.server import ProcessError, VllmServer, progress_bar, work_folder

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SERVED_NAME = "demo"
START_TIMEOUT_S = 900.0
# The demo model's cache takes 2 KiB a token: room for 64 K tokens, and the rest of the memory is left alone.
DEMO_CACHE_BYTES = 128 << 20
CHATS = ("What is paged attention?", "Name three prime numbers.", "Why is the sky blue?", "Say hello in Dutch.")
# A chat gets one token to a chunk of the long prompt. This many outlast the 32 chunks of 512 tokens, and the time, many
# steps of decoding alone, that the long request takes to get there.
CHAT_TOKENS = 80
LONG_TOKENS = 16
PASSAGE = "The quick brown fox jumps over the lazy dog, and chunk by chunk the long prompt is read. "


@dataclass(frozen=True)
class Answer:
    """What one request got, and when.

    Attributes:
        name: the request.
        prompt_tokens: as counted by the server.
        tokens: token ids of the answer.
        text: their text.
        sent: when the request was sent; seconds of a monotonic clock.
        arrivals: when each token came, on the same clock.
    """

    name: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    sent: float
    arrivals: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def tokens_per_second(self) -> float:
        """Rate of the tokens after the first."""
        return (len(self.arrivals) - 1) / max(self.arrivals[-1] - self.arrivals[0], 1e-9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("--device", choices=selection.DEVICES, default="auto", help="default: %(default)s")
    parser.add_argument("--model", help="a model that vLLM can serve; default: a small seeded one, written by the demo")
    parser.add_argument("--prompt-tokens", type=positive, default=16000, help="of the long prompt; default: %(default)s")
    parser.add_argument(
        "--chunks", type=_sizes, default=(512, 2048, 8192), help="of --max-num-batched-tokens; default: 512,2048,8192"
    )
    parser.add_argument("--dtype", help="default: float32, and bfloat16 on NPUs, whose attention has no float32")


def positive(text: str) -> int:
    """A number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of at least 1 is required, got {text!r}")
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(dict.fromkeys(positive(part) for part in text.split(",")))
    if len(sizes) < 2:
        raise argparse.ArgumentTypeError(f"at least two different sizes are compared, got {text!r}")
    return sizes


def run(args: argparse.Namespace) -> int:
    """Serve at each chunk size, print the answers, and return 0 if they are the same."""
    console = Console()
    begin = time.monotonic()
    device = selection.choose(args.device, selection.Machine.read())
    assert device is not None, "a device that is asked for is served or refused"
    prepare_imports()
    if device == "virtual-npu":
        selection.enable_virtual_npu()
    answers: dict[int, list[Answer]] = {}
    backends: set[str] = set()
    with work_folder() as folder:
        model = args.model or write_model(folder / "model", console)
        prompt = _long_prompt(model, args.prompt_tokens)
        flags = [
            *("--served-model-name", SERVED_NAME, "--dtype", args.dtype or default_dtype([device])),
            *("--max-model-len", str(args.prompt_tokens + 512), "--no-enable-prefix-caching"),
            *(f"--{name.replace('_', '-')}={value}" for name, value in memory_options(args.model, device).items()),
        ]
        for chunk in args.chunks:
            log = folder / f"serve-{chunk}.log"
            server = VllmServer(model, device, [*flags, "--max-num-batched-tokens", str(chunk)], log)
            answers[chunk] = _serve(server, f"chunks of {chunk}", prompt, console)
            backends.update(server.attention_backends())
    same = _compare(answers, console)
    named = ", ".join(sorted(backends)) or "none named"
    console.print(f"Attention backend in the server's log: [bold]{named}[/], device {device}.")
    console.print(f"The whole demo took {time.monotonic() - begin:.0f} s.")
    return 0 if same else 1


def prepare_imports() -> None:
    """Settings that torch and transformers read when they are imported, unless the user has made them."""
    # The plugin loads torch_npu where an NPU is asked for; by itself, torch would load it and fail without CANN.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    # transformers shows a progress bar of its own for a file that is written in a tenth of a second.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def default_dtype(devices: Sequence[str]) -> str:
    """float32, in which answers can be compared exactly; bfloat16 if there is an NPU, whose attention has no float32."""
    return "bfloat16" if {"npu", "virtual-npu"} & set(devices) else "float32"


def memory_options(model: str | None, device: str) -> dict[str, float]:
    """vLLM's arguments for memory: little for the demo's model, and on a CPU not nearly all that the host has."""
    if model is None:
        return {"kv_cache_memory_bytes": DEMO_CACHE_BYTES}
    return {"gpu_memory_utilization": 0.5} if device == "cpu" else {}


def write_model(folder: Path, console: Console) -> str:
    """Write the small seeded model and return its path."""
    with console.status("writing the model"):
        from vllm_plugin.demo_model import write_demo_checkpoint

        path = write_demo_checkpoint(folder)
    size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
    console.print(f"Model: a Llama with random weights and one token to a byte, {size:.1f} MB")
    return str(path)


def prompts_of(model: str, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of English prompts of exactly these many tokens, no two of which are alike.

    Raises:
        argparse.ArgumentError: if the model has no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentError(None, f"no tokenizer of --model {model}: {str(error).splitlines()[0]}") from None
    once = len(tokenizer.encode(PASSAGE, add_special_tokens=False))
    prompts = []
    for first, length in enumerate(lengths):
        # Numbers make each sentence another one, so that a chunk at a wrong place is seen.
        text = "".join(f"{first + number}. {PASSAGE}" for number in range(-(-length // once)))
        prompts.append(list(tokenizer.encode(text, add_special_tokens=False)[:length]))
    return prompts


def _long_prompt(model: str, length: int) -> str:
    """Text of at least ``length`` tokens. As token ids it would take a second to get through JSON and its validation."""
    from transformers import AutoTokenizer

    [ids] = prompts_of(model, [length])
    return str(AutoTokenizer.from_pretrained(model).decode(ids))


def _serve(server: VllmServer, title: str, prompt: str, console: Console) -> list[Answer]:
    """Answers of one server's life, with its table printed."""
    with server:
        seconds = server.wait(f"vllm serve, {title}", server.healthy, console, START_TIMEOUT_S)
        console.print(f"\n[bold]vllm serve, {title}[/]: ready after {seconds:.0f} s")
        try:
            answers = _ask(server.url, prompt, console)
        except Exception as error:
            from openai import OpenAIError

            # A task group raises groups; the first of its errors says enough, the server's log the rest.
            first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            if not isinstance(first, OpenAIError):
                raise
            raise server.failure(f"{title}: the server refused or dropped a request: {first}") from None
    console.print(_table(answers))
    long = answers[0]
    during = sum(long.sent < moment < long.arrivals[0] for chat in answers[1:] for moment in chat.arrivals)
    console.print(f"Until the long prompt's first token, the chats received {during} tokens.")
    return answers


def _ask(url: str, prompt: str, console: Console) -> list[Answer]:
    """Send everything through the official client: the long prompt as soon as every chat has its first token."""
    counts = (BarColumn(20), MofNCompleteColumn(), TextColumn("tokens received"), TimeElapsedColumn())
    with progress_bar(*counts, console=console) as progress:
        task = progress.add_task("", total=LONG_TOKENS + CHAT_TOKENS * len(CHATS))
        return asyncio.run(_requests(url, prompt, lambda: progress.advance(task)))


async def _requests(url: str, prompt: str, on_token: Callable[[], None]) -> list[Answer]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0) as client:
        started = [asyncio.Event() for _ in CHATS]
        chats = [
            _answer(f"chat {number}", _chat(client, text), on_token, event)
            for number, (text, event) in enumerate(zip(CHATS, started, strict=True), start=1)
        ]

        async def long() -> Answer:
            # Otherwise vLLM would prefill the long prompt before it looks at the chats, and nothing would mix.
            await asyncio.gather(*(event.wait() for event in started))
            return await _answer("long prompt", _completion(client, prompt), on_token, asyncio.Event())

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(request) for request in (long(), *chats)]
        return [task.result() for task in tasks]


async def _chat(client: AsyncOpenAI, text: str) -> AsyncIterator[Any]:
    stream = await client.chat.completions.create(
        model=SERVED_NAME,
        messages=[{"role": "user", "content": text}],
        max_tokens=CHAT_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for part in stream:
        yield part


async def _completion(client: AsyncOpenAI, prompt: str) -> AsyncIterator[Any]:
    stream = await client.completions.create(
        model=SERVED_NAME,
        prompt=prompt,
        max_tokens=LONG_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for part in stream:
        yield part


async def _answer(name: str, stream: AsyncIterator[Any], on_token: Callable[[], None], started: asyncio.Event) -> Answer:
    """Read one stream to its end; ``started`` is set at its first token."""
    sent = time.monotonic()
    tokens: list[int] = []
    arrivals: list[float] = []
    text, prompt_tokens = "", 0
    async for part in stream:
        prompt_tokens = part.usage.prompt_tokens if part.usage else prompt_tokens
        for choice in part.choices:
            # vLLM's addition to the protocol; the client keeps fields that it does not know.
            new = getattr(choice, "token_ids", None) or []
            tokens += new
            arrivals += [time.monotonic()] * len(new)
            text += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
            for _ in new:
                on_token()
                started.set()
    if not tokens:
        raise ProcessError(f"{name}: the server sent no tokens. Check that its vLLM is 0.32, which returns token ids.")
    return Answer(name, prompt_tokens, tuple(tokens), text, sent, tuple(arrivals))


def _table(answers: Sequence[Answer]) -> Table:
    table = Table()
    for heading in ("request", "prompt tokens", "TTFT", "tokens/s", "text"):
        table.add_column(heading, justify="left" if heading in ("request", "text") else "right", no_wrap=True)
    for answer in answers:
        # The model is random: its text may hold anything, so only an escaped beginning is shown.
        text = escape(repr(answer.text)[:24])
        rate = f"{answer.tokens_per_second:.1f}"
        table.add_row(answer.name, f"{answer.prompt_tokens:,}", f"{answer.ttft:.2f} s", rate, text)
    return table


def _compare(answers: dict[int, list[Answer]], console: Console) -> bool:
    """Say whether every chunk size gave the same tokens, and where they part if not."""
    first, *others = answers
    differences = [
        f"{mine.name}: chunks of {other} part from chunks of {first} at token {_common(mine.tokens, its.tokens) + 1}"
        for other in others
        for mine, its in zip(answers[first], answers[other], strict=True)
        if mine.tokens != its.tokens
    ]
    sizes = ", ".join(str(size) for size in answers)
    if differences:
        console.print(f"\n[bold red]The answers differ[/] between chunk sizes {sizes}:", *differences, sep="\n  ")
    else:
        total = sum(len(answer.tokens) for answer in answers[first])
        console.print(f"\n[bold green]The answers are the same[/] at chunk sizes {sizes}: {total} tokens each.")
    return not differences


def _common(mine: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = zip(mine, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(other)))
