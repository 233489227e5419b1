"""Runs the Triton kernels of npu_ops/ascend in Triton's interpreter on the CPU; prints a JSON line for each case.

A process of its own, because TRITON_INTERPRET counts only before triton is imported.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from npu_ops.ascend import kernels
from npu_ops.contract import EXACT, all_contracts
from npu_ops.reference.gather_kv_cache import gather_kv_cache


def main() -> None:
    """Every case of gather_kv_cache with something to do, in every dtype, with fewer programs than pages and with more."""
    for dtype in EXACT:
        for programs in (1, 3, kernels.PROGRAMS):
            kernels.PROGRAMS = programs
            for case in all_contracts()["gather_kv_cache"].cases("cpu", dtype, 0):
                offset = case.kwargs.get("seq_offset")
                found, wanted = ([x.clone() for x in case.args] for _ in range(2))
                if len(found[4]):
                    kernels.gather_pages(*found, offset)
                    gather_kv_cache(*wanted, seq_offset=offset)
                same = all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(found[4:], wanted[4:], strict=True))
                print(json.dumps({"case": f"{case.name}-{dtype}-{programs}", "same": same}), flush=True)


if __name__ == "__main__":
    main()
