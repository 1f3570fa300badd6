"""Fixtures of the checkpoint tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dsv41.checkpoint.convert import import_checkpoint
from megatron_dsv41.testing.released import full_config, write_released


@pytest.fixture(scope="session")
def full_released(tmp_path_factory) -> Path:
    """One random released folder of `full_config`, read-only by agreement."""
    folder = tmp_path_factory.mktemp("released") / "full"
    write_released(folder, full_config())
    return folder


@pytest.fixture(scope="session")
def full_native(full_released) -> Path:
    """`full_released`, imported; read-only by agreement."""
    folder = full_released.with_name("native")
    import_checkpoint(full_released, folder)
    return folder
