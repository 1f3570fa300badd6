"""Runs of one process beside each other."""

import verify_training


def test_hidden_gpus_stay_hidden(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert verify_training.visible_gpus() == []
