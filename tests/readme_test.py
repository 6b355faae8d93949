"""README's code runs from top to bottom, and what it points at exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfamp
from tests.recipe_modules import train_here

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
LINKS = re.findall(r"\]\(([^)\s]+)\)", README)
IMAGES = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", README)
COMMANDS = re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)
FIXES = (ROOT / "docs/fixes.md").read_text(encoding="utf-8")
TESTS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", FIXES)


def test_readme_has_code_links_and_commands_and_the_fixes_name_tests():
    assert BLOCKS and LINKS and COMMANDS and TESTS


def test_no_figure_is_given_of_a_gpu_as_none_was_measured():
    assert "Not yet measured on a GPU" in README


# Where bfloat16 gains nothing, README's policy is objected to, as it should be.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'mixed_bfloat16' will be slow")
def test_code_blocks_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    train_here(monkeypatch)
    names = {"__name__": "__main__"}
    try:
        for block in BLOCKS:
            exec(block, names)
    finally:
        tfamp.disable()
    check_printed(capsys.readouterr().out)


@pytest.mark.slow("the blocks run in the test above")
def test_code_blocks_run_in_processes_of_their_own(tmp_path):
    script = tmp_path / "readme.py"
    script.write_text("\n".join(BLOCKS), encoding="utf-8")
    completed = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    check_printed(completed.stdout)


def check_printed(text):
    """Checks what `print(tfamp.assignment(model))` shows."""
    rows = re.findall(r"^│.*│$", README, re.MULTILINE)
    assert len(rows) == 4
    for row in rows:
        assert re.sub(r"\s", "", row) in re.sub(r"\s", "", text)


def test_readme_is_short():
    assert len(README.splitlines()) <= 120


def repository() -> str:
    """Returns the repository's address, of setup.cfg."""
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    (url,) = re.findall(r"^url = (\S+)$", setup, re.MULTILINE)
    return url


@pytest.mark.parametrize("link", LINKS)
def test_links_work_on_the_package_index_too(link):
    name = repository().removeprefix("https://github.com/")
    starts = (
        f"https://github.com/{name}/blob/main/",
        f"https://raw.githubusercontent.com/{name}/main/",
        f"https://colab.research.google.com/github/{name}/blob/main/",
    )
    (start,) = [start for start in starts if link.startswith(start)]
    assert (ROOT / link.removeprefix(start).partition("#")[0]).is_file()
    assert (link in IMAGES) == (start == starts[1])


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_targets_of_the_makefile(command):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{command}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("file, name", TESTS)
def test_tests_that_show_a_fix_exist(file, name):
    assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")
