"""Steps on cards: one at a time on each, all cards for those that ask, and an end for those that have none."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import bench_all
import psutil
import pytest

NOTE = "import os, pathlib, time; begin = time.time(); time.sleep({seconds}); pathlib.Path({path!r}).write_text("
NOTE += "f'{{os.environ[\"CUDA_VISIBLE_DEVICES\"]}} {{begin}} {{time.time()}}')"


def noting(folder, name, seconds=0.3, **settings):
    """A step that writes the cards it saw, and when."""
    code = NOTE.format(seconds=seconds, path=str(folder / f"{name}.seen"))
    return bench_all.Step("python -c " + shlex.quote(code.replace("{", "{{").replace("}", "}}")), **settings)


def seen(folder, name):
    cards, begin, end = (folder / f"{name}.seen").read_text().split()
    return cards, float(begin), float(end)


def test_cards_have_one_step_at_a_time(tmp_path):
    steps = {name: noting(tmp_path, name) for name in "abcd"} | {"both": noting(tmp_path, "both", everything=True)}
    assert bench_all.Bench(tmp_path / "out", ["0", "7"], steps).run(list(steps))
    found = {name: seen(tmp_path, name) for name in steps}
    assert found["both"][0] == "0,7" and {found[name][0] for name in "abcd"} == {"0", "7"}
    for name, (cards, begin, end) in found.items():
        for other, (other_cards, other_begin, other_end) in found.items():
            if name != other and set(cards.split(",")) & set(other_cards.split(",")):
                assert end <= other_begin or other_end <= begin, (name, other)
    written = json.loads((tmp_path / "out" / "steps.json").read_text())
    assert set(written["steps"]) == set(steps) and len(written["commit"].removesuffix("+changes")) == 40


def test_failures_and_endless_steps_are_named_and_the_rest_goes_on(tmp_path):
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    child += f"open({str(tmp_path / 'child')!r}, 'w').write(str(p.pid)); p.wait()"
    steps = {
        "fails": bench_all.Step("python -c 'print(5); raise SystemExit(3)'"),
        "endless": bench_all.Step("python -c " + shlex.quote(child), limit_s=3.0),
        "missing": bench_all.Step("no-such-program --now"),
        "good": bench_all.Step("python -c 'print(6)'"),
    }
    bench = bench_all.Bench(tmp_path, ["0"], steps)
    assert not bench.run(list(steps))
    status = {name: result["status"] for name, result in bench.results.items()}
    assert status["good"] == "ok" and (tmp_path / "good.log").read_text() == "6\n"
    assert status["fails"].startswith("exit 3") and (tmp_path / "fails.log").read_text() == "5\n"
    assert status["endless"] == "ran past 3 s" and "no-such-program" in status["missing"]
    assert_ends(int((tmp_path / "child").read_text()))


def assert_ends(pid):
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "a step's child outlives it"
        time.sleep(0.05)


INTERRUPTED = """
import pathlib, shlex, signal, sys
import bench_all
folder, everything = pathlib.Path(sys.argv[1]), sys.argv[2] == "all"
code = f"import os, pathlib, time; pathlib.Path({str(folder / 'pid')!r}).write_text(str(os.getpid())); time.sleep(99)"
bench_all.visible_gpus = lambda: ["0"]
endless = bench_all.Step("python -c " + shlex.quote(code), everything)
bench_all.STEPS = {"endless": endless, "next": bench_all.Step("no")}
sys.argv[1:] = [str(folder / "out")]
sys.exit(bench_all.main())
"""


@pytest.mark.parametrize("cards", ["one", "all"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_leaves_nothing_on_the_cards(tmp_path, cards, how):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    bench = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path), cards], env=environment, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 120
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        assert bench.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    bench.send_signal(how)
    bench.communicate(timeout=60)
    assert bench.returncode != 0 and not (tmp_path / "out" / "next.log").exists()
    assert_ends(int((tmp_path / "pid").read_text()))


def test_a_step_that_cannot_be_started_is_no_success(tmp_path):
    (tmp_path / "a.log").mkdir()
    bench = bench_all.Bench(tmp_path, ["0"], dict.fromkeys("ab", bench_all.Step("python -c 1")))
    assert not bench.run(["a", "b"])
    assert bench.results["a"]["status"].startswith("cannot be started") and bench.results["b"]["status"] == "ok"


def test_every_step_names_files_that_are_here():
    for name, step in bench_all.STEPS.items():
        places = [word for word in shlex.split(step.command) if word.startswith(("tools/", "tests/"))]
        assert all((bench_all.ROOT / place).exists() for place in places), name
        assert places or name == "tests"


def test_mistakes_are_errors(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for arguments, message in (
        ([], "OUT is missing"),
        ([str(tmp_path), "fussed"], "no step fussed"),
        ([str(tmp_path)], "there is no GPU"),
    ):
        monkeypatch.setattr("sys.argv", ["bench_all.py", *arguments])
        with pytest.raises(SystemExit):
            bench_all.main()
        assert message in capsys.readouterr().err
