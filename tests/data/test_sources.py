import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dsv41.data.sources import SourceOptions, open_source

TEXTS = ["one", "zwei\nlines", "", None, "trois ünïcode"]


def read(*inputs, **options) -> list[str | None]:
    source = open_source(SourceOptions(inputs=[str(i) for i in inputs], **options))
    documents = list(source.documents())
    assert documents == list(source.documents())  # it starts over
    if source.total is not None:
        assert sum(d.weight for d in documents) == pytest.approx(source.total)
    return [d.text for d in documents]


def write_json_lines(path, column="text"):
    lines = "\n" + "\n\n".join(json.dumps({"id": i, column: text}) for i, text in enumerate(TEXTS))
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def test_json_lines(tmp_path):
    assert read(write_json_lines(tmp_path / "a.jsonl")) == TEXTS
    assert read(write_json_lines(tmp_path / "c.jsonl", "body"), text_column="body") == TEXTS


def test_json_lines_compressed(tmp_path):
    source = open_source(SourceOptions(inputs=[str(write_json_lines(tmp_path / "b.jsonl.gz"))]))
    assert [d.text for d in source.documents()] == TEXTS


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS, "id": range(5)}), path, row_group_size=2)
    assert read(path) == TEXTS


def test_folder_glob_and_order(tmp_path):
    for name in ("b/x.txt", "a/y.txt", "a/.hidden.txt", ".git/z.txt", "a/k.py", "c.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"text of {name}")
    assert read(tmp_path) == ["text of a/y.txt", "text of b/x.txt", "text of c.md"]
    assert read(tmp_path, pattern="*.py") == ["text of a/k.py"]
    assert read(f"{tmp_path}/*/*.txt") == ["text of a/y.txt", "text of b/x.txt"]
    assert read(tmp_path / "c.md", tmp_path / "b") == ["text of c.md", "text of b/x.txt"]


def test_limit_stops_before_the_text_that_would_pass_it(tmp_path):
    path = write_json_lines(tmp_path / "a.jsonl")
    source = open_source(SourceOptions(inputs=[str(path)], max_bytes=13))
    assert [d.text for d in source.documents()] == ["one", "zwei\nlines", "", None]
    assert source.total == 13
    with pytest.raises(ValueError, match="--max-bytes must be positive, got -1"):
        open_source(SourceOptions(inputs=[str(path)], max_bytes=-1))


def test_standard_library():
    source = open_source(SourceOptions(inputs=["python-stdlib"], max_bytes=50_000))
    assert all(d.text for d in source.documents()) and source.description["inputs"][0]["name"] == "python-stdlib"


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_library(tmp_path, monkeypatch, streaming):
    """`datasets.load_dataset` takes a local folder as it takes a hub id: a relative name with a slash."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"text": TEXTS, "id": range(5)}), tmp_path / "owner" / "name" / "train.parquet")
    from megatron_dsv41.data import sources

    options = SourceOptions(inputs=["owner/name"], streaming=streaming)
    source = sources._hub("owner/name", options)
    assert [d.text for d in source.documents()] == TEXTS
    assert source.total == (None if streaming else 5) and source.unit == "documents"
    with pytest.raises(ValueError, match="has no column 'txt'; did you mean text"):
        sources._hub("owner/name", SourceOptions(inputs=["owner/name"], text_column="txt", streaming=streaming))


def test_column_mistakes_are_named(tmp_path):
    path = write_json_lines(tmp_path / "a.jsonl", "content")
    with pytest.raises(ValueError, match=r"a.jsonl:2 has no column 'contents'; did you mean content\?"):
        read(path, text_column="contents")
    with pytest.raises(ValueError, match="a.jsonl:2: id holds int, not text"):
        read(path, text_column="id")
    pq.write_table(pa.table({"body": TEXTS}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"has no column 'text'.*one of \['body'\]"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": "b"\n', "a.jsonl:2 is not a line of JSON"),
        (b'["a"]\n', "holds list, not an object"),
        (b'{"text": "\\ud800"}\n', "a.jsonl:1 is not Unicode text"),
    ],
)
def test_malformed_json_lines_are_named(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_undecodable_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine")
    (tmp_path / "b.txt").write_bytes(b"latin \xe9")
    with pytest.raises(ValueError, match="b.txt is not UTF-8 text .*at byte 6"):
        read(tmp_path)
    assert read(tmp_path, skip_undecodable=True) == ["fine", None]


def test_damaged_parquet_is_named(tmp_path):
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[:-20])
    with pytest.raises(ValueError, match="a.parquet is not a whole Parquet file"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "./nowhere", "/no/where", "a b", "no*thing/*.x", "~/no-such-thing"])
def test_missing_input_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no file or folder is there and no glob matches"):
        read(name)


def test_folder_without_known_files(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    with pytest.raises(ValueError, match=r"has no file that matches .parquet.*--pattern '\*.py' names others"):
        read(tmp_path)
    with pytest.raises(ValueError, match="no input"):
        open_source(SourceOptions(inputs=[]))


def test_a_name_that_is_neither_here_nor_on_the_hub(monkeypatch):
    import datasets
    import huggingface_hub

    for settings in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="input 'misspelt': no file or folder of that name, and not from the hub"):
        read("misspelt")
