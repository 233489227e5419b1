"""How many tokens the workspace holds, and how many bytes a step in MHA form needs.

The number of tokens is Ascend's. Of the bytes the workspace itself is the small part: a token's latent row has 576 elements,
its up-projected keys and values 320 for each head.
"""

from __future__ import annotations

import math

LATENT, ROPE = 512, 64
QK_DIM, V_DIM = 192, 128
FP32 = 4
# Eight requests of full length, four blocks to a request, and a cap that keeps the up-projection of a chunk affordable.
FULL_REQUESTS, BLOCKS, CAP = 8, 4, 128 * 1024


def cdiv(value: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-value // by)


def context_alignment(block_size: int, dcp: int = 1, interleave: int = 1) -> int:
    """What a chunk's starts are multiples of: blocks, and under DCP whole rounds over the ranks.

    A start that is a multiple of ``dcp * interleave`` lies at ``start / dcp`` on every rank, and the tokens from there on are
    owned as if they were the request's first. Whole blocks on every rank, ``dcp * block_size``, are not required: the gather
    takes any offset, and the least workspace would grow ``dcp`` times.
    """
    return math.lcm(block_size, dcp * interleave) if dcp > 1 else block_size


def workspace_tokens(max_model_len: int, max_num_seqs: int, alignment: int) -> int:
    """Tokens that the workspace holds: Ascend's formula, rounded down to a multiple of ``alignment``.

    ``max(min(max(8 * max_model_len, 4 * max_num_seqs * alignment), 131072), max_num_seqs * alignment)``; ``alignment`` is the
    block size, and that of ``context_alignment`` under DCP. The last term is a multiple of it, so that rounding keeps one
    unit for every request; it changes no plan either, as plans count whole units.
    """
    wanted = max(FULL_REQUESTS * max_model_len, BLOCKS * max_num_seqs * alignment)
    tokens = max(min(wanted, CAP), max_num_seqs * alignment)
    return tokens // alignment * alignment


def require_workspace(tokens: int, max_num_seqs: int, alignment: int, mode: str) -> int:
    """``tokens`` of ``mla_workspace_tokens``, if the plan ``mode`` can work with them.

    Raises:
        ValueError: if they are no positive multiple of ``alignment``, or too few for the ``equal`` plan, which hands every
            request a part of each chunk.
    """
    if tokens <= 0 or tokens % alignment:
        near = max(round(tokens / alignment), 1) * alignment
        raise ValueError(
            f"mla_workspace_tokens: a positive multiple of {alignment} is required (the block size, and under decode context "
            f"parallelism whole rounds over the ranks), got {tokens}. Set it to {near}."
        )
    if mode == "equal" and tokens < max_num_seqs * alignment:
        raise ValueError(
            f"mla_workspace_tokens: at least {max_num_seqs * alignment} is required by mla_context_plan 'equal' for "
            f"{max_num_seqs} requests, got {tokens}. Raise it, lower --max-num-seqs, or take the plan 'proportional'."
        )
    return tokens


def workspace_bytes(tokens: int, latent: int = LATENT, rope: int = ROPE, itemsize: int = 2, dcp: int = 1) -> int:
    """The workspace: a chunk's rows, and under DCP the rank's own part of them, gathered before they are exchanged."""
    return (tokens + (tokens // dcp if dcp > 1 else 0)) * (latent + rope) * itemsize


def exchange_bytes(tokens: int, dcp: int, latent: int = LATENT, rope: int = ROPE, itemsize: int = 2) -> int:
    """What an all-gather of a chunk takes beside the workspace: the rank's part in one piece, and all parts of it."""
    return (tokens // dcp + tokens) * (latent + rope) * itemsize if dcp > 1 else 0


def up_projected_bytes(tokens: int, heads: int, qk_dim: int = QK_DIM, v_dim: int = V_DIM, itemsize: int = 2) -> int:
    """Keys and values of ``tokens`` for each head."""
    return tokens * heads * (qk_dim + v_dim) * itemsize


def partial_bytes(query_tokens: int, heads: int, v_dim: int = V_DIM, itemsize: int = 2) -> int:
    """While a chunk is merged: the running result and its successor in fp32, and the chunk's partial, each with its LSE.

    The number of chunks does not come into it, nor do temporaries of the op that merges.
    """
    return query_tokens * heads * (2 * (v_dim + 1) * FP32 + v_dim * itemsize + FP32)
