"""`recipes/datasets.py`: the builders that need no network, and `--dataset`."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.recipe_modules import shared
from tfamp.data import Pipeline

pytest.importorskip("tensorflow_datasets", reason="needs the extra `data`")


@pytest.fixture(scope="module")
def datasets():
    """The module under test, where recipes find it."""
    with shared("datasets") as (module,):
        yield module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("datasets")


@pytest.fixture(scope="module")
def digits(datasets, folder):
    pytest.importorskip("sklearn", reason="needs the extra `data`")
    return datasets.prepare(datasets.Digits, folder)


@pytest.fixture(scope="module")
def text(datasets, folder):
    return datasets.prepare(datasets.StdlibText, folder)


def read(builder, split):
    dataset = Pipeline.from_tfds(builder, split).batch(2000).build()
    return [part.numpy() for part in next(iter(dataset))]


def test_digits_are_those_of_scikit_learn(digits):
    from sklearn.datasets import load_digits

    original = load_digits()
    x_train, y_train = read(digits, "train")
    x_test, y_test = read(digits, "test")
    assert (len(x_train), len(x_test)) == (1437, 360)
    assert x_train.shape[1:] == (8, 8, 1)
    assert x_train.dtype == np.uint8
    # Level k of 16 became the nearest integer to 255 k / 16, so it can be told back.
    levels = np.rint(np.concatenate([x_train, x_test])[..., 0] / 255 * 16)
    rows = {
        (tuple(image.ravel().astype(int)), int(label))
        for image, label in zip(levels, np.concatenate([y_train, y_test]), strict=True)
    }
    assert rows == {
        (tuple(image.ravel().astype(int)), int(label))
        for image, label in zip(original.images, original.target, strict=True)
    }


def test_digits_are_split_within_each_class(digits):
    _, y_train = read(digits, "train")
    _, y_test = read(digits, "test")
    shares = np.bincount(y_test) / (np.bincount(y_train) + np.bincount(y_test))
    # A fifth of 174 to 183 digits, rounded to whole ones.
    np.testing.assert_allclose(shares, 0.2, atol=1 / 174)


def test_grey_levels_are_spread_over_uint8(datasets):
    levels = datasets.spread_grey_levels(np.arange(17.0))
    assert levels.dtype == np.uint8
    assert levels[[0, 1, 8, 16]].tolist() == [0, 16, 128, 255]
    assert len(set(levels.tolist())) == 17


def test_text_is_the_library_s_own_source(text):
    import sysconfig

    root = Path(sysconfig.get_path("stdlib"))
    sizes = {}
    for split in ("train", "validation"):
        dataset = Pipeline.from_tfds(text, split, as_supervised=False).build()
        for example in dataset.take(5):
            name = example["name"].numpy().decode()
            source = (root / name).read_text(encoding="utf-8", errors="replace")
            assert example["text"].numpy().decode() == source
        sizes[split] = sum(len(example["text"].numpy()) for example in dataset)
    total = sum(sizes.values())
    assert 2e6 < total < 4.2e6
    assert 0.05 < sizes["validation"] / total < 0.2


def test_files_are_chosen_by_name_and_size(datasets, tmp_path):
    for name in ("a.py", "pkg/b.py", "test/c.py", "pkg/tests/d.py", "e.txt", "f.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("x = 1\n")
    (tmp_path / "f.py").write_text("#" * (datasets.MAX_FILE_BYTES + 1))
    (tmp_path / "empty.py").write_text("")
    chosen = datasets.choose_files(tmp_path)
    assert sorted(chosen) == ["a.py", "pkg/b.py"]
    assert datasets.choose_files(tmp_path) == chosen


def test_files_stop_at_the_limit(datasets, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "MAX_TEXT_BYTES", 25)
    for i in range(9):
        (tmp_path / f"{i}.py").write_text("0123456789")
    assert len(datasets.choose_files(tmp_path)) == 2


def test_preparing_is_quiet_and_done_once(datasets, digits, folder, capfd):
    again = datasets.prepare(datasets.Digits, folder)
    assert again.data_dir == digits.data_dir
    assert capfd.readouterr().out == ""


def test_the_folder_follows_the_environment(datasets, tmp_path, monkeypatch):
    monkeypatch.setenv("TFAMP_DATA_DIR", str(tmp_path))
    assert datasets.data_dir() == tmp_path
    monkeypatch.delenv("TFAMP_DATA_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert datasets.data_dir() == tmp_path / "cache" / "tfamp" / "datasets"


def test_find_gives_an_embedded_dataset(datasets, digits, folder, monkeypatch):
    monkeypatch.setenv("TFAMP_DATA_DIR", str(folder))
    assert datasets.find("digits").is_prepared()


def test_find_names_an_unknown_dataset(datasets):
    with pytest.raises(ValueError, match=re.escape("Unknown dataset 'digitz'")):
        datasets.find("digitz")


def test_the_evaluation_split_is_test_else_validation(datasets, digits, text):
    assert datasets.evaluation_split(digits) == "test"
    assert datasets.evaluation_split(text) == "validation"
