"""The two plans side by side on stated batches: what ``python -m mla_workspace`` prints and docs/mla.md shows."""

from __future__ import annotations

from dataclasses import dataclass

from mla_workspace.plan import ContextPlan, Mode, plan_context
from mla_workspace.size import context_alignment, workspace_bytes
from npu_ops.shards import rows_per_rank

BLOCK_SIZE = 128
MIB = 2**20


@dataclass(frozen=True)
class Batch:
    """Prefills of one step: runs of (requests, context of each) in the order of the batch, and the workspace in tokens."""

    name: str
    groups: tuple[tuple[int, int], ...]
    workspace: int = 131072
    dcp: int = 1
    interleave: int = 1

    @property
    def contexts(self) -> list[int]:
        """Context of each request."""
        return [context for requests, context in self.groups for _ in range(requests)]

    @property
    def alignment(self) -> int:
        """Of the plans."""
        return context_alignment(BLOCK_SIZE, self.dcp, self.interleave)

    def plan(self, mode: Mode) -> ContextPlan:
        """The batch's chunks."""
        return plan_context(self.contexts, self.workspace, self.alignment, mode)

    def rows(self, plan: ContextPlan) -> int:
        """Rows gathered by all ranks, with the padding of the exchange."""
        return self.dcp * sum(rows_per_rank(chunk.lengths, self.dcp, self.interleave) for chunk in plan.chunks)


BATCHES = (
    Batch("one short", ((1, 4096),)),
    Batch("one fills it", ((1, 131072),)),
    Batch("one token more", ((1, 131073),)),
    Batch("one huge", ((1, 1048576),)),
    Batch("two huge", ((2, 524288),)),
    Batch("eight alike", ((8, 16384),)),
    Batch("three, not dividing", ((3, 43691),)),
    Batch("seven, not dividing", ((7, 56173),)),
    Batch("huge before many small", ((1, 1048576), (63, 2048))),
    Batch("many small before huge", ((63, 2048), (1, 1048576))),
    Batch("huge amid small", ((128, 512), (1, 524288), (128, 512))),
    Batch("huge amid single tokens", ((127, 1), (1, 200000), (128, 1))),
    Batch("halving", tuple((1, 131072 >> step) for step in range(8))),
    Batch("staircase", tuple((1, 8192 * step) for step in range(1, 17))),
    Batch("three classes", ((4, 120000), (12, 30000), (48, 3000))),
    Batch("a block for each of 1,024", ((1024, 128),)),
    Batch("some without context", ((4, 0), (1, 90000), (4, 0), (3, 50000))),
    Batch("four units", ((1, 256), (1, 64), (1, 700), (1, 1)), workspace=512),
    Batch("DCP 8, huge and small", ((1, 1000000), (31, 4096)), workspace=65536, dcp=8),
    Batch("DCP 4, interleave 128", ((5, 100), (3, 70000)), dcp=4, interleave=128),
)

HEADERS = ("batch", "contexts", "workspace", "iterations", "rows gathered", "latent MiB", "peak rows", "requests run")


def cells(batch: Batch) -> tuple[str, ...]:
    """The batch's row of the table; two numbers are those of ``equal`` and ``proportional``."""
    plans = [batch.plan("equal"), batch.plan("proportional")]
    rows = [batch.rows(plan) for plan in plans]
    numbers = (
        [plan.iterations for plan in plans],
        rows,
        [round(workspace_bytes(count) / MIB) for count in rows],
        [plan.peak_rows for plan in plans],
        [plan.requests_run for plan in plans],
    )
    contexts = ", ".join(f"{requests} × {context:,}" for requests, context in batch.groups)
    return (batch.name, contexts, f"{batch.workspace:,}", *(" / ".join(f"{one:,}" for one in pair) for pair in numbers))


def markdown() -> str:
    """The table for docs/mla.md."""
    lines = [HEADERS, ("---",) * len(HEADERS), *map(cells, BATCHES)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
