"""Times measured on an H200 (benchmarks/results), within 25 %, by efficiencies that one row of each op and head count gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner import work
from planner.hardware import efficiency, load
from planner.timing import op_seconds, prefill

ROOT = Path(__file__).parents[2]
H200 = load("H200")
SHARES = efficiency(H200, "plugin")
BAND = 0.25


def results(name):
    return json.loads((ROOT / "benchmarks/results" / name).read_text())


def milliseconds(*ops):
    return 1e3 * sum(op_seconds(op, H200, SHARES)[0] for op in ops)


def mla(row):
    heads, keys = row["heads"], row["keys"]
    if "decode" in row["what"]:
        read = row["batch"] * keys
        return [work.absorbed(row["batch"], read, read, heads, 512, 64, 1152)]
    new = row["new"]
    own = work.expanded(new, work.pairs(new, 0), new, heads, 192, 128)
    if row["what"] == "MHA form, new tokens":
        return [own]
    context = work.expanded(new, new * keys, keys, heads, 192, 128)
    if row["what"] == "MHA form, context":
        return [context]
    ups = [work.up_projection(rows, heads, 512, 256, 1152) for rows in (new, keys)]
    return [own, context, work.gather(keys, 1152), *ups]


@pytest.mark.parametrize("row", results("h200_mla.json")["rows"], ids=lambda row: f"{row['what']}, {row['heads']} heads")
def test_mla(row):
    assert milliseconds(*mla(row)) == pytest.approx(row["ms"]["ours"], rel=BAND)


@pytest.mark.parametrize(
    "row",
    results("h200_sparse_flash_attention.json")["rows"],
    ids=lambda row: f"{row['what']}, {row['indices']}, {row['heads']} heads",
)
@pytest.mark.parametrize(("name", "bytes"), [("ours", 1152), ("ours_c8", 656)])
def test_sparse(row, name, bytes):
    op = work.sparse(row["rows"], row["rows"] * row["count"], row["count"], row["heads"], 512, 64, bytes)
    assert milliseconds(op) == pytest.approx(row["ms"][name], rel=BAND)
    assert op_seconds(op, H200, SHARES)[1] == ("compute" if row["what"] == "prefill" else "latency")


@pytest.mark.parametrize(
    "row",
    results("h200_lightning_indexer.json")["rows"],
    ids=lambda row: f"{row['form']}, {row['requests']} x {row['rows']} rows, {row['keys']} keys",
)
def test_indexer(row):
    pairs = row["requests"] * work.pairs(row["rows"], row["keys"] - row["rows"])
    keys, rows = row["requests"] * row["keys"], row["requests"] * row["rows"]
    bytes = {"bf16": 256, "fp8": 128}[row["form"]]
    score = work.index_scores(rows, pairs, keys, row["heads"], 128, bytes, row["form"])
    select = work.top_k(pairs, row["keys"])
    assert milliseconds(score) == pytest.approx(row["kernel_ms"]["_score"], rel=BAND)
    assert milliseconds(select) == pytest.approx(row["kernel_ms"]["_select"], rel=BAND)
    assert milliseconds(score, select) == pytest.approx(row["ms"], rel=BAND)


# The first run compiles its kernels in its first chunk; what comes after is like the others.
@pytest.mark.parametrize(("run", "skip"), [(0, 1), (1, 0), (2, 0)])
def test_needle(shape, run, skip):
    """DeepSeek V3.2's attention in two layers: the time to the first token, and the last full chunk's."""
    measured, sizes = (
        results("h200_needle.json"),
        {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 512, "q_lora_rank": 128},
    )
    model = shape("deepseek_v32", **sizes, intermediate_size=64, first_k_dense_replace=2)
    record = measured["runs"][run]
    found = prefill(model, H200, prompt=record["length"], chunk=measured["chunk"], shares=SHARES)
    chunks = [step.seconds for step in found.chunks]
    assert sum(chunks[skip:]) == pytest.approx(sum(record["seconds"][skip : len(chunks)]), rel=BAND)
    assert chunks[-2] == pytest.approx(record["seconds"][len(chunks) - 2], rel=BAND)
    if not skip:
        assert found.seconds == pytest.approx(record["ttft"], rel=BAND)
