"""The pages of the documentation that are made of code, and links out of docs/.

`docs/generated/` gets the reference from the docstrings, the help of every command, the
results of the benchmarks, the changelog and the notebooks with their outputs. Sphinx's
settings call `write`.
"""

import base64
import contextlib
import importlib
import inspect
import io
import json
import os
import posixpath
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import tfamp

GENERATED = "docs/generated"
# Files of the repository -> their pages on the site.
COPIES = {
    "benchmarks/RESULTS.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
}
NOTEBOOK = re.compile(r"notebooks/\d\d_\w+\.ipynb")
# Page of the reference -> its title and the folders of the package it lists.
PAGES = {
    "precision": ("Policies and dtypes", ("policy", "models", "plan", "dtypes")),
    "loss_scale": ("The loss scale", ("loss_scale",)),
    "callbacks": ("Callbacks", ("callbacks",)),
    "data": ("Data", ("data",)),
    "comparing": ("Comparing", ("comparison",)),
    "numerics": ("Numerics", ("numerics", "stepping", "records")),
    "tuning": ("Tuning", ("tuning",)),
    "memory": ("Memory", ("memory",)),
    "training": ("Learning rates", ("training",)),
    "distribute": ("Several devices and machines", ("distribute",)),
    "serving": ("Inference", ("serving",)),
    "machine": ("The machine", ("cli", "machine")),
}
SUBPACKAGES = ("callbacks", "data", "distribute", "training")
# What parts of tfamp ask the optimizer and the records for, besides what users do.
_PARTS = {
    *("accumulates", "assign_all", "done_here", "is_overwritten"),
    *("from_dict", "to_dict"),  # beside `from_json` and `to_json` of each record
    *("own_variables", "position_of", "put", "shared_clip", "stock_variables"),
}
# A row of the table of notebooks: its name, address and what it shows.
_NOTEBOOK_ROW = re.compile(r"^\| \[(\d\d_\w+)\]\((\S+)\) \| (.*) \|\n", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


def public_names() -> dict[str, list[str]]:
    """Returns the dotted public names of tfamp, by the page that lists each.

    Raises:
        ValueError: A name comes from a folder that no page lists.
    """
    page_of = {folder: page for page, (_, all_) in PAGES.items() for folder in all_}
    names: dict[str, list[str]] = {page: [] for page in PAGES}
    homes = tfamp._HOMES | tfamp._RESULTS
    # What everything begins with stands first.
    for name, home in sorted(
        homes.items(), key=lambda item: (item[0] != "enable", item)
    ):
        if name in SUBPACKAGES:
            continue
        folder = home.split(".")[1]
        if folder not in page_of:
            raise ValueError(
                f"No page of the reference lists tfamp.{name}, of tfamp/{folder}; add "
                "the folder to `PAGES` of docs/site_pages.py."
            )
        names[page_of[folder]].append(f"tfamp.{name}")
    for package in SUBPACKAGES:
        module = importlib.import_module(f"tfamp.{package}")
        found = getattr(module, "_HOMES", None) or {
            name: value
            for name, value in vars(module).items()
            if not name.startswith("_")
            if getattr(value, "__module__", "").startswith("tfamp.")
        }
        # What stands at the top already is listed there.
        names[package] += [
            f"tfamp.{package}.{name}"
            for name in sorted(found)
            if getattr(module, name) is not getattr(tfamp, name, None)
        ]
    return names


def undocumented() -> list[str]:
    """Returns the public names, and methods of public classes, without a docstring."""
    found = []
    for name in (name for names in public_names().values() for name in names):
        value = resolved(name)
        if not inspect.getdoc(value):
            found.append(name)
        if inspect.isclass(value):
            found += [
                f"{name}.{member}"
                for member, each in vars(value).items()
                if not member.startswith("_")
                and (inspect.isfunction(each) or isinstance(each, property))
                and not inspect.getdoc(getattr(value, member))
            ]
    return found


def resolved(name: str) -> object:
    """Returns what a dotted name of the package stands for."""
    value: object = tfamp
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def relinked(text: str, page: str, repository: str) -> str:
    """Returns Markdown whose links out of docs/ lead to a page or to the repository.

    Args:
        text: The page.
        page: Its path in the repository, "docs/guides/data.md".
        repository: Address of the repository.

    Returns:
        The page as the site shows it; links of the site itself are left as they are.

    Example:
        >>> relinked("[a](../recipes/a.py)", "docs/lint.md", "https://host/tfamp")
        '[a](https://host/tfamp/blob/main/recipes/a.py)'
    """
    folder = posixpath.dirname(page)

    def replaced(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        path = placed(path)
        if path.startswith("docs/") and not path.endswith(".py"):
            place = posixpath.dirname(placed(page))
            return f"]({posixpath.relpath(path, place)}{anchor})"
        return f"]({repository}/blob/main/{path}{anchor})"

    return _LINK.sub(replaced, text)


def with_gallery(text: str, pictures: set[str]) -> str:
    """Returns a page whose table of notebooks is a gallery of their pictures."""
    found = list(_NOTEBOOK_ROW.finditer(text))
    if not found:
        return text
    cards = []
    for name, address, shows in (match.groups() for match in found):
        picture = f"[![{name}](generated/pictures/{name}.png)]({address})\n\n"
        picture = picture if name in pictures else ""
        card = f"{picture}[{name}]({address}): {shows}"
        cards.append(f":::{{container}} card\n{card}\n:::\n")
    begin = text.rindex("\n\n", 0, found[0].start()) + 2
    gallery = f"::::{{container}} gallery\n{''.join(cards)}::::\n"
    return text[:begin] + gallery + text[found[-1].end() :]


def first_picture(notebook: Path) -> bytes | None:
    """Returns the first plot of a notebook's outputs."""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", ()):
            if picture := output.get("data", {}).get("image/png"):
                return base64.b64decode("".join(picture))
    return None


def placed(page: str) -> str:
    """Returns where a file of the repository stands on the site."""
    name = page if NOTEBOOK.fullmatch(page) else COPIES.get(page)
    return f"{GENERATED}/{name}" if name else page


def write(root: Path, repository: str) -> None:
    """Writes docs/generated/ anew.

    Args:
        root: The clone.
        repository: Address of the repository.

    Raises:
        ValueError: A public name has no docstring.
    """
    missing = undocumented()
    if missing:
        raise ValueError(f"Public names without a docstring: {', '.join(missing)}.")
    folder = root / GENERATED
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for source, name in COPIES.items():
        text = (root / source).read_text(encoding="utf-8")
        page = relinked(text, source, repository)
        (folder / name).write_text(page, encoding="utf-8")
    (folder / "notebooks").mkdir()
    (folder / "pictures").mkdir()
    for path in (root / "notebooks").glob("[0-9]*.ipynb"):
        shutil.copy(path, folder / "notebooks")
        picture = first_picture(path)
        if path.stem == "04_is_it_worth_it":  # its output is a page, of which this is
            picture = (root / "docs/report.png").read_bytes()
        if picture is not None:
            (folder / "pictures" / f"{path.stem}.png").write_bytes(picture)
    (folder / "commands.md").write_text("\n".join(command_lines()), encoding="utf-8")
    for page, names in public_names().items():
        text = "\n".join(reference_lines(PAGES[page][0], names))
        (folder / f"reference_{page}.md").write_text(text, encoding="utf-8")


def reference_lines(title: str, names: list[str]) -> Iterator[str]:
    """Yields the lines of one page of the reference."""
    yield from (f"# {title}", "", "```{eval-rst}")
    for name in names:
        if inspect.isclass(resolved(name)):
            members = ", ".join(members_of(resolved(name)))
            yield from (f".. autoclass:: {name}", f"   :members: {members}", "")
        else:
            yield from (f".. autofunction:: {name}", "")
    yield "```"


def members_of(cls: type) -> list[str]:
    """Returns the public methods and properties of a class and of its bases here."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("tfamp.")]
    members = dict.fromkeys(
        name
        for base in own
        for name, value in vars(base).items()
        if not name.startswith("_") and name not in _PARTS
        if callable(value) or isinstance(value, (property, classmethod, staticmethod))
    )
    return list(members)


def command_lines() -> Iterator[str]:
    """Yields the lines of the page of the command line: what each `--help` prints."""
    from tfamp.cli import main

    yield from ("# The command line", "", "```text", said(main.main, "--help"), "```")
    for name in main.COMMANDS:
        text = said(main.main, name, "--help")
        yield from ("", f"## `tfamp {name}`", "", "```text", text, "```")


def said(command: Callable[[list[str]], int], *arguments: str) -> str:
    """Returns what a command prints, as wide as a page of the site is."""
    written = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):
            command(list(arguments))
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return written.getvalue().strip()
