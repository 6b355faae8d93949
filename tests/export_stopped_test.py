"""Exports that Ctrl-C, an error or a full disk stops leave nothing half-written."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import pytest

from tfamp.serving.exports import folders

L = keras.layers
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


def test_a_folder_takes_the_place_of_a_former_one_whole(source, target):
    folders.place(source, target)
    assert left_in(target.parent) == ["m", *(f"m/{name}" for name in left_in(source))]
    assert (target / "export.json").read_text() == "export.json"
    folders.place(source, target.with_name("new"))
    assert left_in(target.with_name("new")) == left_in(source)


@pytest.mark.parametrize("number", range(1, 10))  # 4 folders, 3 files, 2 moves
@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_leaves_the_former_folder_or_the_whole_new_one(
    number, when, source, target, monkeypatch
):
    steps = [
        (folders.os, "replace"),
        (folders.shutil, "copy2"),
        (Path, "mkdir"),
    ]
    left = [number]

    def stopping(original):
        def call(*args, **options):
            left[0] -= 1
            if left[0] == 0 and when == "before":
                raise KeyboardInterrupt
            result = original(*args, **options)
            if left[0] == 0 and when == "after":
                raise KeyboardInterrupt
            return result

        return call

    for owner, name in steps:
        monkeypatch.setattr(owner, name, stopping(getattr(owner, name)))
    with pytest.raises(KeyboardInterrupt):
        folders.place(source, target)
    monkeypatch.undo()
    former = ["m", "m/export.json"]
    new = ["m", *(f"m/{name}" for name in left_in(source))]
    assert left_in(target.parent) in (former, new)
    text = (target / "export.json").read_text()
    assert text == (FORMER if left_in(target.parent) == former else "export.json")


def test_a_full_disk_is_told_and_leaves_the_former_folder(source, target, monkeypatch):
    def full(file, copy, **options):
        Path(copy).write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copy2", full)
    text = (
        f"`path` is {str(target)!r}, which could not be written (No space left on "
        "device); expected room for 30 bytes and the right to write. What was there is "
        "as it was. Free some space, or pass another path."
    )
    with pytest.raises(OSError, match=re.escape(text)) as caught:
        folders.place(source, target)
    assert caught.value.errno == errno.ENOSPC
    assert left_in(target.parent) == ["m", "m/export.json"]
    assert (target / "export.json").read_text() == FORMER


@pytest.mark.slow("a process, and seconds until it writes")
@pytest.mark.skipif(os.name != "posix", reason="sends the signal of Ctrl-C")
def test_ctrl_c_ends_the_command_and_leaves_no_file(target, tmp_path_factory):
    pytest.importorskip("tf2onnx")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    scratch = tmp_path_factory.mktemp("scratch")
    model = keras.Sequential([keras.Input((8,)), L.Dense(4)])
    model.save(elsewhere / "model.keras")
    words = ["export", str(elsewhere / "model.keras"), f"--out={target}"]
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "tfamp", *words, "--format=onnx"],
        env=dict(os.environ, TMPDIR=str(scratch), PYTHONPATH=path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches the processes it starts, too
    )
    try:
        deadline = time.monotonic() + 100
        while not list(scratch.glob("tfamp-export-*/*/model.onnx")):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert left_in(target.parent) == ["m", "m/export.json"]
    assert (target / "export.json").read_text() == FORMER
    assert list(scratch.glob("tfamp-*")) == []
