"""What loading a file may and may not do, as SECURITY.md says it."""

import ast
import io
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

import tfamp
from tfamp.stepping import snapshot_files, snapshots

PACKAGE = Path(tfamp.__file__).parent
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
MODULES = ("pickle", "cloudpickle", "_pickle()")
LOADERS = {f"{module}.{name}" for module in MODULES for name in ("load", "loads")}
# What a trial is given by the process that starts it; and models that are in memory,
# of the self-test and ahead of a measurement.
UNPICKLE = {"trials/parcel.py", "dtypes/hooks.py", "memory/estimator.py"}
# A copy of a model that is in memory, through a file of its own.
UNSAFE = {"stepping/unchanged.py"}


class Marks:
    """Writes a file when it is unpickled, as code in a pickle would."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def calls_of(path: Path) -> list[ast.Call]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_pickles_are_read_where_the_page_says_and_nowhere_else():
    found = {
        name
        for name, path in FILES.items()
        for call in calls_of(path)
        if ast.unparse(call.func) in LOADERS
    }
    assert found == UNPICKLE


def test_no_file_is_loaded_with_code_in_it():
    unsafe = set()
    for name, path in FILES.items():
        for call in calls_of(path):
            passed = {each.arg: ast.unparse(each.value) for each in call.keywords}
            assert passed.get("allow_pickle") in (None, "False"), name
            assert ast.unparse(call.func) not in ("eval", "exec"), name
            assert "enable_unsafe_deserialization" not in ast.unparse(call.func), name
            if passed.get("safe_mode") == "False":
                unsafe.add(name)
    assert unsafe == UNSAFE


def test_a_model_with_code_in_it_is_refused(tmp_path):
    layers = [keras.Input((2,)), keras.layers.Lambda(lambda x: x * 2)]
    model = keras.Sequential(layers)
    tfamp.apply(model, "mixed_bfloat16")
    path = tmp_path / "model.keras"
    model.save(path)
    with pytest.raises(ValueError, match="safe_mode=False"):
        tfamp.load_model(path)
    loaded = tfamp.load_model(path, safe_mode=False)
    assert loaded(np.ones((1, 2))).numpy().tolist() == [[2.0, 2.0]]


def test_a_snapshot_with_code_in_it_is_refused(tmp_path):
    path, mark = tmp_path / "good-000001.npz", tmp_path / "was here"
    snapshot_files.write(snapshots.State({"a": np.zeros(2, np.float32)}, {}), path)
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    array = io.BytesIO()
    np.save(array, np.array([Marks(mark)], dtype=object), allow_pickle=True)
    (name,) = [name for name in members if not name.startswith("about")]
    members[name] = array.getvalue()
    with zipfile.ZipFile(path, "w") as file:
        for each, content in members.items():
            file.writestr(each, content)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        snapshot_files.read(path)
    assert not mark.exists()
