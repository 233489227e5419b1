"""The plan as a whole: every figure sourced and unique, command lines that vLLM knows, and errors of one line."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner import command, report
from planner.figure import PlanError
from planner.html import page
from planner.model import read_model
from planner.parallel import Parallel
from planner.plan import PlanRequest, make_plan

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
V32 = str(CONFIGS / "deepseek_v32.json")
LLAMA = str(CONFIGS / "llama3_70b.json")


def serve(config: str, parallel: Parallel, **changes: object) -> str:
    given = {"hardware": "910C", "max_len": 2048, "requests": 5, "chunk": 512, "kv_dtype": "bf16"} | changes
    hardware = given.pop("hardware")
    return command.serve(config, read_model(config), hardware, parallel, **given)


def test_command_names_what_differs_from_one_card():
    line = serve(LLAMA, Parallel(tp=4, dcp=2, dp=2))
    assert shlex.split(line.replace("\\\n", "")) == [
        "vllm", "serve", "llama3_70b", "--device", "npu", "--tensor-parallel-size", "4", "--data-parallel-size", "2",
        "--decode-context-parallel-size", "2", "--max-model-len", "2048", "--max-num-batched-tokens", "512",
        "--max-num-seqs", "3", "--block-size", "128",
    ]  # fmt: skip
    assert "parallel" not in serve(LLAMA, Parallel())
    assert "--device cuda" in serve(LLAMA, Parallel(), hardware="H200")


def test_command_of_a_checkpoint_is_its_folder(tmp_path):
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text(Path(LLAMA).read_text())
    for path in (folder, folder / "config.json"):
        assert shlex.split(serve(str(path), Parallel()).replace("\\\n", ""))[2] == str(folder)


def test_command_of_other_caches_tiers_and_roles():
    c8 = serve(V32, Parallel(tp=8, pp=2, pcp=2, ep=True), kv_dtype="c8")
    assert """--additional-config '{"sparse_kv_c8": true, "indexer_c8": true}'""" in c8
    assert {"--pipeline-parallel-size 2", "--prefill-context-parallel-size 2", "--enable-expert-parallel"} <= set(
        c8.split(" \\\n  ")
    )
    assert "additional-config" not in serve(LLAMA, Parallel(), kv_dtype="c8")
    assert "--kv-cache-dtype fp8" in serve(LLAMA, Parallel(), kv_dtype="fp8")
    assert "--kv-offloading-size 3" in serve(LLAMA, Parallel(), offload=("host", 2.1 * 2**30))
    for tier, connector in command.STORES.items():
        assert connector in serve(LLAMA, Parallel(), offload=(tier, 1e9))
    prefill, decode = re.split(r"\n(?=vllm serve)", serve(LLAMA, Parallel(), disaggregate=True))
    assert '{"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}' in prefill
    assert "kv_consumer" in decode


def test_command_uses_flags_and_connectors_that_vllm_has():
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed: its flags are read from its source")
    root = Path(spec.submodule_search_locations[0])
    parser = (root / "engine" / "arg_utils.py").read_text()
    factory = (root / "distributed" / "kv_transfer" / "kv_connector" / "factory.py").read_text()
    everything = Parallel(tp=4, pp=2, dp=2, dcp=2, pcp=2, ep=True)
    lines = [
        *(serve(V32, everything, kv_dtype=kv_dtype, disaggregate=True) for kv_dtype in ("c8", "fp8")),
        serve(V32, everything, offload=("host", 1e9)),
    ]
    for flag in set(re.findall(r"--[a-z-]+", " ".join(lines))) - {"--device"}:  # the plugin's own
        assert f'"{flag}"' in parser, flag
    for connector in (*command.TRANSFER.values(), *command.STORES.values()):
        assert f'"{connector}"' in factory, connector


def test_obstacles_are_told():
    v32 = read_model(V32)
    usual = {"max_len": 2048, "kv_dtype": "bf16", "disaggregate": False}
    assert not list(command.obstacles(v32, Parallel(tp=8, dcp=8), **usual))
    refused = Parallel(tp=2, dp=2, pcp=2, dsa_cp=2)
    told = " ".join(command.obstacles(v32, refused, max_len=10**6, kv_dtype="fp8", disaggregate=True))
    for part in ("163,840 positions", "a fp8 cache", "Prefill context", "DSA context", "Data parallelism", "connectors"):
        assert part in told
    assert not list(command.obstacles(v32, Parallel(), **usual | {"kv_dtype": "c8"}))
    assert "c8" in " ".join(command.obstacles(read_model(LLAMA), Parallel(), **usual | {"kv_dtype": "c8"}))
