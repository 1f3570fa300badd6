from megatron_dsv41.data import progress as module
from megatron_dsv41.data.progress import progress


def test_log_lines_show_share_rate_and_time_left(capsys, monkeypatch):
    monkeypatch.setattr(module, "LOG_SECONDS", 0.0)
    with progress("tokenize", 4e6, "bytes") as advance:
        advance(1e6, "0.10 M tokens")
        advance(1e6, "0.30 M tokens")
    first, line = capsys.readouterr().err.splitlines()
    assert first == "tokenize 25.0%, starting, 0.10 M tokens"
    assert line.startswith("tokenize 50.0%") and "MB/s, 0.30 M tokens" in line and line.endswith(" left")


def test_unknown_total_shows_a_rate_alone(capsys, monkeypatch):
    monkeypatch.setattr(module, "LOG_SECONDS", 0.0)
    with progress("tokenize", None, "documents") as advance:
        advance(10, "")
        advance(10, "")
    line = capsys.readouterr().err
    assert "documents/s" in line and "left" not in line and "%" not in line


def test_log_is_quiet_between_lines(capsys):
    with progress("tokenize", 10, "documents") as advance:
        for _ in range(10):
            advance(1, "")
    assert capsys.readouterr().err == ""
