"""The documentation: its code runs, its links lead somewhere, each page is listed."""

import ast
import re
import typing
import warnings
from pathlib import Path

import keras
import pytest

import tfamp
from docs import site_pages
from tests.recipe_modules import train_here
from tfamp.numerics.lint import RULE_IDS
from tfamp.numerics.triage import Blamed, Triage
from tfamp.records import checks

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
# Figures and times differ from machine to machine; words hardly do.
MAX_OTHER_WORDS = 0.4
TESTS = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
# Where the name of a page is put together, from rules and causes.
MADE_OF = ("lint.py", "triage.py")


def named_pages() -> set[str]:
    """Returns the pages that calls of `see` and `address` in tfamp name."""
    found = set()
    for path in (ROOT / "tfamp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and path.name not in MADE_OF:
                if ast.unparse(node.func) in ("see", "checks.see", "checks.address"):
                    found.add(ast.literal_eval(node.args[0]))
    return found


def page_of_a_triage(cause: str) -> str:
    address = Triage("model", cause, None, (), "").documentation
    return address.removeprefix(f"{checks.SITE}/").replace(".html", "", 1)


USED = named_pages() | {f"lint#{rule}" for rule in RULE_IDS}
USED |= {page_of_a_triage(cause) for cause in typing.get_args(Blamed)}


def stem(path: Path) -> str:
    """Returns what a case is called."""
    return path.stem


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


@pytest.fixture
def stock():
    """Puts back what the code of a page sets for its process."""
    with warnings.catch_warnings():
        yield
    tfamp.disable()
    keras.config.set_dtype_policy("float32")


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


@pytest.mark.parametrize("page", sorted(USED))
def test_a_page_that_an_error_a_finding_or_a_triage_names_is_there(page):
    path, _, anchor = page.partition("#")
    file = DOCS / f"{path}.md"
    assert file.is_file()
    assert not anchor or anchor in anchors(file)


@pytest.mark.parametrize("page", FAILURES, ids=stem)
def test_a_page_of_a_failure_names_a_test(page):
    assert TESTS.findall(page.read_text(encoding="utf-8").partition("**Held by**")[2])


def test_public_names_are_listed_and_documented():
    names = [name for names in site_pages.public_names().values() for name in names]
    assert len(names) == len(set(names)) > 50
    assert {"tfamp.enable", "tfamp.data.Pipeline", "tfamp.Status"} < set(names)
    assert site_pages.undocumented() == []


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
    names = {"__name__": "__main__"}
    for block in CODE.findall(text):
        exec(block, names)
    assert capsys.readouterr().out == shown
