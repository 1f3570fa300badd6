import dataclasses
import hashlib

import numpy as np
import pytest
import tokenizers
import torch

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.data.token_map import NO_TOKEN, TokenClasses, load_token_map, token_classes
from megatron_dsv41.data.tokenizer import OpenTokenizer, open_tokenizer

DEEPSEEK_DIGEST = "26b9be2936d236a124ba318a998c417bc7032e3e92a3107fe98deee49f1dc496"
SMALL_DIGEST = "a8f31b349fdf6d36a11b1798eb2ad7b0828b08d75a9ddb1fce65a5bca381863b"


def test_released_tokenizer_has_99092_classes():
    tokenizer = open_tokenizer("deepseek")
    classes = token_classes(tokenizer)
    assert (tokenizer.vocab_size, classes.num_classes, classes.digest) == (129280, 99092, DEEPSEEK_DIGEST)
    token_map = classes.for_vocabulary(129280, DSV41Config().engram_pad_token_id)
    assert token_map.ids.shape == (129280,) and token_map.ids.dtype == torch.int64
    assert torch.equal(token_map.ids.unique(), torch.arange(99092))
    spellings = [tokenizer.backend.token_to_id(t) for t in ("the", "The", "Ġthe", "ĠTHE", "ĠThe")]
    assert len(token_map.ids[spellings].unique()) == 1


def test_small_tokenizer(tokenizer_path, small_config):
    token_map = load_token_map(tokenizer_path, small_config)
    assert (token_map.num_classes, token_map.digest) == (327, SMALL_DIGEST)
    assert token_map.ids[:4].tolist() == [0, 1, 2, 3]


def tokenizer_of(tokens: list[str], path) -> OpenTokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?")).save(str(path))
    return open_tokenizer(path)


def test_rules_one_by_one(tmp_path):
    groups = [
        [
            "Cafe\u0301",
            "café",
            "CAFE",
            " cafe\n",
            "ＣＡＦＥ",
            "cafe\u00a0",
        ],  # accents, case, width, outer space
        [" ", "\t", "\n \r\n"],  # runs of white space are one space, and that survives the strip
        ["a b", "a\t\nb"],
        ["\u00a0 "],  # two spaces after NFKC collapse to one
        ["\u0301"],  # an accent alone normalises to nothing: its own text is the key
        ["\u0302"],
        ["x\ufffd"],  # bytes that are no text: the token string is the key
        ["X\ufffd"],
        ["?"],
    ]
    groups[1] += groups.pop(3)
    tokens = [t for group in groups for t in group]
    expected = [number for number, group in enumerate(groups) for _ in group]
    classes = token_classes(tokenizer_of(tokens, tmp_path / "tokenizer.json"))
    assert classes.classes.tolist() == expected
    assert classes.num_classes == len(groups)


def test_ids_without_a_token_get_the_pad_class(small_config):
    classes = TokenClasses(np.array([0, NO_TOKEN, 1, 2, 1]), 3, "x")
    token_map = classes.for_vocabulary(vocab_size=7, pad_id=2)
    assert token_map.ids.tolist() == [0, 1, 1, 2, 1, 1, 1]
    assert token_map.digest == classes.for_vocabulary(5, 2).digest
    with pytest.raises(ValueError, match="engram_pad_token_id 1 is not one of the tokenizer.s 5 tokens"):
        classes.for_vocabulary(7, 1)
    with pytest.raises(ValueError, match="vocab_size is 4: raise vocab_size to at least 5"):
        classes.for_vocabulary(4, 2)


def test_class_count_must_be_the_models(tokenizer_path, small_config):
    config = dataclasses.replace(small_config, engram_compressed_vocab_size=328)
    with pytest.raises(ValueError, match="gives 327 compressed ids.*engram_compressed_vocab_size is 328"):
        load_token_map(tokenizer_path, config)


def test_saved_map_is_the_map(tmp_path, tokenizer_path, small_config):
    path = tmp_path / "map.npz"
    classes = token_classes(open_tokenizer(tokenizer_path))
    classes.save(path)
    assert TokenClasses.load(path).tokenizer_sha256 == hashlib.sha256(tokenizer_path.read_bytes()).hexdigest()
    saved, fresh = load_token_map(path, small_config), load_token_map(tokenizer_path, small_config)
    assert torch.equal(saved.ids, fresh.ids) and saved.digest == fresh.digest
    assert [p.name for p in tmp_path.iterdir()] == ["map.npz"]


def test_damaged_map_is_refused(tmp_path, tokenizer_path):
    path = tmp_path / "map.npz"
    token_classes(open_tokenizer(tokenizer_path)).save(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="is not a token map"):
        TokenClasses.load(path)
    np.savez(path, classes=np.arange(3), num_classes=3, tokenizer_sha256="x", digest="y")
    with pytest.raises(ValueError, match="is damaged"):
        TokenClasses.load(path)
