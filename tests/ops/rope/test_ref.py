"""Rotary: frequency regimes, pairing, inverse."""

import math

import pytest
import torch

from megatron_dsv41.modules.attention import layer_frequencies
from megatron_dsv41.ops.rope.ref import cos_sin, plain_frequencies, rotate, rotate_owned, yarn_frequencies
from megatron_dsv41.presets import flash


def test_yarn_golden_values():
    f = yarn_frequencies(64, 160000.0, 16, 32, 1, 65536)
    golden = "3.635539e-03 2.265625e-03 2.969778e-04 1.953125e-05 5.372313e-06 5.680529e-07"
    assert " ".join(f"{f[k].item():.6e}" for k in (15, 16, 20, 24, 25, 31)) == golden


def test_yarn_ramp_is_explicit():
    plain, yarn = plain_frequencies(64, 160000.0).double(), yarn_frequencies(64, 160000.0, 16, 32, 1, 65536).double()
    for k in range(32):
        ramp = min(max((k - 15) / 10, 0), 1)
        assert math.isclose(yarn[k], plain[k] / 16 * ramp + plain[k] * (1 - ramp), rel_tol=1e-6)


@pytest.mark.parametrize(("ratio", "base"), [(0, 10000.0), (1, 160000.0), (2, 160000.0)])
def test_each_layer_has_its_regime(ratio, base):
    frequencies = layer_frequencies(flash(), ratio, yarn=True)
    assert math.isclose(frequencies[1], base ** (-2 / 64), rel_tol=1e-6)
    slow_factor = 1 if ratio == 0 else 16
    assert math.isclose(frequencies[31] * slow_factor, base ** (-62 / 64), rel_tol=1e-6)


def test_regimes_part_beyond_the_original_length():
    # Inside a 128-token window the regimes are alike; at 100,000 tokens they are not.
    position = torch.tensor([100_000])
    config = flash()
    swa, compressed = (cos_sin(position, layer_frequencies(config, r, True))[0] for r in (0, 1))
    no_yarn = cos_sin(position, layer_frequencies(config, 1, False))[0]
    assert (swa - compressed).abs().max() > 0.5 and (no_yarn - compressed).abs().max() > 0.5


def test_pairs_are_adjacent_and_last():
    x = torch.zeros(1, 12)
    x[0, 4:6] = torch.tensor([1.0, 0.0])  # first rotary pair of 8 rotary channels
    x[0, :4] = 7.0
    angle = torch.tensor([[0.5, 0.0, 0.0, 0.0]])
    y = rotate(x, angle.cos(), angle.sin())
    torch.testing.assert_close(y[0, 4:6], torch.tensor([math.cos(0.5), math.sin(0.5)]))
    assert (y[0, :4] == 7.0).all()


def test_inverse_undoes_and_heads_share_positions():
    x = torch.randn(5, 3, 16, dtype=torch.float64)
    turn = cos_sin(torch.arange(5) * 1000, plain_frequencies(8, 10000.0))
    y = rotate(x, *turn)
    torch.testing.assert_close(rotate(y, *turn, inverse=True), x, rtol=1e-6, atol=1e-6)
    for head in range(3):
        torch.testing.assert_close(y[:, head], rotate(x[:, head], *turn))


def test_scores_depend_on_distance_only():
    q, k = torch.randn(1, 16, dtype=torch.float64), torch.randn(1, 16, dtype=torch.float64)
    f = plain_frequencies(16, 10000.0)
    scores = [
        (rotate(q, *cos_sin(torch.tensor([a]), f)) * rotate(k, *cos_sin(torch.tensor([a - 3]), f))).sum().item()
        for a in (3, 11, 40)
    ]
    assert max(scores) - min(scores) < 1e-5


def test_no_magnitude_factor():
    cos, sin = cos_sin(torch.arange(0, 200_000, 997), layer_frequencies(flash(), 1, True))
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))


def test_owned_is_a_rotation_without_gradient():
    x = torch.randn(5, 3, 16, requires_grad=True)
    turn = cos_sin(torch.arange(5), plain_frequencies(8, 10000.0))
    kept, owned = x.detach().clone(), rotate_owned(x * 1, *turn, inverse=True)
    assert torch.equal(owned, rotate(x, *turn, inverse=True)) and not owned.requires_grad and torch.equal(x, kept)
