"""Which files import which, read from their text, and which tests reach a file."""

import ast
import functools
import re
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tfamp"
FOLDERS = ("tfamp", "tests", "recipes", "benchmarks", "notebooks")
_WORD = re.compile(r"[a-z0-9]+")


def imports(source: str, package: str) -> Iterator[str]:
    """Yields the dotted name of all that `source` imports, wherever it does.

    Args:
        source: The text of a file.
        package: Dotted name of the folder it lies in, for its relative imports.
    """
    return _imports(ast.walk(ast.parse(source)), package)


def _imports(nodes: Iterable[ast.AST], package: str) -> Iterator[str]:
    levels = package.split(".")
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = levels[: len(levels) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


@functools.cache
def _modules() -> dict[str, str]:
    """Returns the path of every module of the repository, by its dotted name."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            parts = relative.with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = relative.as_posix()
            # Scripts of one folder import each other by file name.
            if folder in ("recipes", "benchmarks", "notebooks"):
                found.setdefault(path.stem, relative.as_posix())
    return found


@functools.cache
def _homes() -> dict[str, str]:
    """Returns where `tfamp`'s public names live, from the tables of its `__init__`."""
    homes: dict[str, str] = {}
    for node in ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body:
        # The tables of homes; that of what people guess spreads other ones.
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            if None in node.value.keys:
                continue
            names = ast.literal_eval(node.value)
            homes |= {f"tfamp.{name}": home for name, home in names.items()}
    for name, path in _modules().items():
        if name.startswith("tfamp.") and path.endswith("__init__.py"):
            source = (ROOT / path).read_text(encoding="utf-8")
            for imported in imports(source, name):
                homes[f"{name}.{imported.rpartition('.')[2]}"] = imported
    return homes


def _file_of(name: str) -> str | None:
    """Returns the file that a dotted name, or the longest start of it, stands for."""
    homes, modules = _homes(), _modules()
    parts = name.split(".")
    for end in range(2, len(parts) + 1):
        start = ".".join(parts[:end])
        home = homes.get(start, start)
        # A module may export a name that is its own.
        if not f"{home}.".startswith(f"{start}."):
            return _file_of(".".join([home, *parts[end:]]))
    while parts and ".".join(parts) not in modules:
        parts.pop()
    # Of the package itself only its version is read, which is in every file's reach.
    return None if parts in ([], ["tfamp"]) else modules[".".join(parts)]


def _names_in(source: str, package: str) -> Iterator[str]:
    """Yields what a file imports, looks up in `tfamp` or names in a string."""
    nodes = list(ast.walk(ast.parse(source)))
    yield from _imports(nodes, package)
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield _dotted(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.removesuffix(".py").replace("/", ".")


def _dotted(node: ast.AST) -> str:
    """Returns "a.b.c" for such a look-up, and "" for one in a call's result."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *parts[::-1]]) if isinstance(node, ast.Name) else ""


@functools.cache
def _imported(path: str) -> frozenset[str]:
    """Returns the files of the repository that a file imports or names."""
    source = (ROOT / path).read_text(encoding="utf-8")
    package = Path(path).parent.as_posix().replace("/", ".")
    named = _names_in(source, package)
    if path.startswith("tfamp/"):
        named = imports(source, package)
    files = {_file_of(name) for name in set(named)}
    return frozenset(file for file in files if file and file != path)


def distances(changed: Iterable[str]) -> dict[str, int]:
    """Returns the files that reach one of the given ones, and over how many imports.

    Args:
        changed: Paths from the root of the repository.

    Example:
        >>> found = distances(["tfamp/records/formats.py"])
        >>> found["tfamp/records/formats.py"], found["tests/formats_test.py"]
        (0, 1)
    """
    importers: dict[str, list[str]] = {}
    for path in _modules().values():
        for imported in _imported(path):
            importers.setdefault(imported, []).append(path)
    found = dict.fromkeys(changed, 0)
    queue = deque(found)
    while queue:
        path = queue.popleft()
        for importer in importers.get(path, []):
            if importer not in found and not importer.endswith("conftest.py"):
                found[importer] = found[path] + 1
                queue.append(importer)
    return found


def nearness(changed: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Returns how near each file that reaches a changed one is; the least is nearest.

    A test whose file is named like what changed comes before one that is fewer imports
    away: `tests/loss_scale_step_test.py` is about `tfamp/loss_scale/step.py`.
    """
    words = [set(_WORD.findall(path)) - {"tfamp", "tests", "py"} for path in changed]
    return {
        path: (-max(len(set(_WORD.findall(path)) & each) for each in words), distance)
        for path, distance in distances(changed).items()
    }


def changed_files(base: str = "HEAD") -> list[str]:
    """Returns the paths that differ from a commit, new ones among them.

    Raises:
        ValueError: Git does not know the commit, or this is no clone.
    """
    commands = (
        ["git", "diff", "--name-only", base, "--"],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    found: list[str] = []
    for command in commands:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ValueError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
        found += done.stdout.splitlines()
    return found
