"""Which changes of a program or its files give another cache in files, and which none.

Each pipeline is built twice as it is and once changed; what counts is the number of
caches in the folder.
"""

import functools
import os
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf

from tfamp.data import Pipeline


def num_caches(folder):
    return sum(path.is_dir() for path in folder.glob("cache*"))


def numbers():
    return Pipeline.from_arrays(np.arange(3), np.arange(3))


def mapped(function):
    return numbers().map(lambda x, y: (function(x), y))


def adding(number):
    return lambda x: x + number


def lookup(number):
    words = tf.constant(["a", f"b{number}"])
    pairs = tf.lookup.KeyValueTensorInitializer(words, tf.constant([0, 1], tf.int64))
    table = tf.lookup.StaticHashTable(pairs, -1)
    return lambda x: table.lookup(tf.strings.as_string(x))


def by_python(number):
    def add(x):
        return x + number

    return lambda x: tf.ensure_shape(tf.numpy_function(add, [x], tf.int64), ())


# What a pipeline is made of, given 1 or 2.
MAKERS = {
    "a closure": lambda n: mapped(adding(n)),
    "an object": lambda n: mapped(functools.partial(tf.add, tf.constant(n, tf.int64))),
    "a variable": lambda n: mapped(adding(tf.Variable(n, dtype=tf.int64))),
    "a table": lambda n: mapped(lookup(n)),
    "a function of NumPy's": lambda n: mapped(by_python(n)),
    "a predicate": lambda n: numbers().filter(lambda x, y: x < n),
    "arrays": lambda n: Pipeline.from_arrays(np.arange(3) * n),
    "a dataset": lambda n: Pipeline.from_dataset(
        tf.data.Dataset.range(5).map(lambda x: x + n).shuffle(4, seed=1)
    ),
}


@pytest.mark.filterwarnings("ignore:The value of the smallest subnormal")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_change_gives_another_cache_and_the_same_does_not(make, tmp_path):
    found = []
    for pipeline in [make(1), make(1), make(2)]:  # together, so that none is reused
        pipeline.cache(tmp_path / "cache").build()
        found.append(num_caches(tmp_path))
    assert found == [1, 1, 2]


PROGRAM = """
import numpy as np
import tensorflow as tf
import mine
from tfamp.data import Pipeline

SETTINGS = {"b": 1, "a": (2, 3)}

def scaled(x):
    x = tf.ensure_shape(tf.numpy_function(mine.scale, [x], tf.int64), ())
    return x + SETTINGS["b"]

pipeline = Pipeline.from_arrays(np.arange(1, 4)).map(scaled).cache("cache")
print(next(pipeline.build().as_numpy_iterator()))
"""


@pytest.mark.slow
def test_another_process_has_the_same_cache_until_a_module_changes(tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    path = os.pathsep.join([str(tmp_path), str(pathlib.Path(__file__).parents[1])])
    found = []
    for seed, factor in ((0, 1), (7, 1), (0, 2)):
        # Hashes of strings, which order sets, are others by seed.
        env = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": path}
        (tmp_path / "mine.py").write_text(f"def scale(x):\n    return x * {factor}\n")
        printed = subprocess.check_output(
            [sys.executable, "-B", "program.py"], cwd=tmp_path, env=env, text=True
        )
        found.append((int(printed.split()[-1]), num_caches(tmp_path)))
    assert found == [(2, 1), (2, 1), (3, 2)]


# Photos and their masks, which somebody draws anew. A second run of a program either
# sees that or has said beforehand that it would not.


def draw(folder, shade):
    """Writes the same gray into all masks."""
    for number in range(3):
        pixels = np.full((4, 4 + shade // 100, 1), shade, np.uint8)
        png = tf.io.encode_png(pixels).numpy()
        (folder / "masks" / f"{number}.png").write_bytes(png)


@pytest.fixture
def folder(tmp_path):
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
        for number in range(3):
            png = tf.io.encode_png(np.full((4, 4, 1), number, np.uint8)).numpy()
            (tmp_path / name / f"{number}.png").write_bytes(png)
    draw(tmp_path, 50)
    return tmp_path


def names(folder, name="images"):
    return sorted(str(path) for path in (folder / name).iterdir())


def mask_of(path):
    return tf.io.read_file(tf.strings.regex_replace(path, "/images/", "/masks/"))


def mask_by_python(path):
    def read(path):
        name = path.decode().replace("/images/", "/masks/")
        return pathlib.Path(name).read_bytes()

    return tf.ensure_shape(tf.numpy_function(read, [path], tf.string), ())


def from_names(read):
    return lambda folder: Pipeline.from_arrays(np.array(names(folder))).map(read)


def slices(folder, name):
    return tf.data.Dataset.from_tensor_slices(names(folder, name))


UNSEEN = {
    "names in an array": from_names(mask_of),
    "read by Python": from_names(mask_by_python),
    "a folder of images": lambda folder: Pipeline.from_images(
        folder / "images", labels=None
    ).map(mask_of),
    "a dataset of names": lambda folder: Pipeline.from_dataset(
        slices(folder, "images").map(mask_of)
    ),
}


@pytest.mark.parametrize("program", UNSEEN.values(), ids=UNSEEN)
def test_files_that_are_not_seen_are_told_of_and_refused_if_asked(
    folder, program, caplog
):
    message = "would not notice changes in.*after the cache"
    with pytest.raises(ValueError, match=message):
        program(folder).cache(folder / "cache", unseen="error").build()
    assert num_caches(folder) == 0
    program(folder).cache(folder / "cache").build()
    assert "does not notice changes in" in caplog.text
    assert "notice" in program(folder).cache(folder / "cache").describe()


SEEN = {
    "photos of a folder": lambda folder: Pipeline.from_images(
        folder / "masks", labels=None
    ).decode((4, 4)),
    "names of the masks in a dataset": lambda folder: Pipeline.from_dataset(
        slices(folder, "masks").map(tf.io.read_file)
    ),
    "each mask a dataset": lambda folder: Pipeline.from_dataset(
        slices(folder, "masks").interleave(
            lambda path: tf.data.Dataset.from_tensors(tf.io.read_file(path))
        )
    ),
}


@pytest.mark.quick("photos of a folder")
@pytest.mark.parametrize("program", SEEN.values(), ids=SEEN)
def test_files_that_are_known_by_name_need_no_warning(folder, program, caplog):
    found = []
    for shade in (50, 50, 250):
        if shade == 250:
            draw(folder, shade)
        cached = program(folder).cache(folder / "cache", unseen="error").build()
        found.append(str(list(cached.as_numpy_iterator())))
    assert found[0] == found[1] != found[2]
    assert "does not notice" not in caplog.text
