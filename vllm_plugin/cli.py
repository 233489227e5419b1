"""``python -m vllm_plugin demo | doctor | parity | plan``: each command is the module of its name, imported when called."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Mapping, Sequence

from vllm_plugin.selection import DeviceError
from vllm_plugin.server import ProcessError, interrupt

COMMANDS: Mapping[str, str] = {
    "demo": "serve a small model with the real vLLM and show that chunked prefill does not change its answers",
    "doctor": "check versions, devices and operators of this environment, with a remedy for each problem",
    "parity": "compare greedy tokens and logprobs between devices, and with transformers",
    "plan": "say whether a prompt fits, on how many cards and how long it takes, with the source of every number",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 all is well, 1 a problem or difference, 2 wrong usage."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m vllm_plugin", description="Tools of vllm-npu-parity. Each command has a --help of its own."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    command = parser.parse_args(argv[:1]).command
    # kill and a closing terminal end a command as Ctrl-C does, by an exception, so that its children are stopped.
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, interrupt)
    own = argparse.ArgumentParser(prog=f"{parser.prog} {command}", description=f"{COMMANDS[command].capitalize()}.")
    module = importlib.import_module(f"vllm_plugin.{command}")
    module.add_arguments(own)
    args = own.parse_args(argv[1:])
    try:
        return int(module.run(args))
    except argparse.ArgumentError as error:
        own.error(str(error))
    except (DeviceError, ProcessError) as error:
        print(f"vllm-npu-parity: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
