"""Exports that Ctrl-C, an error or a full disk stops leave nothing half-written."""

import errno
import shutil

import pytest

from tfamp.serving.runtimes import manifest

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
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


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
    monkeypatch.undo()
    former = ["m", "m/export.json"]
    new = ["m", *(f"m/{name}" for name in left_in(source))]
    assert left_in(target.parent) in (former, new)
    text = (target / "export.json").read_text()
    assert text == (FORMER if left_in(target.parent) == former else "export.json")


def test_a_full_disk_is_told_and_leaves_the_former_folder(source, target, monkeypatch):
    def full(source, copy):
        copy.mkdir()
        (copy / "model").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(OSError, match="expected room for the export and") as caught:
        manifest.place(source, target)
    assert caught.value.errno == errno.ENOSPC
    assert left_in(target.parent) == ["m", "m/export.json"]
    assert (target / "export.json").read_text() == FORMER
