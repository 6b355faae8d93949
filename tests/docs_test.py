"""The documentation: its code runs, its links lead somewhere, each page is listed."""

import ast
import fnmatch
import posixpath
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import pytest

import tfamp
from docs import site_pages
from tests.named_pages import USED
from tests.recipe_modules import train_here

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GUIDES = sorted((DOCS / "guides").glob("*.md"))
FAILURES = sorted(set((DOCS / "failures").glob("*.md")) - {DOCS / "failures/index.md"})
PAGES = sorted(set(DOCS.rglob("*.md")) - set((DOCS / "generated").rglob("*")))
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEXT = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A block and the output that the page shows right below it.
SHOWN = re.compile(
    r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)
BRITISH = re.compile(
    r"\w*(?:colour|neighbour|behaviour|favour|honour|flavour|\bgrey|centre\b|metre\b|"
    r"(?:optim|quant|normal|initial|real|recogn|serial|organ|summar|general)is[ei]|"
    r"analys(?:e[ds]?|ing)\b|learnt\b|labelled|modelling|defence|licence)\w*",
    re.IGNORECASE,
)
# Figures and times differ from machine to machine; words hardly do.
MAX_OTHER_WORDS = 0.4
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TESTS = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def stem(path: Path) -> str:
    """Returns what a case is called."""
    return path.stem


def listed() -> set[str]:
    """Returns the pages that are reached from index.md through tables of contents."""
    names = {path.relative_to(DOCS).with_suffix("").as_posix() for path in PAGES}
    found, new = {"index"}, ["index"]
    while new:
        page = new.pop()
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        entries = [
            posixpath.normpath(posixpath.join(posixpath.dirname(page), line))
            for block in TOCTREE.findall(text)
            for line in block.split("\n")
            if line and not line.startswith(":")
        ]
        # A "*" of Sphinx stays in its folder.
        more = {
            name
            for name in names
            for entry in entries
            if fnmatch.fnmatch(name, entry) and name.count("/") == entry.count("/")
        }
        assert len(entries) == len(set(entries)), page
        plain = {entry for entry in entries if "*" not in entry}
        assert {e for e in plain - names if not e.startswith("generated/")} == set()
        new += sorted(more - found)
        found |= more
    return found


def anchors(path: Path) -> set[str]:
    """Returns the anchors that GitHub and the site give a page's headings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        for title in titles
    }


def words(text: str) -> set[str]:
    """Returns the words of what a program prints."""
    return set(re.findall(r"[A-Za-z_]{3,}", text))


def run_blocks(text: str, names: dict | None = None) -> None:
    """Runs a page's code from top to bottom."""
    names = {"__name__": "__main__"} if names is None else names
    for block in CODE.findall(text):
        exec(block, names)


@pytest.fixture
def stock():
    """Puts back what the code of a page sets for its process."""
    with warnings.catch_warnings():
        yield
    tfamp.disable()
    keras.config.set_dtype_policy("float32")


def test_every_page_is_reached_from_the_first():
    names = {path.relative_to(DOCS).with_suffix("").as_posix() for path in PAGES}
    assert names - listed() == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_links_lead_to_files_and_headings(page):
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", text):
        if re.match(r"[a-z]+:", target) or target.startswith("generated/"):
            continue
        path = (page.parent / target) if target else page
        assert path.is_file(), target
        if anchor:
            assert anchor in anchors(path), f"{target}#{anchor}"


def test_what_is_read_is_in_american_spelling():
    found = {}
    for path in (*ROOT.glob("*.md"), *PAGES, ROOT / "benchmarks/RESULTS.md"):
        found[path.name] = BRITISH.findall(path.read_text(encoding="utf-8"))
    for folder in ("tfamp", "recipes", "notebooks"):
        for path in (ROOT / folder).rglob("*.py"):
            names = path.read_text(encoding="utf-8")
            found[path.name] = BRITISH.findall(names)
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=stem)
def test_tests_that_a_page_names_exist_and_run_each_time(page):
    for path, name in TESTS.findall(page.read_text(encoding="utf-8")):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        found = [n for n in tree.body if getattr(n, "name", None) == name]
        assert len(found) == 1, f"{path}::{name}"
        assigned = [n for n in tree.body if isinstance(n, ast.Assign)]
        of_the_file = [n.value for n in assigned if "pytestmark" in ast.unparse(n)]
        marks = map(ast.unparse, (*found[0].decorator_list, *of_the_file))
        assert not [m for m in marks if "mark.slow" in m], f"{path}::{name}"


def test_public_names_are_listed_and_documented():
    names = [name for names in site_pages.public_names().values() for name in names]
    assert len(names) == len(set(names)) > 50
    assert {"tfamp.enable", "tfamp.data.Pipeline", "tfamp.Status"} < set(names)
    assert site_pages.undocumented() == []


def test_links_out_of_the_site_lead_to_the_repository():
    host = "https://host/tfamp"
    text = "[a](../../recipes/a.py) [b](../lint.md#half-head) [c](../../CHANGELOG.md)"
    assert site_pages.relinked(text, "docs/guides/data.md", host) == (
        f"[a]({host}/blob/main/recipes/a.py) [b](../lint.md#half-head) "
        "[c](../generated/changelog.md)"
    )
    text = "[a](../notebooks/03_data.ipynb)"
    assert site_pages.relinked(text, "docs/examples.md", host) == (
        "[a](generated/notebooks/03_data.ipynb)"
    )
    text = "[a](../docs/lint.md) [b](training.py)"
    assert site_pages.relinked(text, "benchmarks/RESULTS.md", host) == (
        f"[a](../lint.md) [b]({host}/blob/main/benchmarks/training.py)"
    )


def test_the_table_of_notebooks_is_a_gallery_on_the_site():
    text = (DOCS / "examples.md").read_text(encoding="utf-8")
    shown = site_pages.with_gallery(text, {"01_quickstart"})
    notebooks = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    assert shown.count(":::{container} card") == len(notebooks)
    assert shown.count("generated/pictures/") == 1 and "| Notebook" not in shown
    assert "| Recipe |" in shown
    assert site_pages.with_gallery("no table", set()) == "no table"
    assert sum(site_pages.first_picture(path) is not None for path in notebooks) >= 5


@pytest.mark.filterwarnings("ignore:'mixed_bfloat16' will be slow")
@pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
@pytest.mark.quick("policy", "own_loops")
@pytest.mark.parametrize("guide", GUIDES, ids=stem)
def test_code_of_a_guide_runs_and_prints_what_the_page_shows(
    guide, stock, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "110")
    train_here(monkeypatch)
    names, num_shown = {"__name__": "__main__"}, 0
    for block, shown in SHOWN.findall(guide.read_text(encoding="utf-8")):
        exec(block, names)
        printed = words(capsys.readouterr().out)
        num_shown += bool(shown)
        other = words(shown) - printed
        bound = max(2, MAX_OTHER_WORDS * len(words(shown)))
        assert len(other) <= bound, (block, other)
    assert num_shown


@pytest.mark.parametrize("page", FAILURES, ids=stem)
def test_a_failure_shows_in_stock_keras(page, stock, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    (shown,) = TEXT.findall(text)
    assert keras.config.dtype_policy().name == "float32"
    run_blocks(text)
    assert capsys.readouterr().out == shown


@pytest.mark.slow("links, names and pages are checked by the tests above")
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    pytest.importorskip("myst_nb")
    pytest.importorskip("sphinx_copybutton")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"]
    docs = tmp_path / "docs"
    shutil.copytree(DOCS, docs, ignore=shutil.ignore_patterns("generated"))
    for name in ("benchmarks", "notebooks", "tfamp", "setup.cfg", "CHANGELOG.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [*command, "-b", "html", docs, tmp_path / "site"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for page in ("index", "search", "generated/commands", "failures/stuck-sigmoid"):
        assert (tmp_path / "site" / f"{page}.html").is_file()
    for page in sorted(USED):
        path, _, anchor = page.partition("#")
        shown = (tmp_path / "site" / f"{path}.html").read_text("utf-8")
        assert not anchor or f'id="{anchor}"' in shown, page
    assert "LossScaleOptimizer" in (tmp_path / "site/searchindex.js").read_text("utf-8")
