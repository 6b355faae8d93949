"""What lies at a path when an export is written there: files, links, own notes."""

import errno
import json
import os
import stat

import keras
import numpy as np
import pytest
from keras import layers

import tfamp

X = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")


def model(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((3,)), layers.Dense(2)])


def files_in(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def is_export_of(path, kept):
    found = tfamp.load_exported(path).predict(X)
    np.testing.assert_allclose(found, kept(X).numpy(), atol=1e-5)


@pytest.fixture
def deployed(tmp_path):
    """An export beside which a deployment has files of its own."""
    path = tmp_path / "classifier"
    tfamp.export(model(), path, format="saved_model")
    (path / "labels.txt").write_text("cat\ndog\n")
    (path / "docs").mkdir()
    (path / "docs" / "card.md").write_text("# A model of cats")
    (path / "newest.txt").symlink_to("labels.txt")
    return path


@pytest.mark.slow
def test_files_that_a_deployment_put_there_outlive_a_retrained_model(deployed):
    retrained = model(seed=1)
    deployed.chmod(0o750)
    os.utime(deployed / "labels.txt", (10**9, 10**9))
    tfamp.export(retrained, deployed, format="saved_model")
    is_export_of(deployed, retrained)
    assert (deployed / "labels.txt").read_text() == "cat\ndog\n"
    assert (deployed / "labels.txt").stat().st_mtime == 10**9
    assert (deployed / "docs" / "card.md").read_text() == "# A model of cats"
    assert os.readlink(deployed / "newest.txt") == "labels.txt"
    assert stat.S_IMODE(deployed.stat().st_mode) == 0o750
    assert [each.name for each in deployed.parent.iterdir()] == ["classifier"]


@pytest.mark.slow("two conversions; exports to one format are above")
@pytest.mark.parametrize("format", ["onnx", "litert", "openvino"])
def test_another_format_takes_the_files_of_the_former_with_it(format, deployed):
    for package in {
        "onnx": ["tf2onnx", "onnxruntime"],
        "litert": ["ai_edge_litert"],
    }.get(format, ["openvino", "nncf"]):
        pytest.importorskip(package)
    tfamp.export(model(), deployed, format=format)
    is_export_of(deployed, model())
    left = {*files_in(deployed)} - {"labels.txt", "docs/card.md", "newest.txt"}
    written = json.loads((deployed / "export.json").read_text())["files"]
    assert left == {"export.json", *written}
    assert not (deployed / "variables").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["saved_model.pb", "variables/notes.txt"])
def test_a_file_where_the_export_has_its_own_is_named_and_left(name, tmp_path):
    path = tmp_path / "m"
    path.mkdir()
    record = {"format_version": 1, "runtime": "onnx", "files": {"model.onnx": "0"}}
    (path / "export.json").write_text(json.dumps(record))
    (path / "variables").mkdir()
    (path / name).write_text("precious")
    before = files_in(path)
    with pytest.raises(FileExistsError, match=name):
        tfamp.export(model(), path, format="saved_model")
    assert files_in(tmp_path) == {f"m/{key}": value for key, value in before.items()}


def fails(path, error, text):
    with pytest.raises(error, match=text):
        tfamp.export(model(), path, format="saved_model")


@pytest.mark.slow
def test_a_folder_with_some_other_export_json_is_no_former_export(tmp_path):
    path = tmp_path / "settings"
    path.mkdir()
    (path / "export.json").write_text('{"size": [1080, 1920]}')
    (path / "film.mov").write_text("precious")
    before = files_in(path)
    fails(path, FileExistsError, "something else is than an export")
    assert files_in(path) == before


@pytest.mark.slow
def test_a_file_is_left_and_named(tmp_path):
    path = tmp_path / "model"
    path.write_text("precious")
    fails(path, FileExistsError, "something else is than an export")
    assert path.read_text() == "precious"


@pytest.mark.slow
@pytest.mark.parametrize("points_to", ["nothing", "an empty folder", "an export"])
def test_a_link_is_left_and_told_where_it_points(points_to, tmp_path):
    version, link = tmp_path / "v1", tmp_path / "newest"
    if points_to != "nothing":
        version.mkdir()
    if points_to == "an export":
        record = {"format_version": 1, "runtime": "onnx", "files": {}}
        (version / "export.json").write_text(json.dumps(record))
    link.symlink_to("v1")
    before = files_in(tmp_path)
    fails(link, FileExistsError, "a link to 'v1'.*Pass what the link points to")
    assert os.readlink(link) == "v1" and files_in(tmp_path) == before
    names = {each.name for each in tmp_path.iterdir()}
    assert names == ({"newest"} if points_to == "nothing" else {"newest", "v1"})


@pytest.mark.slow
def test_the_folder_that_a_process_works_in_stays_under_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails(".", FileExistsError, "in which this process works")
    assert os.path.samefile(os.getcwd(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("is_of", ["the folder above", "the former export"])
def test_a_read_only_folder_is_told_before_any_work(is_of, tmp_path, monkeypatch):
    path = tmp_path / "m"
    path.mkdir()
    locked = tmp_path if is_of == "the folder above" else path
    access = os.access  # root may write everywhere
    monkeypatch.setattr(
        os, "access", lambda name, *rest: name != locked and access(name, *rest)
    )
    with pytest.raises(PermissionError, match="read-only.*Make it writable") as caught:
        tfamp.export(model(), path, format="saved_model")
    assert caught.value.errno == errno.EACCES
    assert list(path.iterdir()) == []
