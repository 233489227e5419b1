"""How a model is divided among cards, in vLLM's terms, and what cannot be divided so."""

from __future__ import annotations

from dataclasses import dataclass, fields

from planner.figure import PlanError
from planner.model import ModelShape


@dataclass(frozen=True)
class Parallel:
    """Sizes of the groups of ranks.

    Attributes:
        tp: tensor parallelism; heads and hidden widths are divided.
        pp: pipeline stages.
        dp: replicas of attention; experts are divided among them too, as in vLLM.
        dcp: decode context parallelism: ranks of a tensor-parallel group that share the cache of a request.
        pcp: prefill context parallelism: ranks that share the tokens of a prompt, beside those of ``tp``.
        dsa_cp: ranks of a tensor-parallel group that share the query rows of sparse attention, all heads on each.
        ep: whole experts to a rank.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    dcp: int = 1
    pcp: int = 1
    dsa_cp: int = 1
    ep: bool = False

    @property
    def cards(self) -> int:
        """Cards in all; ``dcp`` and ``dsa_cp`` use those of ``tp``."""
        return self.tp * self.pp * self.dp * self.pcp

    @property
    def expert_ranks(self) -> int:
        """Cards that the routed experts of a layer are divided among."""
        return self.tp * self.dp * self.pcp


def check(model: ModelShape, parallel: Parallel) -> None:
    """Refuse what cannot be.

    Raises:
        PlanError: with the sizes that can be.
    """
    for field in fields(parallel):
        if field.name != "ep" and getattr(parallel, field.name) < 1:
            raise PlanError(f"{field.name}: at least 1 is required, got {getattr(parallel, field.name)}.")
    _divides("tp", parallel.tp, model.heads, f"the {model.heads} heads of {model.name}")
    # Every rank has whole KV heads, or a copy of one.
    if model.family == "gqa" and parallel.tp % model.kv_heads and model.kv_heads % parallel.tp:
        raise PlanError(f"tp = {parallel.tp}: a divisor or a multiple of {model.kv_heads} KV heads is required.")
    if parallel.pp > model.layers:
        raise PlanError(f"pp = {parallel.pp}: at most {model.layers}, one layer to a stage.")
    _check_context(model, parallel)
    if parallel.ep and not model.experts:
        raise PlanError(f"ep: {model.name} has no experts.")
    if parallel.ep and parallel.expert_ranks > model.experts:
        raise PlanError(f"ep: tp x dp x pcp = {parallel.expert_ranks} ranks have only {model.experts} experts to share.")


def _check_context(model: ModelShape, parallel: Parallel) -> None:
    _divides("dcp", parallel.dcp, parallel.tp, f"tp = {parallel.tp}")
    _divides("dsa_cp", parallel.dsa_cp, parallel.tp, f"tp = {parallel.tp}")
    copies = max(1, parallel.tp // model.kv_heads)
    if model.family == "gqa" and parallel.dcp > copies:
        raise PlanError(
            f"dcp = {parallel.dcp}: at most tp / KV heads = {parallel.tp} / {model.kv_heads} = {copies} ranks have the same "
            "cache to share."
        )
    if model.family == "v4" and parallel.dcp > 1:
        # Its attention op returns no LSE to merge by.
        raise PlanError("dcp: V4's attention cannot be merged over ranks that share a cache; dsa_cp shares its queries.")
    if parallel.dsa_cp > 1 and model.family not in ("dsa", "v4"):
        raise PlanError(f"dsa_cp: for sparse models (dsa, v4); {model.name} is {model.family}. pcp shares its tokens.")


def _divides(name: str, size: int, whole: int, what: str) -> None:
    if whole % size:
        possible = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
        raise PlanError(f"{name} = {size} does not divide {what}. Possible are {possible}.")
