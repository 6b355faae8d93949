"""What an export is: its folder on disk, whole or not at all, and its signature."""

import errno
import json
import re
import shutil
import stat

import keras
import numpy as np
import pytest

import tfamp
from tfamp.serving.runtimes import manifest
from tfamp.serving.runtimes.signature import LoadedModel, Signature, TensorSpec

FLOATS, INTS = (None, 2), (None, None)
ONE = Signature(
    (TensorSpec("x", FLOATS, "float32"),), (TensorSpec("y", FLOATS, "float32"),)
)
TWO = Signature(
    (TensorSpec("a", FLOATS, "float32"), TensorSpec("b", INTS, "int32")),
    (TensorSpec("u", FLOATS, "float32"), TensorSpec("v", INTS, "int32")),
)


class Echo(LoadedModel):
    """Gives its inputs back, under the names of its outputs."""

    def run(self, inputs):
        names = [spec.name for spec in self.signature.outputs]
        return dict(zip(names, inputs.values(), strict=True))


def echo(signature, x):
    return Echo("onnx", None, signature, None).predict(x)


def test_inputs_come_by_order_or_by_name():
    a, b = np.ones((3, 2), np.float64), np.arange(6).reshape(3, 2)
    for answer in (echo(TWO, (a, b)), echo(TWO, {"b": b, "a": a})):
        assert list(answer) == ["u", "v"]
        assert answer["u"].dtype == np.float32 and answer["v"].dtype == np.int32
        np.testing.assert_array_equal(answer["v"], b)


ONES = np.ones((1, 2))
WRONG = {
    "shape": (ONE, np.ones((2, 3)), "is of shape (2, 3); expected (None, 2)"),
    "no batch": (ONE, np.ones(2), "`x[np.newaxis]`"),
    "text": (ONE, np.array([["a", "b"]]), "expected float32"),
    "ragged": (ONE, [[1, 2], [3]], "Pass rows of one length"),
    "name": (ONE, {"z": ONES}, "Add ['x']. Leave out ['z']."),
    "one": (TWO, ONES, "takes 2 inputs, ['a', 'b'], not 1"),
    "float": (TWO, [ONES, ONES], "expected int32"),
    "wide": (TWO, [ONES, np.array([[2**40]])], "expected int32"),
    "size": (TWO, [ONES, np.ones((2, 2), int)], "have batches of {'a': 1, 'b': 2}"),
}


@pytest.mark.parametrize("signature, x, text", WRONG.values(), ids=WRONG)
def test_inputs_that_do_not_fit_are_told(signature, x, text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        echo(signature, x)


# The first integer that float32 has not, a user's number, and the largest one.
@pytest.mark.parametrize("number", [2**24 + 1, 123456789, 2**64 - 1])
def test_an_integer_that_the_input_would_round_is_refused(number):
    with pytest.raises(TypeError, match="integers that float32 rounds") as caught:
        echo(ONE, np.array([[3, number]], "uint64"))
    assert ".astype('float32')" in str(caught.value)


@pytest.mark.parametrize("x", [[[2**24, -7]], [[True, False]], [[2**40, 0.1]]])
def test_numbers_that_float32_holds_need_no_cast(x):
    found = echo(ONE, np.array(x))
    np.testing.assert_array_equal(found, np.array(x).astype("float32"))


def linear(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "m"
    tfamp.export(linear(), path, format="saved_model")
    return path


CHANGED = {
    "of format version 99": lambda record, path: record.update(format_version=99),
    "is damaged": lambda record, path: record.pop("files"),
    "lies outside of": lambda record, path: record["files"].update({"../other": "0"}),
    "is not named by export.json": lambda record, path: (
        path / "variables" / "more"
    ).write_text(""),
    "is changed: its SHA-256 is": lambda record, path: (
        path / "saved_model.pb"
    ).write_text("other"),
}


@pytest.mark.parametrize("text", CHANGED)
def test_folders_that_are_not_as_written_are_refused(text, plain, tmp_path):
    path = tmp_path / "m"
    shutil.copytree(plain, path)
    record = json.loads((path / "export.json").read_text())
    CHANGED[text](record, path)
    (path / "export.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=re.escape(text)):
        tfamp.load_exported(path)


FORMER = '{"runtime": "onnx", "files": {}}'


@pytest.fixture
def target(tmp_path):
    """A former export."""
    path = tmp_path / "m"
    path.mkdir()
    (path / "export.json").write_text(FORMER)
    return path


@pytest.fixture
def source(tmp_path_factory):
    """A folder that is to take its place."""
    path = tmp_path_factory.mktemp("source")
    (path / "variables").mkdir()
    for name in ("export.json", "model", "variables/data"):
        (path / name).write_text(name)
    return path


def left_in(folder):
    """Returns what lies in a folder: texts of files, None for folders and links."""
    return {
        str(file.relative_to(folder)): file.read_text() if file.is_file() else None
        for file in folder.rglob("*")
    }


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 5))  # 2 folders, 2 moves
def test_ctrl_c_leaves_the_former_folder_or_the_whole_new_one(
    number, when, source, target, monkeypatch
):
    left = [number]

    def stopping(original):
        def call(*args, **options):
            own = left[0] = left[0] - 1  # a copy of a folder copies those inside
            if own == 0 and when == "before":
                raise KeyboardInterrupt
            result = original(*args, **options)
            if own == 0:
                raise KeyboardInterrupt
            return result

        return call

    for owner, name in ((manifest.os, "replace"), (manifest.shutil, "copytree")):
        monkeypatch.setattr(owner, name, stopping(getattr(owner, name)))
    with pytest.raises(KeyboardInterrupt):
        manifest.place(source, target)
    assert [each.name for each in target.parent.iterdir()] == ["m"]
    assert left_in(target) in ({"export.json": FORMER}, left_in(source))


def test_a_full_disk_is_told_and_leaves_the_former_folder(source, target, monkeypatch):
    def full(source, copy):
        copy.mkdir()
        (copy / "model").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(OSError, match="expected room for the export and") as caught:
        manifest.place(source, target)
    assert caught.value.errno == errno.ENOSPC
    assert left_in(target.parent) == {"m": None, "m/export.json": FORMER}


def test_an_export_that_was_moved_away_when_its_process_was_killed_comes_back(target):
    target.rename(target.with_name(".m.former"))
    with pytest.raises(ValueError, match="`keep_float32` names 'nowhere'"):
        tfamp.export(linear(), target, format="saved_model", keep_float32=["nowhere"])
    assert left_in(target.parent) == {"m": None, "m/export.json": FORMER}


def test_files_that_a_deployment_put_there_come_along(plain, tmp_path):
    path, retrained = tmp_path / "classifier", linear(seed=1)
    shutil.copytree(plain, path)
    (path / "labels.txt").write_text("cat\ndog\n")
    (path / "docs").mkdir()
    (path / "docs" / "card.md").write_text("# A model of cats")
    (path / "newest.txt").symlink_to("labels.txt")
    path.chmod(0o750)
    tfamp.export(retrained, path, format="saved_model")
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert [each.name for each in tmp_path.iterdir()] == ["classifier"]
    x = np.ones((4, 3), "float32")
    found = tfamp.load_exported(path).predict(x)
    np.testing.assert_allclose(found, retrained(x), atol=1e-5)
    assert (path / "labels.txt").read_text() == "cat\ndog\n"
    assert (path / "docs" / "card.md").read_text() == "# A model of cats"
    assert (path / "newest.txt").is_symlink()


def test_a_file_among_those_that_a_runtime_reads_is_named_and_left(source, target):
    (target / "variables").mkdir()
    (target / "variables" / "notes.txt").write_text("mine")
    before = left_in(target.parent)
    with pytest.raises(FileExistsError, match=r"holds \['variables/notes.txt'"):
        manifest.place(source, target)
    assert left_in(target.parent) == before


@pytest.mark.parametrize("what", ["a file", "a folder", "a link"])
def test_what_is_no_export_is_left(what, tmp_path):
    path = tmp_path / "m"
    if what == "a file":
        path.write_text("precious")
    elif what == "a folder":
        path.mkdir()
        (path / "export.json").write_text('{"size": [1080, 1920]}')
        (path / "film.mov").write_text("precious")
    else:
        path.symlink_to("v1")
    before = left_in(tmp_path)
    with pytest.raises(FileExistsError, match="expected a new name, an empty folder"):
        tfamp.export(linear(), path, format="saved_model")
    assert left_in(tmp_path) == before
