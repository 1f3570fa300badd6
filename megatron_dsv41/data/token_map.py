"""The token map: raw token id -> compressed id, so that spellings of a word share Engram rows (SPEC 12.1).

Two tokens fall in one class when their texts agree after case, accents, width and outer white space are
removed. The map follows from the tokenizer alone. It is part of what trained Engram rows mean: another map with
the same number of classes reads other rows without any error, so its digest is kept with data and checkpoints.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.data.files import write_whole
from megatron_dsv41.data.tokenizer import OpenTokenizer, open_tokenizer

NO_TOKEN = -1
_KEPT_SPACE = "\ue000"  # a private-use character that stands for " " while both ends are stripped


@dataclasses.dataclass(frozen=True)
class TokenMap:
    """Compressed id of every raw id that a model's vocabulary can hold."""

    ids: Tensor  # int64 [vocab_size]
    num_classes: int
    digest: str  # SHA-256 of the tokenizer's own classes: equal for every vocab_size that holds them


@dataclasses.dataclass(frozen=True)
class TokenClasses:
    """The classes of a tokenizer's ids, before any model's vocabulary size is known."""

    classes: np.ndarray  # int64 [tokenizer vocabulary]; NO_TOKEN where an id has no token
    num_classes: int
    tokenizer_sha256: str

    @property
    def digest(self) -> str:
        """SHA-256 of the classes as little-endian int64."""
        return hashlib.sha256(self.classes.astype("<i8").tobytes()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write as .npz, whole or not at all."""
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            classes=self.classes,
            num_classes=np.int64(self.num_classes),
            tokenizer_sha256=np.array(self.tokenizer_sha256),
            digest=np.array(self.digest),
        )
        write_whole(path, buffer.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> TokenClasses:
        """Read what `save` wrote. ValueError when the file is damaged."""
        try:
            with np.load(path, allow_pickle=False) as file:
                found = cls(file["classes"], int(file["num_classes"]), str(file["tokenizer_sha256"]))
                digest = str(file["digest"])
        except (KeyError, zipfile.BadZipFile, EOFError, ValueError) as error:
            raise ValueError(f"{path} is not a token map: {error}; make it again with dsv41 prep") from error
        if found.digest != digest:
            raise ValueError(f"{path} is damaged: its classes have digest {found.digest}, it says {digest}")
        return found

    def for_vocabulary(self, vocab_size: int, pad_id: int) -> TokenMap:
        """The map of a model with `vocab_size` ids.

        An id without a token (a gap, or past the tokenizer's end) cannot come out of text. It gets the class
        of `pad_id`, which stands for "nothing here", so that no new class appears. ValueError when the
        tokenizer does not fit in the vocabulary or has no pad token.
        """
        known = len(self.classes)
        if known > vocab_size:
            raise ValueError(
                f"the tokenizer has ids up to {known - 1}, the model's vocab_size is {vocab_size}: raise "
                f"vocab_size to at least {known} or take the tokenizer the model was made for"
            )
        if not 0 <= pad_id < known or self.classes[pad_id] == NO_TOKEN:
            raise ValueError(f"engram_pad_token_id {pad_id} is not one of the tokenizer's {known} tokens")
        pad = int(self.classes[pad_id])
        ids = torch.full((vocab_size,), pad, dtype=torch.int64)
        ids[:known] = torch.from_numpy(np.where(self.classes == NO_TOKEN, pad, self.classes))
        return TokenMap(ids, self.num_classes, self.digest)


def token_classes(tokenizer: OpenTokenizer) -> TokenClasses:
    """Class of every id of `tokenizer`, numbered by first appearance (SPEC 12.1). 2 s for 129,280 ids."""
    backend, size = tokenizer.backend, tokenizer.vocab_size
    normalizer = _normalizer()
    texts = backend.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
    numbers: dict[str, int] = {}
    classes = np.full(size, NO_TOKEN, dtype=np.int64)
    for i, text in enumerate(texts):
        token = backend.id_to_token(i)
        if token is None:
            continue
        # Bytes that are no text by themselves decode to U+FFFD; their token strings tell them apart.
        key = token if "\ufffd" in text else (normalizer.normalize_str(text) or text)
        classes[i] = numbers.setdefault(key, len(numbers))
    return TokenClasses(classes, len(numbers), tokenizer.sha256)


def load_token_map(tokenizer: str | Path, config: DSV41Config) -> TokenMap:
    """The token map of `tokenizer` (anything `find_tokenizer` takes, or a saved .npz) for `config`.

    ValueError when it has not `config.engram_compressed_vocab_size` classes: the hash constants of the model
    were drawn for that number.
    """
    name = Path(tokenizer)
    found = TokenClasses.load(name) if name.suffix == ".npz" else token_classes(open_tokenizer(tokenizer))
    if found.num_classes != config.engram_compressed_vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer} gives {found.num_classes} compressed ids, the model's "
            f"engram_compressed_vocab_size is {config.engram_compressed_vocab_size}: take the tokenizer the model "
            f"was made for, or, for a new model, set engram_compressed_vocab_size to {found.num_classes}"
        )
    return found.for_vocabulary(config.vocab_size, config.engram_pad_token_id)


def _normalizer():
    from tokenizers import Regex
    from tokenizers import normalizers as n

    return n.Sequence(
        [
            n.NFKC(),
            n.NFD(),
            n.StripAccents(),
            n.Lowercase(),
            n.Replace(Regex(r"[ \t\r\n]+"), " "),
            n.Replace(Regex(r"^ $"), _KEPT_SPACE),
            n.Strip(),
            n.Replace(_KEPT_SPACE, " "),
        ]
    )
