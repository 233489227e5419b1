"""Which part of each request's cached context goes into which chunk.

``equal`` is Ascend's plan: every request has the same part of each chunk. Where lengths differ, the requests that have
ended leave their part empty, and the longest one alone decides how many chunks there are.

``proportional`` fills every chunk. The workspace is shared out max-min fairly, in units of the alignment: all unfinished
requests get the same, and what a short one does not need goes to the longer ones. What remains of it grows with a request's
length, hence the name; literal proportions would keep the shortest request in every chunk, and have its queries run, and its
partial results merged, once to each. Of units that do not divide, the shorter requests get one more each. From that follows:

- Every chunk but the last holds all the workspace's units, so there are ``ceil(sum(ceil(context / alignment)) / (workspace //
  alignment))`` of them. No plan in whole units has fewer, ``equal`` included, and one that packed single tokens at most one
  fewer, if the workspace has a unit for every request.
- A shorter request never outlasts a longer one: both are cut back to within one unit of the same share, the shorter one to
  no less than the longer one, so that the order of what remains is kept.
- A request is part of no more chunks than under ``equal``, as its share is never below that of ``equal``.
- With more requests than units the shortest go first, and the others wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mla_workspace.size import cdiv

Mode = Literal["proportional", "equal"]


@dataclass(frozen=True)
class ContextChunk:
    """One pass through the workspace.

    Attributes:
        requests: the run of requests whose queries see this chunk; under ``proportional`` its first and its last have
            tokens in it, while those between may have none.
        starts: first token of each of these requests, a multiple of the alignment.
        lengths: tokens of each; a multiple of the alignment unless they are the request's last.
    """

    requests: range
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of the workspace that are filled."""
        return sum(self.lengths)


@dataclass(frozen=True)
class ContextPlan:
    """The chunks of a step, in order: they hold every token of every context once."""

    chunks: tuple[ContextChunk, ...]

    @property
    def iterations(self) -> int:
        """How often the workspace is filled."""
        return len(self.chunks)

    @property
    def rows(self) -> int:
        """Rows gathered in all."""
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def peak_rows(self) -> int:
        """Rows of the fullest chunk: so many are up-projected at once."""
        return max((chunk.rows for chunk in self.chunks), default=0)

    @property
    def requests_run(self) -> int:
        """Requests that go through attention, counted once for each chunk, those without a token in it included."""
        return sum(len(chunk.requests) for chunk in self.chunks)


def plan_context(contexts: Sequence[int], workspace: int, alignment: int, mode: Mode = "proportional") -> ContextPlan:
    """Split the cached tokens of each request into chunks that fit the workspace.

    Args:
        contexts: cached tokens of each request; 0 is fine.
        workspace: tokens that a chunk may hold.
        alignment: see ``size.context_alignment``.
        mode: see the module.

    Raises:
        ValueError: if a chunk cannot hold one unit of the alignment, under ``equal`` one for each request with a context.
    """
    count = sum(context > 0 for context in contexts)
    if not count:
        return ContextPlan(())
    least = alignment * (count if mode == "equal" else 1)
    if workspace < least:
        raise ValueError(
            f"MLA context: a workspace of at least {least} tokens is required by the plan {mode!r} for {count} requests with "
            f"a context, got {workspace}. Raise mla_workspace_tokens in --additional-config."
        )
    if mode == "equal":
        return ContextPlan(tuple(_equal(contexts, workspace // count // alignment * alignment)))
    return ContextPlan(tuple(_proportional(contexts, workspace // alignment, alignment)))


def _equal(contexts: Sequence[int], part: int) -> Iterator[ContextChunk]:
    for start in range(0, max(contexts), part):
        lengths = tuple(min(max(context - start, 0), part) for context in contexts)
        yield ContextChunk(range(len(contexts)), (start,) * len(contexts), lengths)


def _proportional(contexts: Sequence[int], units: int, alignment: int) -> Iterator[ContextChunk]:
    done = [0] * len(contexts)
    # Shortest first. Shares keep the order of what remains, so it is sorted once.
    waiting = sorted((request for request, context in enumerate(contexts) if context), key=contexts.__getitem__)
    while waiting:
        starts, lengths = [0] * len(contexts), [0] * len(contexts)
        shares = _fair_shares([cdiv(contexts[request] - done[request], alignment) for request in waiting], units)
        for request, share in zip(waiting, shares, strict=True):
            if share:
                starts[request], lengths[request] = done[request], min(share * alignment, contexts[request] - done[request])
                done[request] += lengths[request]
        held = [request for request in waiting if lengths[request]]
        requests = range(min(held), max(held) + 1)
        run = slice(requests.start, requests.stop)
        yield ContextChunk(requests, tuple(starts[run]), tuple(lengths[run]))
        waiting = [request for request in waiting if done[request] < contexts[request]]


def _fair_shares(needs: Sequence[int], units: int) -> Iterator[int]:
    """Max-min fair shares for ascending needs: each gets an even share of what is left, rounded up, or its need if less.

    Once a need is cut, all later ones are, so that the units are used up.
    """
    for index, need in enumerate(needs):
        share = min(need, cdiv(units, len(needs) - index))
        units -= share
        yield share
