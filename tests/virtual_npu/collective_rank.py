"""One rank of test_collectives.py: scenario, rank, number of ranks, file to meet at."""

from __future__ import annotations

import os
import sys

from npu_ops import virtual_npu

virtual_npu.enable()

import torch  # noqa: E402 - the virtual NPU comes first
import torch.distributed as dist  # noqa: E402

SCENARIO, RANK, RANKS, FILE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
DEVICE = torch.device("npu", RANK)  # device-literal: the backend under test is the NPU's


def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


def expect(got: torch.Tensor, wanted: list[float]) -> None:
    assert got.device == DEVICE
    assert got.flatten().tolist() == wanted, (SCENARIO, RANK, got.tolist(), wanted)


def reductions() -> None:
    everyone = sum(range(1, RANKS + 1))
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.int8, torch.uint8):
        x = full(RANK + 1, 5, dtype=dtype)
        dist.all_reduce(x)
        expect(x, [everyone] * 5)
    for op, wanted in ((dist.ReduceOp.MAX, RANKS), (dist.ReduceOp.MIN, 1), (dist.ReduceOp.PRODUCT, 2 if RANKS == 2 else 6)):
        x = full(RANK + 1, 3)
        dist.all_reduce(x, op)
        expect(x, [wanted] * 3)
    work = dist.all_reduce(x := full(1, 4), async_op=True)
    work.wait()
    expect(x, [RANKS] * 4)
    big = torch.arange(700_001.0, device=DEVICE) + RANK  # more than one window, and no multiple of it
    dist.all_reduce(big)
    assert torch.equal(big.cpu(), torch.arange(700_001.0) * RANKS + sum(range(RANKS)))
    dist.reduce(x := full(RANK + 1, 2), 1)
    if RANK == 1:
        expect(x, [everyone] * 2)


def gathers() -> None:
    out = full(0, RANKS * 3)
    dist.all_gather_into_tensor(out, full(RANK, 3))
    expect(out, [r for r in range(RANKS) for _ in range(3)])
    parts = [full(0, 2) for _ in range(RANKS)]
    dist.all_gather(parts, full(RANK, 2))
    expect(torch.cat(parts), [r for r in range(RANKS) for _ in range(2)])
    uneven = [full(0, r + 1) for r in range(RANKS)]
    dist.all_gather(uneven, full(RANK, RANK + 1))
    expect(torch.cat(uneven), [r for r in range(RANKS) for _ in range(r + 1)])
    dist.reduce_scatter_tensor(out := full(0, 2), torch.arange(RANKS * 2.0, device=DEVICE))
    expect(out, [RANKS * 2 * RANK, RANKS * (2 * RANK + 1)])
    gathered = [full(0, 2) for _ in range(RANKS)] if RANK == 0 else None
    dist.gather(full(RANK, 2), gathered, 0)
    if gathered:
        expect(torch.cat(gathered), [r for r in range(RANKS) for _ in range(2)])
    dist.scatter(out := full(0, 2), [full(r, 2) for r in range(RANKS)] if RANK == 0 else None, 0)
    expect(out, [RANK] * 2)
    objects: list[object] = [None] * RANKS
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": r} for r in range(RANKS)]


def all_to_all() -> None:
    dist.all_to_all_single(out := full(0, RANKS), torch.arange(float(RANKS), device=DEVICE) + 10 * RANK)
    expect(out, [10 * r + RANK for r in range(RANKS)])
    # Rank r sends r + d rows to rank d: rank 0 sends itself none.
    sends, receives = [RANK + d for d in range(RANKS)], [r + RANK for r in range(RANKS)]
    dist.all_to_all_single(out := full(0, sum(receives), 3), full(RANK, sum(sends), 3), receives, sends)
    expect(out, [r for r in range(RANKS) for _ in range(3 * (r + RANK))])
    parts = [full(0, 2) for _ in range(RANKS)]
    dist.all_to_all(parts, [full(10 * RANK + d, 2) for d in range(RANKS)])
    expect(torch.cat(parts), [10 * r + RANK for r in range(RANKS) for _ in range(2)])


def one_to_one() -> None:
    dist.broadcast(x := full(RANK, 3), RANKS - 1)
    expect(x, [RANKS - 1] * 3)
    if RANK == 0:
        dist.send(full(7, 100_000), 1)
    elif RANK == 1:
        dist.recv(x := full(0, 100_000), 0)
        assert bool((x == 7).all())
    following, previous = (RANK + 1) % RANKS, (RANK - 1) % RANKS
    got = full(0, 300_000)  # more than what fits between two ranks: all must move at once
    ring = [dist.P2POp(dist.isend, full(RANK, 300_000), following), dist.P2POp(dist.irecv, got, previous)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert bool((got == previous).all())
    dist.barrier()


def groups() -> None:
    pair = dist.new_group([0, 1])
    if RANK < 2:
        dist.all_reduce(x := full(RANK + 1, 2), group=pair)
        expect(x, [3, 3])
        dist.destroy_process_group(pair)
    dist.barrier()


def main() -> None:
    torch.npu.set_device(RANK)
    dist.init_process_group("hccl", init_method=f"file://{FILE}", rank=RANK, world_size=RANKS)
    if SCENARIO == "death":
        dist.all_reduce(full(1, 1))
        if RANK == 0:
            os._exit(0)
        dist.all_reduce(full(1, 1))
        torch.npu.synchronize()
        return
    for part in (reductions, gathers, all_to_all, one_to_one, groups):
        part()
    if SCENARIO != "no_goodbye":
        dist.destroy_process_group()
    print("all right", flush=True)


if __name__ == "__main__":
    main()
