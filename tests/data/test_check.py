import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_dsv41.data import check
from megatron_dsv41.data.check import check_prepared, check_tokens, open_tokens
from megatron_dsv41.data.prep import PrepOptions, prepare
from megatron_dsv41.data.prepared import cache_key, prepared_paths, read_sidecar
from megatron_dsv41.data.sources import SourceOptions
from megatron_dsv41.data.token_map import TokenMap, load_token_map
from megatron_dsv41.data.writer import TokenWriter

EOD = 1


@pytest.fixture
def data(tmp_path, tokenizer_path) -> Path:
    """Prefix of 30 documents."""
    text = tmp_path / "in.jsonl"
    text.write_text("".join(json.dumps({"text": f"document {i} " * (i + 1)}) + "\n" for i in range(30)))
    options = PrepOptions(
        source=SourceOptions(inputs=[str(text)]), tokenizer=str(tokenizer_path), output=str(tmp_path / "data.v1")
    )
    prepare(options)
    return tmp_path / "data.v1"


def write(prefix: Path, documents: list[list[int]], dtype: str = "int32") -> Path:
    with TokenWriter(prefix, dtype) as writer:
        for ids in documents:
            writer.add(np.array(ids))
        writer.finish()
    return prefix


def change(prefix: Path, **fields) -> None:
    path = prepared_paths(prefix).sidecar
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_good_data_passes(data, small_config, tokenizer_path):
    token_map = load_token_map(tokenizer_path, small_config)
    sidecar = check_prepared(
        data,
        small_config,
        tokenizer_sha256=read_sidecar(data).tokenizer_sha256,
        token_map=token_map,
        min_tokens=100,
    )
    file = open_tokens(data)
    assert (len(file.tokens), len(file.ends)) == (sidecar.tokens, 30)
    assert (np.asarray(file.tokens[file.ends - 1]) == EOD).all()
    assert torch.equal(load_token_map(prepared_paths(data).token_map, small_config).ids, token_map.ids)


@pytest.mark.parametrize("which", ["bin", "idx"])
@pytest.mark.parametrize("left", [0, 20, -1, -4])
def test_cut_off_files_are_named(data, small_config, which, left):
    path = getattr(prepared_paths(data), which)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=rf"data.v1.{which} is (empty|cut off|not an index)"):
        check_prepared(data, small_config)


@pytest.mark.parametrize("which", ["bin", "idx"])
def test_grown_files_are_named(data, small_config, which):
    path = getattr(prepared_paths(data), which)
    path.write_bytes(path.read_bytes() + b"\0\0")
    with pytest.raises(ValueError, match=rf"data.v1.{which} is (longer than its index|too long)"):
        check_prepared(data, small_config)


@pytest.mark.parametrize("which", ["bin", "idx", "sidecar", "token_map"])
def test_missing_files_are_named(data, small_config, which):
    path = getattr(prepared_paths(data), which)
    path.unlink()
    with pytest.raises(ValueError, match=f"{path.name} is missing"):
        check_prepared(data, small_config)


def test_swapped_index_is_found(data, small_config, tmp_path):
    """Same sizes, other document lengths."""
    lengths = np.diff(open_tokens(data).ends, prepend=0)[::-1]
    other = write(tmp_path / "other", [[5] * (n - 1) + [EOD] for n in lengths], "uint16")
    prepared_paths(data).idx.write_bytes(prepared_paths(other).idx.read_bytes())
    with pytest.raises(ValueError, match="describes other data"):
        check_prepared(data, small_config)


@pytest.mark.parametrize("byte", [36, 34 + 30 * 4 + 9, -3])
def test_damaged_index_is_found(data, byte):
    path = prepared_paths(data).idx
    content = bytearray(path.read_bytes())
    content[byte] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged|longer than its index|cut off"):
        open_tokens(data)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 399}, "vocab_size is 400, the model's is 399"),
        ({"engram_compressed_vocab_size": 326}, "num_classes is 327, the model's engram_compressed_vocab_size is 326"),
        ({"eos_token_id": 2}, "eod_id is 1, the model's eos_token_id is 2"),
    ],
)
def test_data_of_another_model_is_refused(data, small_config, fields, message):
    with pytest.raises(ValueError, match=f"{message}: the data was made with another tokenizer"):
        check_prepared(data, dataclasses.replace(small_config, **fields))


def test_data_of_another_tokenizer_is_refused(data, small_config):
    with pytest.raises(ValueError, match="tokenizer_sha256 is .*, the run's tokenizer has abc"):
        check_prepared(data, small_config, tokenizer_sha256="abc")
    with pytest.raises(ValueError, match="the model's token map has abc"):
        check_prepared(data, small_config, token_map=TokenMap(torch.zeros(400, dtype=torch.int64), 327, "abc"))


def test_sidecar_of_another_kind_is_refused(data):
    change(data, version=2)
    with pytest.raises(ValueError, match="version 2, need 'megatron_dsv41 prepared data' version 1"):
        read_sidecar(data)
    for content in ("{", "[]", '{"format": "megatron_dsv41 prepared data", "version": 1, "x": 1}'):
        prepared_paths(data).sidecar.write_text(content)
        with pytest.raises(ValueError, match="is damaged"):
            read_sidecar(data)


def test_too_little_data_is_refused(data, small_config):
    tokens = read_sidecar(data).tokens
    with pytest.raises(ValueError, match=f"has {tokens} tokens, the run needs at least {tokens + 1}"):
        check_prepared(data, small_config, min_tokens=tokens + 1)


@pytest.mark.parametrize("bad", [400, 65535, -1])
def test_id_out_of_range_is_found(tmp_path, bad):
    prefix = write(tmp_path / "x", [[5, 6, EOD]] * 50 + [[7, bad, EOD]] + [[5, EOD]])
    with pytest.raises(ValueError, match=rf"token id {bad} at token 151, the model's ids are 0..399"):
        check_tokens(open_tokens(prefix), 400, EOD)


def test_document_without_end_is_found(tmp_path):
    prefix = write(tmp_path / "x", [[5, 6, EOD]] * 5 + [[7, 8]] + [[5, EOD]])
    with pytest.raises(ValueError, match="document 5 ends with token 8, not with the end-of-document token 1"):
        check_tokens(open_tokens(prefix), 400, EOD)


def test_end_inside_a_document_is_found(tmp_path):
    prefix = write(tmp_path / "x", [[5, 6, EOD]] * 5 + [[7, EOD, 8, EOD]])
    with pytest.raises(ValueError, match="end-of-document token 1 inside a document, at token 16"):
        check_tokens(open_tokens(prefix), 400, EOD)


def test_text_with_the_image_token_is_refused(tmp_path):
    file = open_tokens(write(tmp_path / "x", [[5, 6, EOD]] * 5 + [[7, 3, EOD]]))
    check_tokens(file, 400, EOD, image_token_id=129264)
    with pytest.raises(ValueError, match="with the model's image_token_id 3 at token 16: set image_token_id"):
        check_tokens(file, 400, EOD, image_token_id=3)


def test_documents_across_scan_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "SCAN_BLOCK", 4)
    documents = [[5] * n + [EOD] for n in (1, 2, 3, 4, 9, 3)]
    check_tokens(open_tokens(write(tmp_path / "x", documents)), 400, EOD)
    with pytest.raises(ValueError, match="at token 9"):
        check_tokens(open_tokens(write(tmp_path / "y", [[5] * 9 + [400] + [5] * 9 + [EOD]])), 400, EOD)


def test_large_data_is_sampled_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "SCAN_BLOCK", 4)
    monkeypatch.setattr(check, "FULL_SCAN_TOKENS", 16)
    file = open_tokens(write(tmp_path / "x", [[5, 6, 7, EOD]] * 100))
    firsts = [first for first, _ in check._blocks(file.tokens)]
    assert firsts == [0, 132, 264, 396]
    check_tokens(file, 400, EOD)


def test_cache_key_follows_data_and_tokenizer(data):
    key = cache_key([data])
    assert key == cache_key([data]) != cache_key([data, data])
    change(data, tokenizer_sha256="another")
    assert key != cache_key([data])
