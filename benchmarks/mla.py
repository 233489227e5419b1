"""MLA on one GPU beside FlashAttention-3 and FlashMLA: a prefill chunk on a long context, and decodes.

usage: python -m benchmarks.mla --out FILE [--peers FOLDER]
FOLDER holds vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so, and the package flash_mla is importable. With --tiny it only checks,
on any device, that the script runs. Times are medians in ms of runs in turn, so that all see the same clocks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npu_ops.device import CPU, CUDA, device_name
from npu_ops.fused_infer_attention import fused_infer_attention
from npu_ops.gather_kv_cache import gather_kv_cache

LATENT, ROPE, NOPE, VALUE, BLOCK = 512, 64, 128, 128, 128
SCALE = (NOPE + ROPE) ** -0.5


def lengths_of(qlens: Sequence[int], kvlens: Sequence[int], packed: bool, device: str) -> dict[str, Any]:
    """The length arguments of fused_infer_attention."""
    ends, key_ends = (torch.tensor(lens).cumsum(0).tolist() for lens in (qlens, kvlens))
    return {
        "actual_seq_qlen": ends,
        "actual_seq_kvlen": key_ends if packed else list(kvlens),
        "query_start_loc": torch.tensor([0, *ends], dtype=torch.int32, device=device),
        "seq_lens": torch.tensor(kvlens, dtype=torch.int32, device=device),
        "softmax_scale": SCALE,
    }


def normal(*size: int, device: str) -> Tensor:
    """bf16."""
    return torch.randn(size, device=device, dtype=torch.bfloat16)


def paged(requests: int, keys: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Latent and rope caches with shuffled blocks, and their block table."""
    each = keys // BLOCK
    table = torch.randperm(requests * each, device=device).to(torch.int32).view(requests, each)
    shape = (requests * each, BLOCK, 1)
    return normal(*shape, LATENT, device=device), normal(*shape, ROPE, device=device), table


def ours_mha(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Callable[[], tuple[Tensor, Tensor]]:
    """FIA in MHA form, LSE included."""
    heads = query.shape[1]
    options = lengths_of([query.shape[0]], [key.shape[0]], True, query.device.type)
    return lambda: fused_infer_attention(
        query, key, value, num_query_heads=heads, num_key_value_heads=heads, sparse_mode=3 if causal else 0,
        return_softmax_lse=True, **options,
    )  # fmt: skip


def fa3_mha(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Callable[[], tuple[Tensor, Tensor]]:
    """FlashAttention-3 on the same tensors; its LSE is [heads, tokens]."""
    starts = [torch.tensor([0, x.shape[0]], dtype=torch.int32, device=x.device) for x in (query, key)]
    none = (None,) * 3

    def call() -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops._vllm_fa3_C.fwd(
            query, key, value, None, None, None, None, *starts, None, None, None, query.shape[0], key.shape[0], None,
            None, None, None, None, None, *none, SCALE, causal, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return out, lse.T

    return call


def ours_decode(query: Tensor, caches: tuple[Tensor, Tensor, Tensor], keys: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """FIA in latent form; query [requests, heads, 576]."""
    latent, rope, table = caches
    options = lengths_of([1] * query.shape[0], [keys] * query.shape[0], False, query.device.type)
    return lambda: fused_infer_attention(
        query[..., :LATENT], latent, latent, query_rope=query[..., LATENT:], key_rope=rope, block_table=table,
        block_size=BLOCK, num_query_heads=query.shape[1], num_key_value_heads=1, sparse_mode=3, return_softmax_lse=True,
        **options,
    )  # fmt: skip


def flash_mla_decode(query: Tensor, caches: tuple[Tensor, Tensor, Tensor], keys: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """FlashMLA's dense decode on the same rows in its own layout: blocks of 64 rows of 576."""
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    latent, rope, table = caches
    cache = torch.cat((latent, rope), -1).view(-1, 64, 1, LATENT + ROPE)
    halves = torch.stack((table * 2, table * 2 + 1), -1).flatten(1).contiguous()
    lens = torch.full((query.shape[0],), keys, dtype=torch.int32, device=query.device)
    plan, splits = get_mla_metadata(lens, query.shape[1], 1)

    def call() -> tuple[Tensor, Tensor]:
        out, lse = flash_mla_with_kvcache(
            query[:, None], cache, halves, lens, LATENT, plan, splits, softmax_scale=SCALE, causal=True
        )
        return out[:, 0], lse[..., 0]

    return call


def chunk(
    query: Tensor, rows: Tensor, caches: tuple[Tensor, Tensor, Tensor], weights: tuple[Tensor, Tensor]
) -> Callable[[], Any]:
    """All of ASCEND_MLA's work on one request's chunk after the projections: gather, up-projection, two FIA calls."""
    latent, rope, table = caches
    heads, cached = query.shape[1], table.shape[1] * BLOCK
    buffers = [torch.empty(cached, 1, width, dtype=query.dtype, device=query.device) for width in (LATENT, ROPE)]
    lens = torch.tensor([cached], dtype=torch.int32, device=query.device)

    def attend(latent_rows: Tensor, rope_rows: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        nope, value = (torch.nn.functional.linear(latent_rows, weight).unflatten(-1, (heads, -1)) for weight in weights)
        key = torch.cat((nope, rope_rows[:, None].expand(-1, heads, -1)), -1)
        return ours_mha(query, key, value, causal)()

    def call() -> None:
        attend(rows[:, :LATENT], rows[:, LATENT:], True)
        gather_kv_cache(latent, rope, table, lens, *buffers)
        attend(buffers[0][:, 0], buffers[1][:, 0], False)

    return call


def timed(calls: dict[str, Callable[[], Any]], rounds: int = 3) -> dict[str, float]:
    """Median ms of each call, the least of a few rounds in turn."""
    from triton.testing import do_bench

    medians: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            medians[name].append(do_bench(call, warmup=10, rep=60, return_mode="median"))
    return {name: min(times) for name, times in medians.items()}


def compare(name: str, ours: Callable[[], Any], theirs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Largest differences of output and LSE from each peer."""
    out, lse = ours()
    worst = {}
    for peer, call in theirs.items():
        peer_out, peer_lse = call()
        worst[f"{peer}_out"] = float((out.float() - peer_out.float()).abs().max())
        worst[f"{peer}_lse"] = float((lse - peer_lse).abs().max())
    print(name, worst, flush=True)
    return worst


def main() -> None:
    """Run every shape and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = CPU if options.tiny else CUDA
    new, cached, batch = (64, 256, 3) if options.tiny else (8192, 131072, 64)
    if options.peers:
        torch.ops.load_library(str(options.peers / "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"))
    rows: list[dict[str, Any]] = []
    for heads in (2,) if options.tiny else (16, 128):
        query = normal(new, heads, NOPE + ROPE, device=device)
        for name, keys, causal in (("new tokens", new, True), ("context", cached, False)):
            key, value = normal(keys, heads, NOPE + ROPE, device=device), normal(keys, heads, VALUE, device=device)
            ours = ours_mha(query, key, value, causal)
            theirs = {"fa3": fa3_mha(query, key, value, causal)} if options.peers else {}
            worst = compare(name, ours, theirs)
            times = {} if options.tiny else timed({"ours": ours, **theirs})
            flops = 2 * heads * (NOPE + ROPE + VALUE) * new * (keys - new / 2 if causal else keys)
            rows.append({"what": f"MHA form, {name}", "heads": heads, "new": new, "keys": keys, "ms": times, "flops": flops,
                         "difference": worst})  # fmt: skip
            print(rows[-1], flush=True)
            del key, value, ours, theirs
        caches = paged(1, cached, device)
        weights = (normal(heads * NOPE, LATENT, device=device), normal(heads * VALUE, LATENT, device=device))
        whole = chunk(query, normal(new, LATENT + ROPE, device=device), caches, weights)
        whole()
        rows.append({"what": "whole chunk", "heads": heads, "new": new, "keys": cached,
                     "ms": {} if options.tiny else timed({"ours": whole})})  # fmt: skip
        print(rows[-1], flush=True)
        del caches, weights, whole, query
    caches = paged(batch, cached, device)
    for heads in (2,) if options.tiny else (16, 128):
        query = normal(batch, heads, LATENT + ROPE, device=device)
        ours = ours_decode(query, caches, cached)
        theirs = {"flash_mla": flash_mla_decode(query, caches, cached)} if options.peers else {}
        worst = compare("decode", ours, theirs)
        rows.append({"what": "absorbed decode", "heads": heads, "batch": batch, "keys": cached,
                     "ms": {} if options.tiny else timed({"ours": ours, **theirs}), "difference": worst,
                     "bytes": batch * cached * (LATENT + ROPE) * 2,
                     "flops": 2 * batch * heads * cached * (2 * LATENT + ROPE)})  # fmt: skip
        print(rows[-1], flush=True)
        del query, ours, theirs
    host = {"device": device_name(device), "torch": torch.__version__}
    options.out.write_text(json.dumps({"host": host, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
