"""README's code runs from top to bottom, and what it points at exists."""

import re
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
