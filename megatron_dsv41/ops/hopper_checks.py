"""How providers whose kernels run on Hopper alone refuse other devices."""

from __future__ import annotations

import torch


def check_hopper(op: str, provider: str, device: torch.device, instead: str) -> None:
    """ValueError, which names the provider `instead`, unless the CUDA device has compute capability 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        raise ValueError(
            f"{op}: provider {provider!r} needs compute capability 9.0, "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}; choose {instead!r}"
        )
