"""Devices that kernels for Hopper refuse."""

import pytest
import torch

from megatron_dsv41.ops.hopper_checks import check_hopper


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_other_devices_are_refused_by_name(monkeypatch, capability):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"GPU {device.index}")
    if capability == (9, 0):
        return check_hopper("mhc.site", "hopper", torch.device("cuda", 3), "triton")
    has = ".".join(map(str, capability))
    want = f"^mhc.site: provider 'hopper' needs compute capability 9.0, GPU 3 has {has}; choose 'triton'$"
    with pytest.raises(ValueError, match=want):
        check_hopper("mhc.site", "hopper", torch.device("cuda", 3), "triton")
