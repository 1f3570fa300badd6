"""Rules about the repository itself: import direction, laziness, citations, sizes."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_dsv41
from megatron_dsv41.cli import COMMANDS, command_help, main

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_dsv41"
SOURCES = sorted(
    p for folder in ("megatron_dsv41", "examples", "tools", "tests") for p in (ROOT / folder).rglob("*.py")
)


def tracked_files():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_import_contracts_hold():
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_folder_of_the_package_is_a_package():
    missing = {p.parent for p in PACKAGE.rglob("*.py")} - {p.parent for p in PACKAGE.rglob("__init__.py")}
    assert not missing


def test_tests_mirror_the_package():
    """tests/data/test_prep.py stands for megatron_dsv41/data/prep.py, or for a folder megatron_dsv41/data/prep/."""
    strays = []
    for test in (ROOT / "tests").rglob("test_*.py"):
        folder = test.parent.relative_to(ROOT / "tests")
        if not (PACKAGE / folder).is_dir() and folder.parts[0] not in ("examples", "tools"):
            strays.append(test)
    assert not strays


def test_the_wheel_holds_every_kernel_and_header():
    setup = ast.parse((ROOT / "setup.py").read_text())
    keyword = next(n for n in ast.walk(setup) if isinstance(n, ast.keyword) and n.arg == "package_data")
    held = {path for pattern in ast.literal_eval(keyword.value)["megatron_dsv41"] for path in PACKAGE.glob(pattern)}
    sources = {path for path in PACKAGE.rglob("*") if path.suffix in (".cu", ".cuh", ".h")}
    assert sources and sources <= held


@pytest.mark.parametrize("module", ["megatron_dsv41", "megatron_dsv41.run_config", "megatron_dsv41.cli"])
def test_importing_the_package_imports_no_framework(module):
    heavy = ("torch", "megatron", "transformers", "datasets", "wandb", "matplotlib", "rich")
    code = f"import sys, {module}; sys.exit(', '.join(m for m in {heavy} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_training_needs_no_optional_package():
    """wandb off, prepared data: neither wandb nor datasets is imported, nor what only the command line needs."""
    absent = ("wandb", "datasets", "transformers", "rich", "matplotlib")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "from megatron_dsv41.backends.megatron import launch\n"
        "launch.prepare_process()\n"
        "import megatron_dsv41.backends.megatron.trainer"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_exist():
    for name in megatron_dsv41.__all__:
        assert getattr(megatron_dsv41, name) is not None


def test_version_is_said_once(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dsv41 {megatron_dsv41.__version__}\n"
    assert f"## {megatron_dsv41.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_command_explains_itself(capsys):
    assert main([]) == 0
    listing = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^  {command} +{re.escape(command_help(command))}$", listing, re.MULTILINE)
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        assert f"usage: dsv41 {command}" in capsys.readouterr().out


def test_listing_and_help_load_no_torch():
    calls = "".join(f"\ntry: main([{c!r}, '--help'])\nexcept SystemExit: pass" for c in COMMANDS)
    code = f"import sys\nfrom megatron_dsv41.cli import main\nmain(['--help']){calls}\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err


def test_mistakes_are_one_message_and_a_traceback_on_demand(capsys):
    assert main(["plan", "--preset", "tiny", "nonsense.x=1"]) == 2
    quiet = capsys.readouterr().err
    assert quiet.startswith("dsv41 plan: nonsense is not a setting")
    assert "Traceback" not in quiet
    assert main(["--traceback", "plan", "--preset", "tiny", "nonsense.x=1"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_cited_sections_exist():
    headings = re.findall(r"^(?:#+ |\*\*)(\d+(?:\.\d+)?)", (ROOT / "docs" / "spec.md").read_text(), re.MULTILINE)
    cited = {
        (match, str(path.relative_to(ROOT)))
        for path in SOURCES
        for match in re.findall(r"SPEC (\d+(?:\.\d+)?)", path.read_text())
    }
    assert not sorted((section, where) for section, where in cited if section not in headings)


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name)
def test_links_of_the_docs_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def _anchors(page):
    """As the web shows headings: lower case, no punctuation, dashes for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_tracked_files_are_small():
    large = [p for p in tracked_files() if p.stat().st_size > 1_000_000 and ROOT / "tests" / "data" not in p.parents]
    assert not large


def test_no_absolute_home_or_sibling_paths():
    """What only one machine has must not be named: a clone elsewhere would not work."""
    pattern = re.compile(r"(?<![\w.])/(?:" + "|".join(("work", "root", "home")) + r")/\w|\.\./" + "shared")
    found = []
    for path in tracked_files():
        if path.suffix in (".py", ".md", ".toml", ".yaml", ".yml", ".sh", "", ".sbatch"):
            text = path.read_text(errors="ignore")
            found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in pattern.finditer(text)]
    assert not found


def test_no_unfinished_marks():
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    found = [f"{p.relative_to(ROOT)}: {m}" for p in SOURCES for m in marks if re.search(rf"\b{m}\b", p.read_text())]
    assert not found


def test_no_bare_except():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not found
