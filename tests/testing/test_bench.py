"""What benchmarks ask of a machine without GPUs."""

from megatron_dsv41.testing import bench


def test_hidden_gpus_stay_hidden(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert bench.visible_gpus() == []
