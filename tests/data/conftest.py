"""Small real inputs for the data tests."""

from pathlib import Path

import pytest

from megatron_dsv41.config import DSV41Config


@pytest.fixture(scope="session")
def tokenizer_path() -> Path:
    """A byte-level BPE of 400 ids with 327 compressed ids."""
    return Path(__file__).parent / "parity" / "text_fp32" / "tokenizer.json"


@pytest.fixture(scope="session")
def small_config() -> DSV41Config:
    """A config whose vocabulary is that of `tokenizer_path`."""
    return DSV41Config(vocab_size=400, engram_compressed_vocab_size=327, image_token_id=3)
