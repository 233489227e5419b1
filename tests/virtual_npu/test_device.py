"""The device as PyTorch and torch_npu show it: memory and its limit, streams, events, generators, copies, files."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch_npu

from npu_ops import virtual_npu

MIB = 1 << 20


@pytest.fixture
def npu(device):
    assert virtual_npu.is_enabled()
    torch.npu.empty_cache()
    return torch.get_device_module(device)


def test_enable_again_changes_nothing(device):
    virtual_npu.enable()
    assert virtual_npu.is_enabled()
    assert torch.accelerator.current_accelerator().type == device


def test_it_looks_like_an_npu(npu, device):
    assert npu.is_available()
    assert npu.device_count() == torch.accelerator.device_count() == 2
    properties = npu.get_device_properties(1)
    assert properties.name == npu.get_device_name(0) == "Ascend910B3"
    assert properties.total_memory == 64 << 30
    assert (properties.cube_core_num, properties.vector_core_num) == (20, 40)
    assert torch_npu.npu.get_soc_version() == 223
    with torch.device(device):
        assert torch.zeros(2).device.type == device
    assert torch.ones(2).npu().device == torch.ones(2, device=f"{device}:0").device  # device-literal: its own method


def test_memory_is_counted(npu, device):
    free, total = npu.mem_get_info()
    allocated = npu.memory_allocated()
    block = torch.empty(300 * MIB, dtype=torch.uint8, device=device)
    assert npu.memory_allocated() - allocated == torch.accelerator.memory_allocated() - allocated >= 300 * MIB
    assert total == 64 << 30
    assert 300 * MIB <= free - npu.mem_get_info()[0] < 310 * MIB
    elsewhere, _ = npu.mem_get_info(1)
    del block
    npu.empty_cache()
    assert npu.mem_get_info()[0] == free
    assert npu.mem_get_info(1)[0] == elsewhere


def test_out_of_memory_is_torchs_own_error_and_passes(npu, device):
    free, _ = npu.mem_get_info(0)
    with pytest.raises(torch.OutOfMemoryError, match=r"NPU out of memory\. Tried to allocate 65\.00 GiB"):
        torch.empty(65 << 30, dtype=torch.uint8, device=device)
    held = [torch.empty(20 << 30, dtype=torch.uint8, device=device) for _ in range(3)]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(20 << 30, dtype=torch.uint8, device=device)
    # The other device has memory of its own.
    assert torch.empty(20 << 30, dtype=torch.uint8, device=f"{device}:1").numel() == 20 << 30
    del held[0]
    held.append(torch.empty(20 << 30, dtype=torch.uint8, device=device))
    del held
    npu.empty_cache()
    assert npu.mem_get_info(0)[0] == free


def test_streams_and_events(npu, device):
    start, end = (npu.Event(enable_timing=True) for _ in range(2))
    x = torch.arange(4.0, device=device)
    side = npu.Stream()
    start.record()
    with npu.stream(side):
        side.wait_stream(npu.default_stream())
        y = x * 2
        end.record(side)
    npu.current_stream().wait_event(end)
    y.record_stream(npu.current_stream())
    end.synchronize()
    assert end.query()
    assert side.query()
    assert 0 <= start.elapsed_time(end) < 10_000
    assert y.tolist() == [0, 2, 4, 6]
    npu.synchronize()
    torch.accelerator.synchronize()


def test_devices_are_apart(npu, device):
    a = torch.arange(3.0, device=f"{device}:0")
    b = a.to(f"{device}:1")
    assert b.device.index == 1
    assert (b * 2).device.index == 1
    assert torch.zeros(1, device=b.device).device.index == 1
    with pytest.raises(RuntimeError, match="one device"):
        a + b
    with pytest.raises(RuntimeError, match=r"aten::add.*one device, found npu and cpu"):
        a + torch.ones(3)
    with npu.device(1):
        assert torch.ones(2, device=device).device.index == 1
    assert npu.current_device() == 0


def test_copies(device):
    host = torch.randn(64, 32).pin_memory()
    assert host.is_pinned()
    there = host.to(device, non_blocking=True)
    back = torch.empty_like(host)
    back.copy_(there, non_blocking=True)
    assert torch.equal(back, host)
    assert torch.equal(there.half().float().cpu(), host.half().float())
    assert torch.equal(there.t().contiguous().cpu(), host.t())
    strided = torch.zeros(32, 64, device=device).t()
    strided.copy_(host)
    assert torch.equal(strided.cpu(), host)
    assert torch.equal(there.to(torch.bfloat16).cpu(), host.to(torch.bfloat16))
    assert there.cpu().numpy().tolist() == host.tolist()
    assert torch.tensor([[1, 2], [3, 4]], device=device).tolist() == [[1, 2], [3, 4]]


def test_seeds(npu, device):
    torch.manual_seed(3)
    first = torch.randn(5, device=device).cpu(), torch.randint(0, 9, (5,), device=device).cpu()
    torch.manual_seed(3)
    again = torch.randn(5, device=device).cpu(), torch.randint(0, 9, (5,), device=device).cpu()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    torch.manual_seed(3)
    assert torch.equal(torch.randn(5), first[0])
    generator = torch.Generator(device=device).manual_seed(7)
    a, b = (torch.rand(4, device=device, generator=generator).cpu() for _ in range(2))
    assert not torch.equal(a, b)
    generator.manual_seed(7)
    assert torch.equal(torch.rand(4, device=device, generator=generator).cpu(), a)
    state = npu.get_rng_state()
    a = torch.rand(4, device=device)
    npu.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=device), a)
    npu.manual_seed_all(5)
    assert torch.nn.functional.dropout(torch.ones(1000, device=device), 0.5).count_nonzero().item() in range(400, 600)


def test_dropout_leaves_the_hosts_generator_alone(device):
    torch.manual_seed(0)
    torch.nn.functional.dropout(torch.ones(10, device=device))
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), drawn)


def test_save_load_and_deepcopy(device, tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4)).to(device)
    twin = copy.deepcopy(module)
    twin[0].weight.data.zero_()
    assert module[0].weight.abs().sum() > 0
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["0.weight"].device.type == device
    assert torch.equal(loaded["0.weight"], module[0].weight)
    file.seek(0)
    assert torch.load(file, map_location="cpu")["0.weight"].device.type == "cpu"
    twin.load_state_dict(loaded)
    x = torch.randn(3, 8, device=device)
    assert torch.equal(twin(x), module(x))


def test_training_step(device):
    torch.manual_seed(0)
    here = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 11))
    there = copy.deepcopy(here).to(device)
    ids = torch.randint(0, 11, (4, 6))
    for model, inputs in ((here, ids), (there, ids.to(device))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(b.cpu(), a)


def test_expandable_segments(device, in_process):
    """The allocator's other way to take memory: reserved addresses and physical pages."""
    in_process(
        f"x = torch.ones(40 << 20, dtype=torch.uint8, device={device!r})\n"
        f"y = torch.ones(400 << 20, dtype=torch.uint8, device={device!r})\n"
        "assert int(x.sum()) == 40 << 20 and int(y[-1]) == 1\n"
        "used = torch.npu.mem_get_info()[1] - torch.npu.mem_get_info()[0]\n"
        "assert 440 << 20 <= used < 500 << 20, used\n"
        "del x, y; torch.npu.empty_cache()\n"
        "assert torch.npu.mem_get_info()[1] - torch.npu.mem_get_info()[0] < 40 << 20\n",
        PYTORCH_NPU_ALLOC_CONF="expandable_segments:True",
    )
