"""Caches in files under `unseen="error"`: elements are of today's files, or refused.

Every program reads a folder of photos and their masks, then someone draws the masks
anew. A second run of the program must either see that or say beforehand that it would
not.
"""

import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tfamp.data import Pipeline

NUM_PAIRS = 3


def draw(folder, shade):
    """Writes the same gray into all masks."""
    for number in range(NUM_PAIRS):
        pixels = np.full((4, 4 + shade // 100, 1), shade, np.uint8)
        png = tf.io.encode_png(pixels).numpy()
        (folder / "masks" / f"{number}.png").write_bytes(png)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    for number in range(NUM_PAIRS):
        png = tf.io.encode_png(np.full((4, 4, 1), number, np.uint8)).numpy()
        (tmp_path / "images" / f"{number}.png").write_bytes(png)
    draw(tmp_path, 50)
    names = [f"{tmp_path}/masks/{number}.png" for number in range(NUM_PAIRS)]
    (tmp_path / "list.txt").write_text("\n".join(names))
    return tmp_path


def images(folder):
    return sorted(str(path) for path in (folder / "images").iterdir())


def masks(folder):
    return [path.replace("/images/", "/masks/") for path in images(folder)]


def mean(png):
    pixels = tf.io.decode_png(png, 1)
    return tf.reduce_mean(tf.cast(pixels, tf.float32))


def mask_of(path):
    return tf.strings.regex_replace(path, "/images/", "/masks/")


def pair(path):
    return mean(tf.io.read_file(path)), mean(tf.io.read_file(mask_of(path)))


def by_python(path):
    def read(path):
        name = path.decode().replace("/images/", "/masks/")
        return pathlib.Path(name).read_bytes()

    return mean(tf.ensure_shape(tf.numpy_function(read, [path], tf.string), ()))


def from_names(read):
    return lambda folder: Pipeline.from_arrays(np.array(images(folder))).map(read)


PROGRAMS = {
    "names in an array": from_names(pair),
    "read by Python": from_names(by_python),
    "a folder of images": lambda folder: Pipeline.from_images(
        folder / "images", labels=None
    ).map(pair),
    "a dataset of names": lambda folder: Pipeline.from_dataset(
        tf.data.Dataset.from_tensor_slices(images(folder)).map(pair)
    ),
    "names of the masks in a dataset": lambda folder: Pipeline.from_dataset(
        tf.data.Dataset.from_tensor_slices(masks(folder)).map(tf.io.read_file)
    ),
    "each mask a dataset": lambda folder: Pipeline.from_dataset(
        tf.data.Dataset.from_tensor_slices(masks(folder)).interleave(
            lambda path: tf.data.Dataset.from_tensors(tf.io.read_file(path))
        )
    ),
}


def elements(pipeline):
    return [tf.nest.map_structure(lambda t: t.numpy(), e) for e in pipeline.build()]


@pytest.mark.quick("names in an array")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_masks_that_were_drawn_anew_are_seen_or_the_cache_is_refused(folder, program):
    def run():
        return program(folder).cache(folder / "cache", unseen="error")

    try:
        first = elements(run())
    except ValueError as error:
        assert "would not notice changes in" in str(error)
        assert "after the cache" in str(error), "the remedy"
        assert not [name for name in os.listdir(folder) if name.startswith("cache")]
        return
    assert str(first) == str(elements(run()))
    draw(folder, 250)
    assert str(first) != str(elements(run())), "masks of yesterday"


@pytest.mark.quick("names in an array")
@pytest.mark.parametrize("name", ["names in an array", "a dataset of names"])
def test_by_default_what_is_not_noticed_is_logged_and_described(folder, name, caplog):
    pipeline = PROGRAMS[name](folder).cache(folder / "cache")
    list(pipeline.build())
    assert "does not notice changes in" in caplog.text
    assert "notice" in pipeline.describe()


SEEN = {
    "photos of a folder": lambda folder: Pipeline.from_images(
        folder / "masks", labels=None
    ).decode((4, 4)),
    "names of the masks in a dataset": PROGRAMS["names of the masks in a dataset"],
    "each mask a dataset": PROGRAMS["each mask a dataset"],
}


@pytest.mark.quick("photos of a folder")
@pytest.mark.parametrize("program", SEEN.values(), ids=SEEN)
def test_files_that_are_known_by_name_need_no_warning(folder, program, caplog):
    first = elements(program(folder).cache(folder / "cache", unseen="error"))
    draw(folder, 250)
    again = elements(program(folder).cache(folder / "cache", unseen="error"))
    assert str(first) != str(again)
    assert "does not notice" not in caplog.text
