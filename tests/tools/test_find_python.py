"""The finder takes a Python that runs, whatever else is first on PATH."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "find_python.sh"
BASH = shutil.which("bash")
BASE = Path(getattr(sys, "_base_executable", sys.executable))


def find(path, **environment):
    """Run the finder where PATH holds only `path` (a folder) and the tools that the script itself calls."""
    for tool in ("ls", "cat"):
        found = shutil.which(tool)
        assert found is not None
        if not (path / tool).exists():
            (path / tool).symlink_to(found)
    assert BASH is not None
    clean = {"PATH": str(path), "HOME": str(path / "home"), **environment}
    return subprocess.run([BASH, SCRIPT], env=clean, capture_output=True, text=True)


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{BASH}\n{text}\n")
    path.chmod(0o755)


def version_of(python):
    code = "import sys; print(*sys.version_info[:2])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return tuple(map(int, found.stdout.split()))


def test_a_shim_that_fails_is_passed_over(tmp_path):
    program(tmp_path / "bin" / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    program(tmp_path / "bin" / "python3", "echo 'is Python 3.11'; exit 1")
    (tmp_path / "pyenv" / "versions").mkdir(parents=True)
    (tmp_path / "pyenv" / "versions" / "3.x").symlink_to(BASE.parents[1])
    if BASE.parent.name != "bin" or not (BASE.parent / "python3").exists():
        pytest.skip("this Python has no bin/python3")
    done = find(tmp_path / "bin", PYENV_ROOT=str(tmp_path / "pyenv"))
    assert done.returncode == 0, done.stderr
    assert version_of(done.stdout.strip()) >= (3, 12)
    assert done.stdout.startswith(str(tmp_path / "pyenv"))


def test_a_python_on_path_is_found(tmp_path):
    (tmp_path / "python3").symlink_to(BASE)
    done = find(tmp_path, PYENV_ROOT="")
    assert done.returncode == 0, done.stderr
    assert version_of(done.stdout.strip()) >= (3, 12)


def test_uv_is_asked(tmp_path):
    program(tmp_path / "uv", f'[ "$1 $2" = "python find" ] && echo {BASE}')
    done = find(tmp_path, PYENV_ROOT="")
    assert done.returncode == 0, done.stderr
    assert version_of(done.stdout.strip()) >= (3, 12)


@pytest.mark.parametrize(
    ("text", "words"),
    [("echo 'is Python 3.11'; exit 1", "is Python 3.11"), ("exit 127", "does not run")],
)
def test_a_named_python_that_cannot_be_used_says_why(tmp_path, text, words):
    program(tmp_path / "chosen", text)
    done = find(tmp_path, PYTHON=str(tmp_path / "chosen"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert words in done.stderr
    assert "Python >= 3.12 with the venv module" in done.stderr


def test_no_python_at_all_says_what_to_install(tmp_path):
    elsewhere = [p for d in ("/usr/local/bin", "/opt/homebrew/bin") for p in Path(d).glob("python3.1[2-9]")]
    if elsewhere or list(Path("/opt").glob("python*/bin/python3")) or os.path.isdir("/opt/pyenv"):
        pytest.skip("this machine has Python in a place that is always looked at")
    program(tmp_path / "python3", "echo 'is Python 3.10'; exit 1")
    done = find(tmp_path, PYENV_ROOT="")
    assert done.returncode == 1
    for words in ("No Python >= 3.12", "is Python 3.10", "apt-get install python3.12", "uv python install"):
        assert words in done.stderr
