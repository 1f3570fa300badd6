"""Skips say what is missing; no test reaches a network service."""

import importlib.util
import os

import pytest

from megatron_dsv41.testing.interpreter import INTERPRETED, mend

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure():
    if INTERPRETED:
        mend()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("triton") and not INTERPRETED:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and (missing := _missing_gpus(item)):
            item.add_marker(pytest.mark.skip(reason=missing))
        if item.get_closest_marker("te") and importlib.util.find_spec("transformer_engine") is None:
            item.add_marker(pytest.mark.skip(reason="needs transformer-engine"))


def _missing_gpus(item):
    import torch

    from megatron_dsv41.parallel.environment import missing_gpus

    ranks = item.get_closest_marker("ranks")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return missing_gpus(ranks.args[0] if ranks else 1, gpus)
