"""How many bytes of text a token stands for: the unit in which models with different tokenizers compare."""

from __future__ import annotations

import json

import numpy as np

from megatron_dsv41.data.tokenizer import OpenTokenizer


def token_bytes(tokenizer: OpenTokenizer) -> np.ndarray:
    """Bytes of every id, int64 [vocab_size]; 0 for special tokens and for ids without a token.

    ValueError for a tokenizer that is not byte-level: its tokens do not spell bytes.
    """
    backend = tokenizer.backend
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    kinds = {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}
    if "ByteLevel" not in kinds:
        raise ValueError(
            f"{tokenizer.path} is not a byte-level tokenizer (its decoder is {decoder.get('type')}): "
            "the bytes behind its tokens are not known"
        )
    added = backend.get_added_tokens_decoder()
    found = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for token, number in backend.get_vocab(with_added_tokens=False).items():
        found[number] = len(token)  # one character of the byte alphabet is one byte
    for number, token in added.items():
        found[number] = 0 if token.special else len(token.content.encode())
    return found
