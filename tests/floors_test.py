"""The house rules of the package's files: floors, imports, length, no assert.

A file imports from floors below its own, and from siblings in its folder, never in a
circle. On a floor a folder may import from those ahead of it in the list where
`MAY_ASK_BEFORE` says so. `docs/architecture.md` draws the floors.
"""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

from tests.suite.imports import PACKAGE, imports

FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 600
MAX_FILES = 20

# Floor -> files and folders of the package on it.
FLOORS = [
    ["records"],
    ["machine", "keras_hooks", "graph"],
    ["loss_scale", "data"],
    ["dtypes", "plan", "policy", "models"],
    ["stepping", "trials"],
    ["numerics", "memory", "training"],
    ["callbacks", "distribute", "tuning", "serving", "comparison"],
    ["cli", "__init__", "__main__"],
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
# Floors on which the order of the list counts: what users call stands after what it
# calls, runs of trials take data as `stepping` does, Ray's loop brings a callback, and
# `serving` judges and searches as `tuning` does. Elsewhere folders of one floor do not
# know each other.
MAY_ASK_BEFORE = {3, 4, 6, 7}
FRAMEWORKS = {"tensorflow", "keras", "tf_keras"}


def module_name(path: Path) -> str:
    """Returns the dotted name of a file inside the package, "" for its `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def top(name: str) -> str:
    """Returns the file or folder of the package that `name` belongs to."""
    return name.split(".")[0] or "__init__"


@functools.cache
def imports_of(path: Path) -> list[str]:
    """Returns the dotted names that a file of the package imports."""
    folder = path.parent.relative_to(PACKAGE.parent)
    return list(imports(path.read_text(), ".".join(folder.parts)))


def own_modules(path: Path) -> set[str]:
    """Returns the files of the package that a file imports, by dotted name."""
    names = {module_name(file) for file in FILES}
    found = set()
    for imported in imports_of(path):
        if imported.split(".")[0] != "tfamp":
            continue
        parts = imported.split(".")[1:]
        # `from tfamp.policy import enable` names the file `policy`.
        while parts and ".".join(parts) not in names:
            parts.pop()
        found.add(".".join(parts))
    return found


def may_import(importer: str, imported: str) -> bool:
    """States whether one file of the package may import another."""
    folder, other = top(importer), top(imported)
    floor, below = FLOOR_OF[folder], FLOOR_OF[other]
    if folder == other or below < floor:
        return True
    names = FLOORS[floor]
    is_listed_before = below == floor and names.index(other) < names.index(folder)
    return is_listed_before and floor in MAY_ASK_BEFORE


def test_files_stand_on_a_floor():
    names = {top(module_name(path)) for path in FILES}
    assert names - FLOOR_OF.keys() == set(), "add them to FLOORS above"


def test_files_import_only_what_they_may():
    forbidden = []
    for path in FILES:
        importer = module_name(path)
        own = own_modules(path) - {importer}
        if importer not in ("", "__main__"):
            # The package itself: only its version and its lazy names are in there.
            own.discard("")
        if importer == "data":
            # Names that it loads on first use, from above too.
            own = {name for name in own if top(name) == "data"}
        forbidden += [
            (importer, name) for name in own if not may_import(importer, name)
        ]
    assert forbidden == []


def test_floor_0_imports_no_framework():
    for path in FILES:
        if FLOOR_OF.get(top(module_name(path)), 1) < 1:
            imported = {name.split(".")[0] for name in imports_of(path)}
            assert not FRAMEWORKS & imported, path


def test_only_keras_hooks_touch_private_keras():
    for path in FILES:
        if top(module_name(path)) == "keras_hooks":
            continue
        private = [name for name in imports_of(path) if name.startswith("keras.src")]
        assert private == [], path
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


def test_private_attributes_of_others_are_seen():
    source = "self._a(model._b, x.y._c[0], super()._d, _e, _f.g, cls._h, os._exit)"
    assert private_of_others(attributes_in(source)) == {"_b", "_c", "_exit"}
    assert {"_var_key", "_flatten_layers"} <= private_names_of_keras()


def test_files_have_no_assert_and_at_most_600_lines():
    for path in FILES:
        source = path.read_text()
        found = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Assert)]
        assert found == [], f"python -O drops asserts: raise an error in {path}"
        assert len(source.splitlines()) <= MAX_LINES, f"two ideas: split {path}"


def test_folders_have_at_most_20_files():
    folders = {path.parent for path in FILES}
    full = {
        str(folder.relative_to(PACKAGE)): count
        for folder in folders
        if (count := len(list(folder.glob("*.py")))) > MAX_FILES
    }
    assert full == {}


def test_no_module_has_the_name_of_a_public_function():
    import tfamp

    public = {
        name for name in dir(tfamp) if not isinstance(getattr(tfamp, name), type(ast))
    }
    modules = {top(module_name(path)) for path in FILES}
    assert public & modules == set()


def test_the_page_on_architecture_names_files_and_all_folders():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    assert len(named) > 20
    homes = (PACKAGE, PACKAGE / "data", PACKAGE.parent)
    assert [n for n in named if not any((home / n).is_file() for home in homes)] == []
    folders = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert folders <= set(re.findall(r"`([a-z_]+)`", page))


def test_imports_run_in_no_circle():
    graph = {
        module_name(path): own_modules(path) - {module_name(path), ""}
        for path in FILES
        if path.name != "__init__.py"
    }
    graphlib.TopologicalSorter(graph).prepare()


RULES = {
    "floor below": ("policy", "loss_scale.optimizer", True),
    "many floors below": ("cli.doctor", "machine.devices", True),
    "floor above": ("keras_hooks.nn", "policy", False),
    "another folder of the floor": ("machine.devices", "graph.plans", False),
    "the folder before": ("policy", "dtypes.hooks", True),
    "the folder after": ("dtypes.hooks", "policy", False),
    "hooks to the loss scale": ("keras_hooks.optimizers", "loss_scale.step", False),
    "inside a folder": ("keras_hooks.nn", "keras_hooks.backend", True),
    "hooks to their users": ("keras_hooks.nn", "dtypes.heads", False),
}


@pytest.mark.parametrize("importer, imported, allowed", RULES.values(), ids=RULES)
def test_floors_allow_and_forbid(importer, imported, allowed):
    assert may_import(importer, imported) is allowed


STATEMENTS = {
    "import": ("import tfamp.policy", "tfamp.policy"),
    "from the package": ("from tfamp import policy", "tfamp.policy"),
    "from the folder": ("from . import nn", "tfamp.keras_hooks.nn"),
    "from the folder above": ("from .. import policy", "tfamp.policy"),
    "from a file above": ("from ..policy import enable", "tfamp.policy.enable"),
    "in a function": ("def f():\n    import keras.src.ops", "keras.src.ops"),
}


@pytest.mark.parametrize("statement, name", STATEMENTS.values(), ids=STATEMENTS)
def test_every_form_of_import_is_read(statement, name):
    assert list(imports(statement, "tfamp.keras_hooks")) == [name]
