"""One rank of test_dcp.py: rank, number of ranks, file to meet at. Real collectives over real partial results."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.platforms import current_platform

from npu_ops.shards import owner
from vllm_plugin.attention.dcp import gather_heads, merge_over_ranks

RANK, RANKS, FILE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
HEADS, TOKENS = 2, 5


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """In fp64: query [T, N, D], key and value [K, D], seen [T, K]; a row that sees nothing gives 0 and -inf."""
    scores = (torch.einsum("tnd,kd->tnk", query, key) * query.shape[-1] ** -0.5).masked_fill(~seen[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return torch.einsum("tnk,kd->tnd", weights, value), lse


def check(style: str, width: int, interleave: int) -> None:
    """Rows that see 0, 1, 2, ... keys: some of nobody's, some of one rank's, the last of all ranks'."""
    generator = torch.Generator().manual_seed(width)
    query = torch.randn(TOKENS, HEADS * RANKS, width, generator=generator, dtype=torch.double)
    key, value = torch.randn(2, 4 * RANKS * interleave, width, generator=generator, dtype=torch.double)
    seen = torch.arange(len(key)) < torch.tensor([0, 1, 2, interleave + 1, len(key)])[:, None]
    own = slice(RANK * HEADS, (RANK + 1) * HEADS)
    gathered = gather_heads(query[:, own].float())
    assert torch.equal(gathered, query.float())
    mine = owner(torch.arange(len(key)), RANKS, interleave) == RANK
    out, lse = attention(query, key, value, seen & mine)
    whole, whole_lse = attention(query, key, value, seen)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        merged, merged_lse = merge_over_ranks(out.to(dtype), lse.float(), style)
        torch.testing.assert_close(merged.double(), whole[:, own], atol=bound, rtol=bound)
        torch.testing.assert_close(merged_lse.double(), whole_lse[:, own], atol=1e-5, rtol=1e-5)
    assert not merged[0].any()
    # A partial LSE in base 2 is another number, and the merge must show it.
    wrong, wrong_lse = merge_over_ranks(out.float(), lse.float() / math.log(2), style)
    assert (wrong.double() - whole[:, own]).abs().max() > 1e-3
    assert (wrong_lse.double() - whole_lse[:, own])[1:].abs().max() > 0.1


def main() -> None:
    """Join the group and check widths of GQA and MLA."""
    parallel = ParallelConfig(tensor_parallel_size=RANKS, decode_context_parallel_size=RANKS)
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        init_distributed_environment(RANKS, RANK, f"file://{FILE}", RANK, current_platform.dist_backend)
        initialize_model_parallel(RANKS, decode_context_model_parallel_size=RANKS)
        for style in ("ag_rs", "a2a"):
            for width, interleave in ((128, 1), (512, 16)):
                check(style, width, interleave)
    print("all right", flush=True)


if __name__ == "__main__":
    main()
