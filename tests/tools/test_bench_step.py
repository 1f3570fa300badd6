import sys

import bench_step
import pytest


def test_a_device_that_is_not_there_is_named_before_a_model_is_made(monkeypatch):
    monkeypatch.setattr(bench_step, "Step", lambda *sizes, **options: pytest.fail("made"))
    monkeypatch.setattr(sys, "argv", ["bench_step.py", "--device", "cuda:99"])
    with pytest.raises(ValueError, match="--device cuda:99 cannot be used here"):
        bench_step.main()
