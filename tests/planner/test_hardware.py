"""The table of devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner import hardware
from planner.figure import PlanError
from planner.hardware import Efficiency, Share, efficiency, load, names, profiles

ROOT = Path(__file__).parents[2]
# bf16, fp8, int8 in TFLOP/s; HBM in GB and GB/s; scale-up both ways in GB/s; scale-out in Gb/s. None is not known.
TABLE = {
    "H100": (989.5, 1979, 1979, 80, 3350, 900, 400),
    "H200": (989.5, 1979, 1979, 141, 4800, 900, 400),
    "H800": (989.5, 1979, 1979, 80, 3350, 400, 400),
    "H20": (148, 296, 296, 96, 4000, 900, None),
    "B200": (2250, 4500, 4500, 180, 7700, 1800, 400),
    "GB200": (2500, 5000, 5000, 186, 8000, 1800, None),
    "910B1": (353.9, None, 707.8, 64, 1600, 392, 200),
    "910B3": (294.9, None, 589.8, 64, 1600, 392, 200),
    "910B4": (280, None, 560, 32, 800, None, None),
    "910C": (708, None, 1504, 128, 3200, 784, 400),
    "950PR": (432, 865, None, 128, 1600, 2000, None),
    "950DT": (432, 865, None, 144, 4000, 2000, None),
    "TPU7x": (1153.5, 2307, None, 103.1, 3690, 600, None),
}
FIGURES = {
    "bf16_flops": 1e12, "fp8_flops": 1e12, "int8_ops": 1e12, "hbm_bytes": 1e9, "hbm_bandwidth": 1e9, "scale_up": 1e9 / 2,
    "scale_out": 1e9 / 8,
}  # fmt: skip


def test_every_device_is_in_the_table():
    assert names() == list(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_figures(name):
    device = load(name)
    for (figure, unit), expected in zip(FIGURES.items(), TABLE[name], strict=True):
        found = device.figures().get(figure)
        assert (found and found.value / unit) == (expected and pytest.approx(expected)), figure


@pytest.mark.parametrize("name", TABLE)
def test_every_figure_has_a_source(name):
    for figure in load(name).figures().values():
        assert figure.kind in ("datasheet", "measured", "unsourced")
        assert len(figure.source) > 10


def test_what_nobody_could_confirm_is_unsourced():
    unsourced = {(name, key) for name in names() for key, figure in load(name).figures().items() if figure.kind == "unsourced"}
    assert {("910B1", "scale_up"), ("910B1", "scale_out"), ("910B3", "scale_up"), ("910B4", "hbm_bandwidth")} <= unsourced
    assert {name for name, _ in unsourced} == {"H20", "910B1", "910B3", "910B4"}


def test_measured_links():
    measured = {name: load(name).collective for name in ("H100", "H800")}
    assert {name: figure.value / 1e9 for name, figure in measured.items()} == {"H100": 370, "H800": 160}
    assert all(figure.kind == "measured" for figure in measured.values())


@pytest.mark.parametrize(("alias", "name"), [("h200", "H200"), ("A2", "910B1"), ("910b2", "910B1"), ("ascend 910c", "910C")])
def test_aliases(alias, name):
    assert load(alias).name == name


def test_unknown_device():
    with pytest.raises(PlanError, match=r"hardware 'H300' is not known. Known are H100, H200, .*TPU7x"):
        load("H300")


def test_unknown_figure_and_dtype():
    with pytest.raises(PlanError, match=r"910C: fp8_flops is not known, .* Known are bf16_flops, int8_ops"):
        load("910C").peak("fp8")
    with pytest.raises(PlanError, match=r"products in 'fp3' are not known. Known are bf16, fp8, int8"):
        load("910C").peak("fp3")


def test_figures_need_a_source():
    entry = {"bf16_flops": {"value": 1.0, "kind": "guessed", "source": "somewhere"}}
    with pytest.raises(PlanError, match=r"a source and a kind of datasheet, measured, unsourced are required"):
        hardware._hardware("X", entry)


# Section by section what was measured: op, dtype, heads, share of compute, share of memory.
@pytest.mark.parametrize(
    ("device", "profile", "op", "dtype", "heads", "compute", "memory"),
    [
        ("H200", "best", "gemm", "bf16", 0, 679 / 989.5, 4266 / 4800),
        ("H200", "best", "gemm", "fp8", 0, 1264 / 1979, 4266 / 4800),
        ("H200", "best", "gqa_prefill", "bf16", 64, 654 / 989.5, 4266 / 4800),
        ("H200", "best", "mla_prefill", "bf16", 128, 676 / 989.5, 4266 / 4800),
        ("H200", "best", "mla_prefill", "bf16", 16, 687 / 989.5, 4266 / 4800),
        ("H200", "best", "mla_absorbed", "bf16", 128, 547 / 989.5, 3862 / 4800),
        ("H200", "best", "sparse", "bf16", 128, 533 / 989.5, 4266 / 4800),
        ("H200", "best", "sparse", "bf16", 8, 572 / 8 / 989.5, 4266 / 4800),
        ("H200", "best", "sparse", "bf16", 16, 478 / 4 / 989.5, 4266 / 4800),
        ("H200", "best", "sparse_c8", "bf16", 128, 410 / 989.5, 4266 / 4800),
        ("H200", "best", "indexer", "fp8", 64, 999 / 1979, 4266 / 4800),
        ("H800", "best", "mla_absorbed", "bf16", 128, 660 / 989.5, 3000 / 3350),
        ("H100", "best", "top_k", "bf16", 0, 0.7, 1466 / 3350),
        ("910C", "best", "mla_absorbed", "bf16", 128, 492 / 708, 2692 / 3200),
        ("910C", "amla", "mla_absorbed", "bf16", 128, 614 / 708, 0.6),
        ("910B3", "best", "mla_absorbed", "bf16", 128, 492 / 708, 2692 / 3200),
        ("910C", "best", "gemm", "int8", 0, 0.774, 0.6),
        ("910C", "best", "gemm", "bf16", 0, 0.7, 0.6),
        ("B200", "best", "mla_prefill", "bf16", 128, 0.7, 0.6),
    ],
)
def test_efficiencies(device, profile, op, dtype, heads, compute, memory):
    share = efficiency(load(device), profile).of(op, dtype, heads)
    assert (share.compute, share.memory) == (pytest.approx(compute), pytest.approx(memory))
    assert share.source


def test_head_counts_that_were_not_measured_say_so():
    shares = efficiency(load("H200"))
    assert shares.of("sparse", heads=48).source.endswith("64 heads, taken for 48")
    assert "taken for" not in shares.of("sparse", heads=64).source


def test_without_efficiencies_the_roofline():
    assert Efficiency().of("sparse", heads=64) == Share(1.0, 1.0, source="the roofline itself")


def test_unknown_profile():
    assert profiles() == ["amla", "best", "plugin"]
    with pytest.raises(PlanError, match=r"profile 'worst' is not known. Known are amla, best, plugin"):
        efficiency(load("H200"), "worst")


def test_the_plugins_efficiencies_are_those_of_its_benchmarks():
    """One row of each result file; the other rows are predicted from it in test_benchmarks.py."""
    shares = efficiency(load("H200"), "plugin")

    def rows(name):
        return json.loads((ROOT / "benchmarks/results" / name).read_text())["rows"]

    for row in rows("h200_mla.json"):
        share = shares.of("mla_absorbed" if "decode" in row["what"] else "mla_prefill", heads=row["heads"])
        if row["what"] == "MHA form, context" or (row["what"] == "absorbed decode" and row["heads"] == 128):
            assert share.compute * 989.5e12 == pytest.approx(row["flops"] / row["ms"]["ours"] * 1e3, rel=1e-3)
        elif row["what"] == "absorbed decode":
            assert share.memory * 4800e9 == pytest.approx(row["bytes"] / row["ms"]["ours"] * 1e3, rel=1e-3)
    for row in rows("h200_sparse_flash_attention.json"):
        for name, op in (("ours", "sparse"), ("ours_c8", "sparse_c8")):
            share = shares.of(op, heads=row["heads"])
            if row["what"] == "prefill" and row["indices"] == "random":
                assert share.compute * 989.5 == pytest.approx(row["tflops"][name], rel=1e-3)
            elif row["what"] == "decode":
                assert share.serial * 2048 == pytest.approx(row["ms"][name] / 1e3, rel=5e-3)
    for row in rows("h200_lightning_indexer.json"):
        share, peak = shares.of("indexer", row["form"], 64), load("H200").peak(row["form"]).value
        if (row["rows"], row["keys"]) == (8192, 131072):
            assert share.compute * peak / 1e12 == pytest.approx(row["score_tflops"], rel=1e-3)
        elif row["requests"] == 64:
            assert share.memory * 4800 == pytest.approx(row["score_gbs"], rel=1e-3)
            assert shares.of("top_k").serial * row["keys"] * 1e3 == pytest.approx(row["kernel_ms"]["_select"], rel=3e-3)
