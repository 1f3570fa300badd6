"""How far runs part by rounding alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LAG = 5  # steps by which a jump may come sooner or later


def noise_band(curves: Sequence[NDArray[np.float64]], lag: int = LAG) -> NDArray[np.float64]:
    """Loss curves [steps] of runs that differ by rounding -> how far two of them part by each step, fp64 [steps].

    Runs part in jumps, where rounding moves a selection or a quantized value, and a jump comes some steps sooner in one
    run than in another: the band of a step is the largest distance of any two curves up to `lag` steps later. What has
    parted does not meet again but by chance: the band never shrinks.
    """
    apart = np.abs([a - b for a, b in itertools.combinations(curves, 2)]).max(0)
    largest = np.maximum.accumulate(apart)
    return largest[np.minimum(np.arange(len(largest)) + lag, len(largest) - 1)]


@torch.no_grad()
def nudge(parameters: Iterable[Tensor], seed: int) -> None:
    """Move every element by one ulp of its dtype, up or down at random; the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        up = torch.rand(parameter.shape, generator=generator) < 0.5
        far = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
        parameter.copy_(torch.nextafter(parameter.cpu(), far))
