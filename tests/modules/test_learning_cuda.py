"""Some hundred steps of training on our kernels against the same on the definitions."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch

from megatron_dsv41.testing.bench import FASTEST
from megatron_dsv41.testing.noise import noise_band

pytestmark = pytest.mark.gpu
STEPS, SEEDS = 200, 3


def curve(choice: str, seed: int | None) -> list[float]:
    """Losses with the ops of `choice`; with a seed, every weight starts one bfloat16 ulp away."""
    from megatron_dsv41.modules.transformer import Transformer
    from megatron_dsv41.ops.registry import Ops, read_choice
    from megatron_dsv41.testing.learning import loss_curve
    from megatron_dsv41.testing.noise import nudge
    from megatron_dsv41.testing.tiny import KERNEL_WIDTHS, identity_map, tiny_config

    config = tiny_config(**KERNEL_WIDTHS, image_token_id=3, dtype="bfloat16")
    torch.manual_seed(0)
    model = Transformer(config, identity_map(config), ops=Ops(read_choice([choice]))).cuda()
    if seed is not None:
        nudge(model.parameters(), seed)
    return loss_curve(model, STEPS, rows=2)


def test_kernels_stay_in_the_band_of_one_ulp():
    runs = [("*=ref", None), *(("*=ref", seed) for seed in range(SEEDS)), (FASTEST, None)]
    with ProcessPoolExecutor(len(runs), mp_context=get_context("spawn")) as pool:
        *definition, kernels = (np.array(losses) for losses in pool.map(curve, *zip(*runs, strict=True)))
    apart, band = np.abs(kernels - definition[0]), noise_band(definition)
    print(f"largest share of the band {(apart / band).max():.2f}, at step {int((apart / band).argmax()) + 1}")
    for step in (0, 19, 99, STEPS - 1):
        print(f"step {step + 1}: {definition[0][step]:.4f}, kernels {kernels[step]:.4f}, band {band[step]:.4f}")
    assert definition[0][0] - definition[0][-1] > 2 * band[-1]  # it learns, by far more than the band lets through
    assert (apart <= band).all()
