from rich.console import Console

from megatron_dsv41.cli.tables import make_table, open_console


def test_rows_are_whole_in_a_pipe_and_folded_in_a_narrow_terminal(capsys):
    name = "/a/folder/" * 12 + "prefix"
    table = make_table(("domain", "tokens"), [(name, 12), ("b", None)])
    open_console().print(table)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["domain", "tokens"],
        [name, "12"],
        ["b"],
    ]
    Console(width=40).print(table)
    folded = capsys.readouterr().out
    assert "…" not in folded and "".join(line.split()[0] for line in folded.splitlines()[1:-1]) == name
