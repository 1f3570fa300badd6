import numpy as np
import pytest

from megatron_dsv41.data.text_bytes import token_bytes
from megatron_dsv41.data.tokenizer import open_tokenizer

TEXT = "def f(x):\n    return 'ä€𝄞' + x  # naïve\r\n\t\x00\x7f"


@pytest.mark.parametrize("name", ["small", "deepseek"])
def test_bytes_of_tokens_add_up_to_the_text(tokenizer_path, name):
    tokenizer = open_tokenizer(tokenizer_path if name == "small" else "deepseek")
    ids = tokenizer.backend.encode(TEXT, add_special_tokens=False).ids
    found = token_bytes(tokenizer)
    assert found.shape == (tokenizer.vocab_size,) and found.dtype == np.int64
    assert found[ids].sum() == len(TEXT.encode())
    assert found[tokenizer.eod_id()] == 0


def test_other_tokenizers_are_refused(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"is not a byte-level tokenizer \(its decoder is None\)"):
        token_bytes(open_tokenizer(tmp_path))
