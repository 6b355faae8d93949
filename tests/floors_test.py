"""The house rules of the package's files beside their floors: Keras, length, names.

Which file may import which stands in `pyproject.toml`; `make lint` looks at it.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tfamp"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 600


def imported_from(source: str) -> set[str]:
    """Returns the modules that a file names in its imports."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    return plain | {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}


def name_of(path: Path) -> str:
    """Returns the file or folder of the package that a path lies in."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_only_keras_hooks_touch_private_keras():
    for path in FILES:
        if name_of(path) == "keras_hooks":
            continue
        names = imported_from(path.read_text())
        assert [name for name in names if name.startswith("keras.src")] == [], path
        attributes = attributes_in(path.read_text())
        assert "keras.src" not in map(ast.unparse, attributes), path
        assert private_of_others(attributes) & private_names_of_keras() == set(), path


def attributes_in(source: str) -> list[ast.Attribute]:
    """Returns every look-up of an attribute."""
    nodes = ast.walk(ast.parse(source))
    return [node for node in nodes if isinstance(node, ast.Attribute)]


def private_of_others(attributes: list[ast.Attribute]) -> set[str]:
    """Returns the private ones that are read of anything but the code's own class."""
    return {
        node.attr
        for node in attributes
        if node.attr.startswith("_")
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    }


@functools.cache
def private_names_of_keras() -> set[str]:
    """Returns the private names of models, layers, optimizers and tensors."""
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    objects = [model, model.layers[0], model.optimizer, model.loss]
    names = {name for each in objects for name in dir(each)} | {"_keras_mask"}
    return {name for name in names if name.startswith("_") and name[1] != "_"}


def test_files_have_no_assert_and_at_most_600_lines():
    for path in FILES:
        source = path.read_text()
        found = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Assert)]
        assert found == [], f"python -O drops asserts: raise an error in {path}"
        assert len(source.splitlines()) <= MAX_LINES, f"two ideas: split {path}"


def test_the_page_on_architecture_names_files_and_all_folders():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    assert len(named) > 20
    homes = (PACKAGE, PACKAGE / "data", PACKAGE.parent)
    assert [n for n in named if not any((home / n).is_file() for home in homes)] == []
    folders = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert folders <= set(re.findall(r"`([a-z_]+)`", page))


def test_the_picture_of_the_floors_draws_every_import():
    architecture = pytest.importorskip("docs.architecture", reason="needs tomllib")
    drawn = [name for names in architecture.FLOORS for name in names]
    assert set(drawn) == architecture.SUBJECTS.keys()
    assert set(drawn) == {name_of(path) for path in FILES} - {"__init__", "__main__"}
    assert architecture.edges()["policy", "plan"] == 1
