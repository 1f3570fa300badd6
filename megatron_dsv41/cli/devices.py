"""The torch device that a command was told to use."""

from __future__ import annotations


def check_device(name: str) -> None:
    """ValueError when torch cannot use a device of this name on this machine."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the second: a build without that kind of device
        raise ValueError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
