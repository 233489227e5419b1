"""The workspace's size, and the bytes of a step against tensors of the shapes that it allocates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_workspace import size
from mla_workspace.context import Workspace
from mla_workspace.plan import plan_context

BLOCK_SIZE = 128


@pytest.mark.parametrize(
    ("max_model_len", "max_num_seqs", "alignment", "tokens"),
    [
        (4096, 16, 128, 32768),  # eight requests of full length
        (1024, 64, 128, 32768),  # four blocks to a request
        (1_048_576, 256, 128, 131072),  # the cap
        (32768, 2048, 128, 262144),  # a block to a request, past the cap
        (1000, 1, 128, 7936),  # 8,000, in whole blocks
        (10, 1, 128, 512),
        (131072, 1, 384, 130944),  # three ranks: the cap is no multiple
        (131072, 256, 1024, 262144),
    ],
)
def test_tokens(max_model_len, max_num_seqs, alignment, tokens):
    assert size.workspace_tokens(max_model_len, max_num_seqs, alignment) == tokens


alignments = st.builds(size.context_alignment, st.sampled_from([16, 48, 128]), st.integers(1, 8), st.sampled_from([1, 16, 128]))


@given(st.integers(1, 2_000_000), st.integers(1, 2048), alignments)
def test_tokens_are_ascends_in_whole_units_and_enough_for_every_request(max_model_len, max_num_seqs, alignment):
    tokens = size.workspace_tokens(max_model_len, max_num_seqs, alignment)
    ascend = max(min(max(8 * max_model_len, 4 * max_num_seqs * alignment), 128 * 1024), max_num_seqs * alignment)
    assert tokens % alignment == 0
    assert ascend - alignment < tokens <= ascend
    assert tokens >= max_num_seqs * alignment
    contexts = [max_model_len] * min(max_num_seqs, 3)
    for mode in ("equal", "proportional"):
        assert plan_context(contexts[:1], tokens, alignment, mode) == plan_context(contexts[:1], ascend, alignment, mode)
    assert size.require_workspace(tokens, max_num_seqs, alignment, "equal") == tokens


@pytest.mark.parametrize("interleave", [1, 16, 128])
@pytest.mark.parametrize("requests", [3, 5, 6, 7, 9, 10, 11, 12, 13])
def test_parts_of_a_chunk_divide_among_ranks(requests, interleave):
    alignment = size.context_alignment(BLOCK_SIZE, 8, interleave)
    assert alignment % BLOCK_SIZE == alignment % (8 * interleave) == 0
    for mode in ("equal", "proportional"):
        first = plan_context([65536] * requests, 65536, alignment, mode).chunks[0]
        assert sum(first.lengths) <= 65536
        for length in first.lengths:
            assert length > 0
            assert length % (8 * interleave) == length % BLOCK_SIZE == 0
            assert mode == "proportional" or length <= 65536 // requests


def test_alignment_without_dcp_is_the_block_size():
    assert size.context_alignment(48) == size.context_alignment(48, 1, 128) == 48


@pytest.mark.parametrize(
    ("tokens", "mode", "line"),
    [
        (1000, "proportional", r"a positive multiple of 128 is required .*, got 1000\. Set it to 1024\."),
        (1, "equal", r"got 1\. Set it to 128\."),
        (0, "proportional", r"got 0\. Set it to 128\."),
        (-256, "proportional", r"got -256\. Set it to 128\."),
        (1024, "equal", r"at least 2048 is required by mla_context_plan 'equal' for 16 requests, got 1024\. Raise it"),
    ],
)
def test_bad_overrides_say_what_to_do(tokens, mode, line):
    with pytest.raises(ValueError, match=rf"^mla_workspace_tokens: .*{line}"):
        size.require_workspace(tokens, 16, 128, mode)


def test_good_overrides_pass():
    assert size.require_workspace(128, 16, 128, "proportional") == 128
    assert size.require_workspace(2048, 16, 128, "equal") == 2048


def test_bytes_are_those_of_the_tensors():
    tokens, heads = 256, 3
    for dcp in (1, 4):
        workspace = Workspace(tokens, torch.bfloat16, "meta", dcp, torch.clone if dcp > 1 else None)
        held = [tensor.nbytes for tensor in vars(workspace).values() if isinstance(tensor, torch.Tensor)]
        assert size.workspace_bytes(tokens, dcp=dcp) == sum(held)
    own = torch.empty(tokens // 4, 576, dtype=torch.bfloat16, device="meta")
    assert size.exchange_bytes(tokens, 4) == own.nbytes + own.repeat(4, 1).nbytes
    assert size.exchange_bytes(tokens, 1) == 0
    keys, values = (torch.empty(tokens, heads, dim, dtype=torch.float32, device="meta") for dim in (192, 128))
    assert size.up_projected_bytes(tokens, heads, itemsize=4) == keys.nbytes + values.nbytes
    out = torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device="meta")
    running, lse = out.float(), torch.empty(tokens, heads, device="meta")
    assert size.partial_bytes(tokens, heads) == 2 * running.nbytes + 3 * lse.nbytes + out.nbytes


def test_bytes_of_the_full_workspace():
    assert size.workspace_bytes(131072) == 144 * 2**20
    assert size.up_projected_bytes(131072, 128) == 10 * 2**30
