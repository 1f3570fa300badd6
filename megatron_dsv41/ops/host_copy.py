"""Numbers that the host needs from a device, asked for early and waited for late."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """The values of a tensor on their way to the host. Work that is queued meanwhile is not waited for."""

    def __init__(self, x: Tensor):
        self._values, self._done = x, None
        if x.is_cuda:
            self._values = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._values.copy_(x, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> Tensor:
        """The values, on the host."""
        if self._done is not None:
            self._done.synchronize()
        return self._values
