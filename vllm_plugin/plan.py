"""The planner's command: will a prompt fit, on how many cards, how long will it take, and which ``vllm serve`` does it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from planner import report
from planner.figure import PlanError
from planner.parallel import Parallel
from planner.plan import KV_DTYPES, OFFLOAD_TIERS, WEIGHT_DTYPES, PlanRequest, make_plan

# As vllm_plugin.demo has it, which would load more than this command needs.


def _positive(text: str) -> int:
    """A number of at least 1; 128K and 1M count in powers of two, as models' lengths do."""
    scale = {"K": 1024, "M": 1024**2}.get(text[-1:].upper(), 1)
    digits = text[:-1] if scale > 1 else text
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"a number of at least 1 is required, got {text!r}")
    return int(digits) * scale


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0 is required, got {text!r}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("model", help="a model's config.json, or its folder")
    add("--hardware", default="910C", help="a name of planner/hardware.toml; default: %(default)s")
    add("--prompt", type=_positive, default=131072, metavar="TOKENS", help="also 128K or 1M; default: %(default)s")
    add("--output", type=_positive, default=1024, metavar="TOKENS", help="default: %(default)s")
    add("--concurrency", type=_positive, default=1, metavar="REQUESTS", help="requests at once; default: %(default)s")
    for flag, meaning in (
        ("--tp", "tensor parallel; default: the fewest cards of a node on which the prompt fits"),
        ("--pp", "pipeline parallel"),
        ("--dp", "data parallel"),
        ("--dcp", "ranks of TP among which the KV cache is divided for decode"),
        ("--pcp", "ranks among which a prompt is divided for prefill"),
        ("--dsa-cp", "ranks of TP among which DSA's tokens are divided"),
    ):
        add(flag, type=_positive, default=None if flag == "--tp" else 1, metavar="N", help=meaning)
    add("--ep", action="store_true", help="whole experts to a rank instead of parts of each")
    add("--kv-dtype", choices=KV_DTYPES, default="bf16", help="default: %(default)s")
    add("--weight-dtype", choices=WEIGHT_DTYPES, default="bf16", help="default: %(default)s")
    add("--chunk", type=_positive, default=8192, metavar="TOKENS", help="of chunked prefill; default: %(default)s")
    add("--disaggregate", action="store_true", help="prefill and decode on instances of their own")
    add("--link-gbps", type=_seconds, metavar="Gb/s", help="between them; default: the hardware's scale-out link")
    add("--offload", choices=OFFLOAD_TIERS, help="keep KV that is not in use there")
    add("--ttft", type=_seconds, metavar="SECONDS", help="find the fewest cards that reach it")
    add("--tpot", type=_seconds, metavar="SECONDS", help="likewise, a token of output")
    add("--json", nargs="?", const="-", metavar="FILE", help="write the plan as JSON; without FILE to standard output")
    add("--html", metavar="FILE", help="write one page with plots")
    add("--explain", metavar="NAME", help="formula, inputs and source of a figure; all: of every one")


def run(args: argparse.Namespace) -> int:
    """Print or write the plan; 2 if there is none, with the reason on one line."""
    try:
        plan = make_plan(_request(args))
        explained = report.explain(plan, args.explain) if args.explain else None
    except PlanError as error:
        print(f"vllm-npu-parity plan: {error}", file=sys.stderr)
        return 2
    if args.html:
        from planner.html import page

        _write(args.html, page(plan))
    if args.json:
        _write(args.json, report.as_json(plan) + "\n")
    if explained:
        print(explained)
    elif args.json != "-":
        from rich.console import Console

        report.show(plan, Console())
    return 0


def _request(args: argparse.Namespace) -> PlanRequest:
    tp = args.tp or 1
    parallel = Parallel(tp=tp, pp=args.pp, dp=args.dp, dcp=args.dcp, pcp=args.pcp, dsa_cp=args.dsa_cp, ep=args.ep)
    return PlanRequest(
        model=args.model,
        hardware=args.hardware,
        prompt=args.prompt,
        output=args.output,
        concurrency=args.concurrency,
        parallel=parallel,
        kv_dtype=args.kv_dtype,
        weight_dtype=args.weight_dtype,
        chunk=args.chunk,
        disaggregate=args.disaggregate,
        link_gbps=args.link_gbps,
        offload=args.offload,
        ttft=args.ttft,
        tpot=args.tpot,
    )


def _write(name: str, text: str) -> None:
    if name == "-":
        sys.stdout.write(text)
        return
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentError(None, f"{name} cannot be written: {error.strerror}") from None
