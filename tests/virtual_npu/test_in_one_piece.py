"""Compositions of PyTorch's ops that run on CPU views at once: same results, and nothing passes that one op refuses."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from npu_ops import virtual_npu
from npu_ops.contract import all_contracts


def on(device, case):
    return tree_map(lambda x: x.to(device, copy=True) if isinstance(x, torch.Tensor) else x, (case.args, case.kwargs))


@pytest.mark.parametrize("name", sorted(all_contracts()))
def test_references_run_op_by_op_as_on_an_npu(device, name):
    """In one piece a reference could make a tensor on the CPU and nobody would see; on an NPU it would fail."""
    contract = all_contracts()[name]
    for case in contract.cases("cpu", torch.float32, 0):
        results = []
        for where in ("cpu", device):
            args, kwargs = on(where, case)
            returned = contract.reference(*args, **kwargs)
            results.append((contract.defined(args, tree_flatten(returned)[0]), args, kwargs))
        wanted, got = (tree_flatten(result)[0] for result in results)
        for a, b in zip(wanted, got, strict=True):
            if isinstance(a, torch.Tensor):
                assert b.device.type == torch.device(device).type
                torch.testing.assert_close(b.cpu(), a, rtol=0, atol=0, equal_nan=True)


def test_arguments_and_views_of_them_come_back_as_they_are(device):
    def steps(x, y, *, rows):
        y.add_(1)
        return x[rows], y, [x + y]

    x, y = torch.arange(6.0, device=device).view(3, 2), torch.zeros(2, device=device)
    view, same, (total,) = virtual_npu.in_one_piece(steps, x, y, rows=slice(1, 3))
    assert same is y
    assert y.tolist() == [1.0, 1.0]
    x.zero_()
    assert view.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert total.device == x.device
    assert total.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def test_device_kinds_do_not_mix(device):
    with pytest.raises(RuntimeError, match="all tensors must be on one device"):
        virtual_npu.in_one_piece(torch.add, torch.ones(2, device=device), torch.ones(2))


def test_recordings_see_every_op(device):
    x = torch.ones(2, device=device)
    with virtual_npu.record(aten=True) as calls:
        virtual_npu.in_one_piece(lambda a: (a + a).exp(), x)
    assert [call.source for call in calls] == ["aten::add", "aten::exp"]
