"""The house rules of the package's files: floors, imports, length, no assert.

A file imports from floors below its own. Folders in `FOLDERS_WITH_SIBLINGS` also
import inside themselves, as do the files of floor 4, and never in a circle.
"""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

from tests.suite.imports import PACKAGE, imports

FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 350

# Floor -> files and folders of the package on it.
FLOORS = [
    [
        "formats",
        "results",
        "_amx",
        "_care",
        "_checks",
        "_console",
        "_environment",
        "_out_of_memory",
        "_patch",
        "_peaks",
        "_speeds",
        "_units",
        "_versions",
    ],
    [
        "_targets",
        "evidence",
        "findings",
        "graphs",
        "hardware",
        "keras_hooks",
        "probes",
        "rules",
    ],
    ["loss_scale"],
    ["managed"],
    ["policy", "assignment", "copying", "data", "snapshots", "bundles"],
    ["numerics", "serving"],
    ["memory"],
    ["training"],
    # Recovery asks triage, which stands below.
    ["callbacks"],
    ["report"],
    ["tuner", "compare"],
    ["batch_search"],
    ["cli"],
    ["__init__", "__main__"],
]
FLOOR_OF: dict[str, float] = {
    name: floor for floor, names in enumerate(FLOORS) for name in names
}
# Below all: records are files that appear whole.
FLOOR_OF["_files"] = -0.5
# Between the floors: records that the probes and the command line both know, the
# latter without TensorFlow.
FLOOR_OF["_memory_records"] = 0.5
# What stands around runs asks the probes, and the loss scale's care for `fit` asks it.
FLOOR_OF["runs"] = 1.5
# May import one another; "policy" and "assignment" stand for the whole of floor 4.
FLOORS_WITH_SIBLINGS = {4, 11}
FOLDERS_WITH_SIBLINGS = {
    "batch_search",
    "bundles",
    "callbacks",
    "cli",
    "compare",
    "data",
    "evidence",
    "graphs",
    "keras_hooks",
    "loss_scale",
    "managed",
    "memory",
    "numerics",
    "probes",
    "report",
    "rules",
    "runs",
    "snapshots",
    "training",
}
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
    floor, below = FLOOR_OF[top(importer)], FLOOR_OF[top(imported)]
    if top(importer) == top(imported):
        # A folder's `__init__` gathers what is in the folder.
        return importer in (top(importer), "") or (
            top(importer) in FOLDERS_WITH_SIBLINGS
        )
    return below < floor or (below == floor and floor in FLOORS_WITH_SIBLINGS)


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


def test_files_have_no_assert_and_at_most_350_lines():
    for path in FILES:
        source = path.read_text()
        found = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Assert)]
        assert found == [], f"python -O drops asserts: raise an error in {path}"
        assert len(source.splitlines()) <= MAX_LINES, f"two ideas: split {path}"


def test_imports_run_in_no_circle():
    graph = {
        module_name(path): own_modules(path) - {module_name(path), ""}
        for path in FILES
        if path.name != "__init__.py"
    }
    graphlib.TopologicalSorter(graph).prepare()


RULES = {
    "floor below": ("policy", "rules", True),
    "two floors below": ("cli.doctor", "hardware", True),
    "floor above": ("rules", "policy", False),
    "same floor": ("hardware", "rules", False),
    "loss scale to its hooks": ("loss_scale.step", "keras_hooks.optimizers", True),
    "hooks to the loss scale": ("keras_hooks.optimizers", "loss_scale.step", False),
    "siblings of floor 4": ("policy", "assignment", True),
    "inside keras_hooks": ("keras_hooks.nn", "keras_hooks.backend", True),
    "a folder's own list": ("keras_hooks", "keras_hooks.layers", True),
    "inside managed": ("managed.heads", "managed.islands", True),
    "hooks to their users": ("keras_hooks.nn", "managed.heads", False),
}


@pytest.mark.parametrize("importer, imported, allowed", RULES.values(), ids=RULES)
def test_floors_allow_and_forbid(importer, imported, allowed):
    assert may_import(importer, imported) is allowed


STATEMENTS = {
    "import": ("import tfamp.rules", "tfamp.rules"),
    "from the package": ("from tfamp import rules", "tfamp.rules"),
    "from the folder": ("from . import nn", "tfamp.keras_hooks.nn"),
    "from the folder above": ("from .. import rules", "tfamp.rules"),
    "from a file above": ("from ..rules import Rule", "tfamp.rules.Rule"),
    "in a function": ("def f():\n    import keras.src.ops", "keras.src.ops"),
}


@pytest.mark.parametrize("statement, name", STATEMENTS.values(), ids=STATEMENTS)
def test_every_form_of_import_is_read(statement, name):
    assert list(imports(statement, "tfamp.keras_hooks")) == [name]
