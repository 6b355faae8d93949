"""What lies at a path when an export is written there: files, links, own notes."""

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


def test_files_that_a_deployment_put_there_come_along(deployed):
    retrained = model(seed=1)
    deployed.chmod(0o750)
    tfamp.export(retrained, deployed, format="saved_model")
    assert stat.S_IMODE(deployed.stat().st_mode) == 0o750
    assert [each.name for each in deployed.parent.iterdir()] == ["classifier"]
    is_export_of(deployed, retrained)
    assert (deployed / "labels.txt").read_text() == "cat\ndog\n"
    assert (deployed / "docs" / "card.md").read_text() == "# A model of cats"
    assert (deployed / "newest.txt").is_symlink()


def test_a_file_among_those_that_a_runtime_reads_is_named_and_left(deployed):
    (deployed / "variables" / "notes.txt").write_text("mine")
    before = files_in(deployed)
    with pytest.raises(FileExistsError, match=r"holds \['variables/notes.txt'"):
        tfamp.export(model(seed=1), deployed, format="saved_model")
    assert files_in(deployed) == before


def test_an_export_that_was_moved_away_when_its_process_was_killed_comes_back(tmp_path):
    path, former = tmp_path / "m", model()
    tfamp.export(former, path, format="saved_model")
    path.rename(tmp_path / ".m.former")
    with pytest.raises(ValueError, match="`keep_float32` names 'nowhere'"):
        tfamp.export(model(), path, format="saved_model", keep_float32=["nowhere"])
    is_export_of(path, former)
    assert [each.name for each in tmp_path.iterdir()] == ["m"]


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
    before = files_in(tmp_path)
    with pytest.raises(FileExistsError, match="expected a new name, an empty folder"):
        tfamp.export(model(), path, format="saved_model")
    assert files_in(tmp_path) == before
