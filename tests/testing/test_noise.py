import numpy as np

from megatron_dsv41.testing.noise import noise_band


def test_band_is_the_largest_distance_so_far_and_a_lag_ahead():
    curves = [np.array(curve) for curve in ([5.0, 4.0, 3.0, 2.0], [5.0, 4.5, 3.0, 2.0], [5.0, 4.0, 3.25, 1.0])]
    assert noise_band(curves, lag=0).tolist() == [0.0, 0.5, 0.5, 1.0]
    assert noise_band(curves, lag=1).tolist() == [0.5, 0.5, 1.0, 1.0]
    assert noise_band(curves, lag=9).tolist() == [1.0, 1.0, 1.0, 1.0]
