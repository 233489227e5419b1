"""The ``vllm serve`` command line of a plan, and what stands in its way in this release."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from planner.model import ModelShape
from planner.parallel import Parallel

BLOCK_SIZE = 128  # tokens; the one size that prefill has on every device (docs/architecture.md)
GIB = 2**30
# vLLM's names of its connectors (vllm/distributed/kv_transfer/kv_connector/factory.py).
TRANSFER = {"npu": "MooncakeConnector", "cuda": "NixlConnector", "auto": "NixlConnector"}
STORES = {"remote": "MooncakeStoreConnector", "nvme": "LMCacheConnectorV1"}


def device_of(hardware: str) -> str:
    """The plugin's name of a device: Ascend's chips are called by their numbers. None of ours: "auto"."""
    return "npu" if hardware[:1].isdecimal() else "auto" if hardware.startswith("TPU") else "cuda"


def serve(
    config: str,
    model: ModelShape,
    hardware: str,
    parallel: Parallel,
    *,
    max_len: int,
    requests: int,
    chunk: int,
    kv_dtype: str,
    disaggregate: bool = False,
    offload: tuple[str, float] | None = None,
) -> str:
    """One command, or one each for prefill and decode.

    Args:
        config: path of the model's config.json or of its folder.
        model: what it holds.
        hardware: its name in hardware.toml.
        parallel: how the model is divided.
        max_len: tokens of the longest request, output included.
        requests: at once, over all data-parallel ranks.
        chunk: tokens of a step.
        kv_dtype: of the cache.
        disaggregate: whether prefill and decode run on instances of their own.
        offload: the tier and the bytes that it is to hold.
    """
    path = Path(config)
    # A config.json alone, under another name, is of no checkpoint: the command then shows the model's name.
    folder = path if path.is_dir() else path.parent if path.name == "config.json" else path.stem
    device = device_of(hardware)
    # Every data-parallel rank has a scheduler of its own.
    seats = -(-requests // parallel.dp)
    flags = [
        f"--device {device}",
        *_parallel_flags(parallel),
        f"--max-model-len {max_len}",
        f"--max-num-batched-tokens {chunk}",
        f"--max-num-seqs {seats}",
        f"--block-size {BLOCK_SIZE}",
        *_cache_flags(model, kv_dtype),
        *_offload_flags(offload),
    ]
    roles = ("kv_producer", "kv_consumer") if disaggregate else (None,)
    return "\n".join(
        " \\\n  ".join([f"vllm serve {shlex.quote(str(folder))}", *flags, *_transfer_flags(device, role)]) for role in roles
    )


def _parallel_flags(parallel: Parallel) -> Iterator[str]:
    for flag, size in (
        ("tensor-parallel-size", parallel.tp),
        ("pipeline-parallel-size", parallel.pp),
        ("data-parallel-size", parallel.dp),
        ("decode-context-parallel-size", parallel.dcp),
        ("prefill-context-parallel-size", parallel.pcp),
    ):
        if size > 1:
            yield f"--{flag} {size}"
    if parallel.ep:
        yield "--enable-expert-parallel"


def _cache_flags(model: ModelShape, kv_dtype: str) -> Iterator[str]:
    if kv_dtype == "fp8":
        yield "--kv-cache-dtype fp8"
    elif kv_dtype == "c8" and model.family == "dsa":
        yield _option("--additional-config", {"sparse_kv_c8": True, "indexer_c8": True})


def _offload_flags(offload: tuple[str, float] | None) -> Iterator[str]:
    if offload is None:
        return
    tier, size = offload
    if tier == "host":
        yield f"--kv-offloading-size {-(-size // GIB):.0f}"
    else:
        yield _option("--kv-transfer-config", {"kv_connector": STORES[tier], "kv_role": "kv_both"})


def _transfer_flags(device: str, role: str | None) -> Iterator[str]:
    if role:
        yield _option("--kv-transfer-config", {"kv_connector": TRANSFER[device], "kv_role": role})


def _option(flag: str, value: dict[str, object]) -> str:
    return f"{flag} {shlex.quote(json.dumps(value))}"


def obstacles(model: ModelShape, parallel: Parallel, *, max_len: int, kv_dtype: str, disaggregate: bool) -> Iterator[str]:
    """What vLLM or this release of the plugin would refuse, in one line each (docs/architecture.md)."""
    if 0 < model.max_len < max_len:
        yield (
            f"The config allows {model.max_len:,} positions and the request has {max_len:,}: vLLM refuses that length unless "
            "--hf-overrides extends the rope, and how well the model then answers is not a matter of memory or time."
        )
    if model.family == "v4":
        yield "DeepSeek V4 is not served in this release; the figures are those of its formulas."
    if kv_dtype == "fp8" or (kv_dtype == "c8" and model.family != "dsa"):
        yield f"The plugin's backends refuse a {kv_dtype} cache for this model; vLLM's own may take one."
    if parallel.pcp > 1:
        yield "Prefill context parallelism is refused in this release."
    if parallel.dsa_cp > 1:
        yield "DSA context parallelism has no flag in this release, so the command leaves it out."
    if parallel.dp > 1 and model.experts:
        yield "Data parallelism of a mixture of experts is refused in this release."
    if disaggregate and model.family in ("mla", "dsa"):
        yield "ASCEND_MLA and ASCEND_SFA refuse connectors that copy single pages, so the two instances cannot be joined yet."
