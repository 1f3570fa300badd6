"""Skips say what is missing; no test reaches a network service."""

import importlib.util
import os

import pytest

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("te") and importlib.util.find_spec("transformer_engine") is None:
            item.add_marker(pytest.mark.skip(reason="needs transformer-engine"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
