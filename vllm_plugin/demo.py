"""The demo: the real ``vllm serve``, one long prompt among short chats, and the same answers at several chunk sizes.

Chunked prefill cuts a long prompt into chunks of at most --max-num-batched-tokens tokens, and each chunk shares its
batch with the tokens of all requests that decode. What a request is answered must not depend on where the cuts fall.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import tempfile
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
from vllm_plugin.server import ProcessError, VllmServer, progress_bar

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SERVED_NAME = "demo"
START_TIMEOUT_S = 900.0
# The demo model's cache takes 2 KiB a token: room for 64 K tokens, and the rest of the memory is left alone.
DEMO_CACHE_BYTES = 128 << 20
CHATS = ("What is paged attention?", "Name three prime numbers.", "Why is the sky blue?", "Say hello in Dutch.")
# A chat gets one token to a chunk of the long prompt; this many outlast 16,000 tokens in chunks of 512.
CHAT_TOKENS = 40
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
    parser.add_argument("--prompt-tokens", type=int, default=16000, help="of the long prompt; default: %(default)s")
    parser.add_argument(
        "--chunks", type=_sizes, default=(512, 2048, 8192), help="of --max-num-batched-tokens; default: 512,2048,8192"
    )
    parser.add_argument("--dtype", help="default: float32, and bfloat16 on NPUs, whose attention has no float32")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"sizes of at least 1 with commas between them are required, got {text!r}")
    return sizes


def run(args: argparse.Namespace) -> int:
    """Serve at each chunk size, print the answers, and return 0 if they are the same."""
    console = Console()
    begin = time.monotonic()
    device = selection.choose(args.device, selection.Machine.read())
    assert device is not None, "a device that is asked for is served or refused"
    if device == "virtual-npu":
        selection.enable_virtual_npu()
    folder = Path(tempfile.mkdtemp(prefix="vllm-npu-parity-demo-"))
    model = args.model or write_model(folder / "model", console)
    [prompt] = prompts_of(model, [args.prompt_tokens])
    flags = [
        *("--served-model-name", SERVED_NAME, "--dtype", args.dtype or _dtype(device)),
        *("--max-model-len", str(args.prompt_tokens + 512), "--no-enable-prefix-caching"),
        *(() if args.model else ("--kv-cache-memory-bytes", str(DEMO_CACHE_BYTES))),
    ]
    answers: dict[int, list[Answer]] = {}
    backends: set[str] = set()
    for chunk in args.chunks:
        log = folder / f"serve-{chunk}.log"
        server = VllmServer(model, device, [*flags, "--max-num-batched-tokens", str(chunk)], log)
        answers[chunk] = _serve(server, f"chunks of {chunk}", prompt, console)
        backends.update(server.attention_backends())
    same = _compare(answers, console)
    named = ", ".join(sorted(backends)) or "none named"
    console.print(f"Attention backend in the server's log: [bold]{named}[/], device {device}.")
    console.print(f"The whole demo took {time.monotonic() - begin:.0f} s.")
    shutil.rmtree(folder)
    return 0 if same else 1


def _dtype(device: str) -> str:
    # float32 leaves no room for ties, so the comparison can be exact.
    return "bfloat16" if device in ("npu", "virtual-npu") else "float32"


def write_model(folder: Path, console: Console) -> str:
    """Write the small seeded model and return its path."""
    # The plugin loads torch_npu where an NPU is asked for; by itself, torch would load it and fail without CANN.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    # transformers shows a progress bar of its own for a file that is written in a tenth of a second.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with console.status("writing the model"):
        from vllm_plugin.demo_model import write_demo_checkpoint

        path = write_demo_checkpoint(folder)
    size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
    console.print(f"Model: a Llama with random weights and one token to a byte, {size:.1f} MB")
    return str(path)


def prompts_of(model: str, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of English prompts of exactly these many tokens, no two of which are alike."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    once = len(tokenizer.encode(PASSAGE, add_special_tokens=False))
    prompts = []
    for first, length in enumerate(lengths):
        # Numbers make each sentence another one, so that a chunk at a wrong place is seen.
        text = "".join(f"{first + number}. {PASSAGE}" for number in range(-(-length // once)))
        prompts.append(list(tokenizer.encode(text, add_special_tokens=False)[:length]))
    return prompts


def _serve(server: VllmServer, title: str, prompt: list[int], console: Console) -> list[Answer]:
    """Answers of one server's life, with its table printed."""
    with server:
        seconds = server.wait(f"vllm serve, {title}", server.healthy, console, START_TIMEOUT_S)
        console.print(f"\n[bold]vllm serve, {title}[/]: ready after {seconds:.0f} s")
        try:
            answers = _ask(server.url, prompt, console)
        except Exception as error:
            from openai import OpenAIError

            if not isinstance(error, OpenAIError):
                raise
            raise server.failure(f"{title}: the server refused or dropped a request: {error}") from None
    console.print(_table(answers))
    long = answers[0]
    during = sum(long.sent < moment < long.arrivals[0] for chat in answers[1:] for moment in chat.arrivals)
    console.print(f"While the long prompt was prefilled, the chats went on decoding: {during} tokens.")
    return answers


def _ask(url: str, prompt: list[int], console: Console) -> list[Answer]:
    """Send everything through the official client: the long prompt as soon as every chat has its first token."""
    counts = (BarColumn(20), MofNCompleteColumn(), TextColumn("tokens received"), TimeElapsedColumn())
    with progress_bar(*counts, console=console) as progress:
        task = progress.add_task("", total=LONG_TOKENS + CHAT_TOKENS * len(CHATS))
        return asyncio.run(_requests(url, prompt, lambda: progress.advance(task)))


async def _requests(url: str, prompt: list[int], on_token: Callable[[], None]) -> list[Answer]:
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


async def _completion(client: AsyncOpenAI, prompt: list[int]) -> AsyncIterator[Any]:
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
