"""What cannot be divided is refused, with what can."""

from __future__ import annotations

import pytest

from planner.figure import PlanError
from planner.parallel import Parallel, check


@pytest.mark.parametrize(
    ("name", "parallel", "message"),
    [
        ("llama3_70b", Parallel(tp=3), "tp = 3 does not divide the 64 heads of llama.* Possible are 1, 2, 4, 8, 16, 32, 64"),
        ("llama3_70b", Parallel(tp=0), "tp: at least 1 is required, got 0"),
        ("llama3_70b", Parallel(tp=16, dcp=4), r"dcp = 4: at most tp / KV heads = 16 / 8 = 2 ranks"),
        ("llama3_70b", Parallel(pp=81), "pp = 81: at most 80"),
        ("llama3_70b", Parallel(ep=True), "ep: llama.* has no experts"),
        ("llama3_70b", Parallel(tp=8, dsa_cp=8), r"dsa_cp: for sparse models \(dsa, v4\); llama.* is gqa"),
        ("deepseek_v3", Parallel(tp=8, dcp=3), "dcp = 3 does not divide tp = 8. Possible are 1, 2, 4, 8"),
        ("deepseek_v32", Parallel(tp=8, dsa_cp=16), "dsa_cp = 16 does not divide tp = 8"),
        ("deepseek_v4_pro", Parallel(tp=8, dcp=8), "dcp: V4's attention cannot be merged"),
        ("deepseek_v3", Parallel(tp=8, dp=64, ep=True), "ep: tp x dp x pcp = 512 ranks have only 256 experts"),
    ],
)
def test_refused(shape, name, parallel, message):
    with pytest.raises(PlanError, match=message):
        check(shape(name), parallel)


def test_kv_heads_are_whole_or_copied(shape):
    model = shape("llama3_70b", num_attention_heads=48, num_key_value_heads=6)
    for tp in (1, 2, 3, 6, 12):
        check(model, Parallel(tp=tp))
    with pytest.raises(PlanError, match=r"tp = 4: a divisor or a multiple of 6 KV heads is required"):
        check(model, Parallel(tp=4))


def test_possible(shape):
    check(shape("llama3_70b"), Parallel(tp=16, dcp=2, pcp=4, pp=2, dp=2))
    check(shape("deepseek_v3"), Parallel(tp=8, dcp=8, dp=32, ep=True))
    check(shape("deepseek_v4_flash"), Parallel(tp=8, dsa_cp=8))


def test_cards():
    parallel = Parallel(tp=8, pp=3, dp=5, pcp=2, dcp=8, dsa_cp=4)
    assert (parallel.cards, parallel.expert_ranks) == (240, 80)
