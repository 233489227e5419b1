from __future__ import annotations

import pytest
import torch

from npu_ops import device as devices


def test_the_device_under_test_is_usable(device: str) -> None:
    assert device in devices.found_devices()
    assert devices.device_count(device) > 0
    assert devices.device_name(device)
    free, total = devices.memory_info(device)
    assert 0 < free <= total
    devices.synchronize(device)
    devices.synchronize(torch.ones(1, device=device).device)


def test_streams_and_events(device: str) -> None:
    stream, event = devices.stream_type(device)(), devices.event_type(device)()
    event.record(stream)
    event.synchronize()


def test_a_device_that_is_not_there_is_named() -> None:
    missing = next(name for name in ("npu", "cuda", "tpu") if name not in devices.found_devices())
    assert devices.device_count(missing) == 0
    with pytest.raises(RuntimeError, match=f"no '{missing}' device found, only .*'cpu'.*Check its driver or take another"):
        devices.module(missing)
