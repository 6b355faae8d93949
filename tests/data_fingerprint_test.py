"""Which changes of a program give its pipeline another cache in files, and which none.

Each pipeline is built twice as it is and once changed; what counts is the number of
caches in the folder.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfamp.data import Pipeline


def num_caches(folder):
    return sum(path.is_dir() for path in folder.iterdir())


def cached(pipeline, folder):
    pipeline.cache(folder / "cache").build()
    return num_caches(folder)


def numbers():
    return Pipeline.from_arrays(np.arange(3), np.arange(3))


def mapped(function):
    return numbers().map(lambda x, y: (function(x), y))


def adding(number):
    return lambda x: x + number


class Callable:
    def __init__(self, number):
        self.number = number

    def __call__(self, x):
        return x + self.number


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
    "an object": lambda n: mapped(Callable(n)),
    "a tensor": lambda n: mapped(adding(tf.constant(n, tf.int64))),
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
    made = [make(1), make(1), make(2)]  # together, so that none is reused
    found = [cached(pipeline, tmp_path) for pipeline in made]
    assert found == [1, 1, 2]


PROGRAM = """
import numpy as np
import tensorflow as tf
import mine.ops
from tfamp.data import Pipeline

SETTINGS = {"b": 1, "a": (2, 3)}

def scaled(x):
    x = tf.ensure_shape(tf.numpy_function(mine.ops.scale, [x], tf.int64), ())
    return x + SETTINGS["b"]

print(next(iter(Pipeline.from_arrays(np.arange(1, 4)).map(scaled).cache("c").build())))
"""


@pytest.mark.slow
def test_another_process_has_the_same_cache_until_a_module_changes(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    found = []
    for seed, factor in ((0, 1), (7, 1), (0, 2)):
        # Hashes of strings, which order sets, are others by seed.
        env = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": path}
        ops = f"def scale(x):\n    return x * {factor}\n"
        (tmp_path / "mine" / "ops.py").write_text(ops)
        done = subprocess.run(
            [sys.executable, "-B", "program.py"],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        value = int(done.stdout.split("tf.Tensor(")[1].split(",")[0])
        found.append((value, num_caches(tmp_path) - 1))
    assert found == [(2, 1), (2, 1), (3, 2)]


UNSEEN = {
    "a Python function": (
        lambda: mapped(by_python(1)),
        "files and states that Python code in the dataset uses",
    ),
    "names that are made": (
        lambda: mapped(lambda x: tf.io.read_file("/a/" + tf.strings.as_string(x))),
        "files that ReadFile reads",
    ),
}


@pytest.mark.parametrize("make, told", UNSEEN.values(), ids=UNSEEN)
def test_what_cannot_be_looked_into_is_named_and_may_be_refused(make, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        make().cache(tmp_path / "cache", unseen="error").build()
    assert num_caches(tmp_path) == 0
