"""The plan as a whole: every figure sourced and unique, command lines that vLLM knows, and errors of one line."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner import command, report, route_sections
from planner.figure import PlanError
from planner.html import page
from planner.model import read_model
from planner.parallel import Parallel
from planner.plan import PlanRequest, make_plan
from vllm_plugin import plan as cli_plan

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


def test_every_figure_of_every_plan_is_unique_and_has_formula_and_source():
    configs = ("deepseek_v32", "deepseek_v3", "deepseek_v4_pro", "llama3_70b", "qwen3_235b", "glm5")
    for config, hardware in zip(configs, ("910C", "H200") * 3, strict=True):
        request = PlanRequest(str(CONFIGS / f"{config}.json"), hardware, prompt=200_000, disaggregate=True)
        plan = make_plan(replace(request, offload="remote"))
        names = [figure.name for figure in plan.figures()]
        assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
        assert all(figure.formula and figure.source and figure.unit for figure in plan.figures())
        assert report.explain(plan, "all").count("  source  ") == len(names)


@pytest.fixture(scope="module")
def million():
    return make_plan(PlanRequest(V32, "H200", prompt=1_000_000, disaggregate=True, link_gbps=400))


def value(plan, name):
    [figure] = [figure for figure in plan.figures() if figure.name == name]
    return figure.value


def test_a_million_tokens_of_v32(million):
    assert value(million, "latent rows: row") == 1152
    assert value(million, "latent rows: one layer") == 1.152e9
    assert value(million, "latent rows: all layers") == 61 * 1.152e9
    assert value(million, "KV of a token") == 61 * (1152 + 256)
    tokens = {"blocks": 7813}
    assert million.request.parallel.dcp == 1 or value(million, "blocks") < tokens["blocks"]
    notes = " ".join(note for section in million.sections for note in section.notes)
    for part in ("forgotten the layers", "every rank keeps all", "35.1 GB", "twice that", "scores every pair"):
        assert part in notes


def test_blocks_of_one_card_without_dcp():
    plan = make_plan(PlanRequest(V32, prompt=1_000_000, parallel=Parallel(tp=8), fit=False))
    assert value(plan, "blocks") == 7813
    assert "DOES NOT FIT" in plan.sections[1].notes[0]


def test_a_layer_of_latents_over_400_gbps_takes_23_ms(tmp_path):
    mla = CONFIGS / "deepseek_v3.json"
    plan = make_plan(
        PlanRequest(str(mla), prompt=1_000_000, parallel=Parallel(tp=8), fit=False, disaggregate=True, link_gbps=400)
    )
    assert value(plan, "one layer's transfer") == pytest.approx(0.02304)
    assert value(plan, "transfer after prefill") == pytest.approx(61 * 0.02304)
    # The prefill takes far longer than the link: all but the last layer hides behind it.
    assert value(plan, "transfer by layer, exposed") == pytest.approx(0.02304)
    assert value(plan, "buffer of decode, whole") == pytest.approx(61 * value(plan, "buffer of decode, by layer"))


def test_assumed_shares_are_told(million):
    on_npu = make_plan(PlanRequest(V32, prompt=100_000))
    [note] = [note for note in on_npu.sections[2].notes if "assumed" in note]
    assert int(note.partition("%")[0]) > 90
    # On an H200 these kernels were measured.
    assert "rests on shares" not in " ".join(million.sections[2].notes)


def test_parts_of_a_prefill_add_up(million):
    parts = [value(million, f"prefill: {part}") for part in ("indexer", "attention", "projections", "moe", "communication")]
    assert sum(parts) == pytest.approx(value(million, "time to the first token"))
    assert value(million, "prompt tokens a second") == pytest.approx(1e6 / sum(parts))
    answer = value(million, "time to the first token") + 1024 * value(million, "decode step")
    assert value(million, "a whole answer") == pytest.approx(answer)


def test_the_fewest_cards_are_taken_on_which_the_requests_fit():
    plan = make_plan(PlanRequest(LLAMA, "H200", prompt=1_000_000))
    fewer = replace(plan.request.parallel, tp=plan.request.parallel.tp // 2)
    assert value(plan, "requests that fit") >= 1
    assert value(make_plan(replace(plan.request, parallel=fewer)), "requests that fit") == 0
    more = make_plan(PlanRequest(LLAMA, "H200", prompt=1_000_000, concurrency=2))
    assert more.request.parallel.tp > plan.request.parallel.tp
    assert value(more, "the last request's first token") == pytest.approx(2 * value(more, "time to the first token"))


def test_reload_and_recompute():
    request = PlanRequest(LLAMA, "H200", prompt=100_000, offload="host")
    plan = make_plan(request)
    total = value(plan, "KV of a card")
    assert value(plan, "reload from host") == pytest.approx(total / 64e9)
    assert value(plan, "recompute") == value(plan, "time to the first token")
    assert value(plan, "break-even bandwidth") == pytest.approx(total / value(plan, "recompute"))
    assert value(make_plan(replace(request, offload="nvme", link_gbps=56)), "reload from nvme") == pytest.approx(total / 7e9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware": "910Z"}, "Known are H100"),
        ({"model": "nowhere.json"}, "config.json of a model"),
        ({"parallel": Parallel(tp=7), "fit": False}, "Possible are 1, 2, 4"),
        ({"parallel": Parallel(tp=7)}, "Possible are 1, 2, 4"),
        ({"efficiency": "guess"}, "Known are amla, best, plugin"),
        ({"weight_dtype": "int3"}, "Known are bf16"),
        ({"kv_dtype": "c8"}, "Known are"),
        ({"offload": "nvme"}, "--link-gbps"),
        ({"offload": "host"}, "host_link is not known"),
        ({"weight_dtype": "fp8"}, "fp8_flops is not known"),
    ],
)
def test_what_is_not_known_is_an_error_that_lists_what_is(changes, message):
    request = PlanRequest(str(CONFIGS / "deepseek_v3.json"), "910C", parallel=Parallel(tp=16))
    with pytest.raises(PlanError, match=message):
        make_plan(replace(request, **changes))


def test_the_page_of_a_plan_has_its_plots(million):
    written = page(million)
    for title in ("Time to the first token against length", "Memory of one card against length", "A chunk against its context"):
        assert f"<h2>{title}</h2>" in written


def run(*arguments):
    parser = argparse.ArgumentParser()
    cli_plan.add_arguments(parser)
    return cli_plan.run(parser.parse_args(arguments))


def test_command_line(tmp_path, capsys):
    files = tmp_path / "plan.json", tmp_path / "plan.html"
    assert run(LLAMA, "--hardware", "H200", "--prompt", "128K", "--json", str(files[0]), "--html", str(files[1])) == 0
    assert "vllm serve llama3_70b" in capsys.readouterr().out
    assert json.loads(files[0].read_text())["request"]["prompt"] == 131072
    assert files[1].read_text().startswith("<!doctype html>")
    assert run(LLAMA, "--explain", "decode step") == 0
    assert capsys.readouterr().out.startswith("decode step: ")
    assert run(LLAMA, "--json") == 0
    assert json.loads(capsys.readouterr().out)["title"].startswith("llama3_70b on ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LLAMA, "--hardware", "tpu9"), "Known are H100"),
        ((V32, "--tp", "7"), "Possible are"),
        ((LLAMA, "--explain", "nothing like it"), "Known: all,"),
    ],
)
def test_what_is_not_known_is_status_2_and_one_line(arguments, message, capsys):
    assert run(*arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--kv-dtype", "int2"), "invalid choice"), (("--prompt", "0"), "at least 1"), (("--ttft", "-1"), "above 0")],
)
def test_wrong_usage(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(LLAMA, *arguments)
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written():
    with pytest.raises(argparse.ArgumentError, match="cannot be written"):
        run(LLAMA, "--html", "/nowhere/at/all.html")


def test_the_command_is_one_of_the_tools():
    call = [sys.executable, "-m", "vllm_plugin", "plan", V32, "--hardware", "910Z"]
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_a_target_chooses_the_division():
    plan = make_plan(PlanRequest(LLAMA, "H200", prompt=131072, ttft=20))
    found = value(plan, "smallest: time to the first token")
    assert found <= 20
    assert value(plan, "time to the first token") == pytest.approx(found)
    assert value(plan, "smallest: cards") == plan.request.parallel.cards
    given = make_plan(PlanRequest(LLAMA, "H200", prompt=131072, ttft=20, parallel=Parallel(tp=8), fit=False))
    assert given.request.parallel == Parallel(tp=8)
    with pytest.raises(PlanError, match="The nearest is"):
        make_plan(PlanRequest(LLAMA, "H200", prompt=131072, ttft=1e-6))


def test_every_route_is_told_or_said_to_be_left_out(million):
    [section] = [section for section in million.sections if section.title.startswith("Six routes")]
    for route in ("none of them", *route_sections.SHORT.values(), "all together"):
        assert value(million, f"{route}: TTFT") > 0
    assert value(million, "all together: TTFT") < value(million, "sparse attention: TTFT")
    assert value(million, "all together: wait of a decode") == 0
    dense = make_plan(PlanRequest(LLAMA, prompt=100_000))
    told = " ".join(note for section in dense.sections for note in section.notes)
    for missing in ("latent attention is left out", "sparse attention is left out", "offload is left out"):
        assert missing in told
    assert section.figures
