"""The smallest configuration that holds a prompt and is as fast as asked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner import memory
from planner.figure import PlanError
from planner.hardware import Efficiency, Hardware
from planner.model import ModelShape
from planner.parallel import Parallel, check
from planner.step import Dtypes
from planner.timing import decode_step, prefill
from planner.weights import weights


@dataclass(frozen=True)
class Candidate:
    """A configuration, whether its memory suffices, and its times, which are not computed (nan) if it does not."""

    parallel: Parallel
    requests: int
    ttft: float
    tpot: float


def room(model: ModelShape, hardware: Hardware, parallel: Parallel, length: int, chunk: int, batch: int, dtypes: Dtypes) -> int:
    """Requests of ``length`` tokens that fit beside weights, activations and workspace; for ``batch`` running at once."""
    size = memory.named(weights(model, dtypes.weights, parallel), "weights").value
    peak = memory.named(memory.activations(model, chunk, length, batch, parallel=parallel), "activation peak").value
    read = memory.workspace(model, length, batch, parallel=parallel)
    held = memory.named(read, "workspace latent rows").value if read else 0.0
    left = memory.left_for_kv(hardware.need("hbm_bytes").value, size, peak, held).value
    caches = memory.caches(model, dtypes.kv, dtypes.indexer, parallel)
    return int(memory.requests_that_fit(caches, left, length).value)


def candidates(model: ModelShape, most: int) -> list[Parallel]:
    """Divisions on powers of two of cards, fewest first: over heads, and over the tokens of a prompt.

    Caches are shared as far as the family can (DCP), sparse queries over all tensor-parallel ranks (DSA-CP).
    """
    found = []
    for cards in (2**n for n in range(int(math.log2(most)) + 1)):
        for tp in (2**n for n in range(int(math.log2(cards)) + 1)):
            shared = {"gqa": max(1, tp // model.kv_heads), "mla": tp, "dsa": 1, "v4": 1}[model.family]
            sparse = tp if model.family in ("dsa", "v4") else 1
            parallel = Parallel(tp=tp, pcp=cards // tp, dcp=shared, dsa_cp=sparse)
            try:
                check(model, parallel)
            except PlanError:
                continue
            found.append(parallel)
    return found


def smallest(
    model: ModelShape,
    hardware: Hardware,
    prompt: int,
    ttft: float = math.inf,
    tpot: float = math.inf,
    *,
    output: int = 1,
    batch: int = 1,
    chunk: int = 8192,
    most: int = 128,
    shares: Efficiency | None = None,
    dtypes: Dtypes | None = None,
) -> Candidate:
    """The fewest cards, and of those the division with the shortest time to the first token.

    Raises:
        PlanError: if no division of up to ``most`` cards does; the message has the nearest.
    """
    dtypes = dtypes or Dtypes()
    seen: list[Candidate] = []
    for parallel in candidates(model, most):
        good = [entry for entry in seen if entry.ttft <= ttft and entry.tpot <= tpot]
        if good and parallel.cards > good[0].parallel.cards:
            break
        fits = room(model, hardware, parallel, prompt + output, chunk, batch, dtypes)
        first = step = math.nan
        if fits >= batch:
            first = prefill(model, hardware, parallel, prompt, chunk, shares, dtypes).seconds
            step = decode_step(model, hardware, parallel, prompt + output, batch, shares, dtypes).seconds
        seen.append(Candidate(parallel, fits, first, step))
    good = [entry for entry in seen if entry.ttft <= ttft and entry.tpot <= tpot]
    if good:
        return min(good, key=lambda entry: entry.ttft)
    timed = [entry for entry in seen if not math.isnan(entry.ttft)]
    if not timed:
        raise PlanError(
            f"{batch} requests of {prompt + output:,} tokens fit no division of {model.name} on up to {most} cards."
        )
    near = min(timed, key=lambda entry: max(entry.ttft / ttft, entry.tpot / tpot))
    raise PlanError(
        f"No division on up to {most} cards has a TTFT of {ttft:g} s and a TPOT of {tpot:g} s. The nearest is {near.parallel}: "
        f"{near.ttft:.4g} s and {near.tpot:.4g} s."
    )
