"""The planner's command: will a prompt fit, on how many cards, how long will it take, and which ``vllm serve`` does it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from planner import report
from planner.figure import PlanError
from planner.parallel import Parallel
from planner.plan import KV_DTYPES, OFFLOAD_TIERS, WEIGHT_DTYPES, PlanRequest, make_plan


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
        ("--tp", "tensor parallel; default: the fewest cards on which the requests fit, with DCP where that helps"),
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
    add("--efficiency", default="best", metavar="PROFILE", help="shares of peak that ops reach: best published, or plugin")
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
        print(f"vllm-npu-parity plan: {' '.join(str(error).split())}", file=sys.stderr)
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
    sizes = {name: getattr(args, name) for name in ("pp", "dp", "dcp", "pcp", "dsa_cp", "ep")}
    same = {field.name: getattr(args, field.name) for field in fields(PlanRequest) if hasattr(args, field.name)}
    return PlanRequest(**same, parallel=Parallel(tp=args.tp or 1, **sizes), fit=args.tp is None)


def _write(name: str, text: str) -> None:
    if name == "-":
        sys.stdout.write(text)
        return
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentError(None, f"{name} cannot be written: {error.strerror}") from None
