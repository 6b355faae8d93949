"""Fingerprints of pipelines: what changes them, what does not, and what they miss."""

import functools
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp.data._fingerprint import fingerprint


def digest(value):
    return fingerprint({"part": value}).digest


def adding(number):
    return lambda x: x + number


def calling(inner):
    def outer(x):
        return inner(x)

    return outer


class Callable:
    def __init__(self, number):
        self.number = number

    def __call__(self, x):
        return x + self.number


def mapped(number):
    def branch(x):
        return tf.cond(x > 3, lambda: x + number, lambda: x)

    return tf.data.Dataset.range(10).map(branch).shuffle(4, seed=1)


def using_a_global_inside(number):
    names = {"__name__": __name__, "scale": number}
    exec("def outer(x):\n    return (lambda y: y * scale)(x)", names)
    return names["outer"]


def dense(value):
    layer = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(value))
    layer.build((1, 2))
    return layer


MAKERS = {
    "number": lambda n: n,
    "array": lambda n: np.arange(3) + n,
    "tensor": lambda n: tf.constant([n, 2]),
    "strings": lambda n: np.array([f"a{n}", "b"], object),
    "closure": adding,
    "inner function": lambda n: calling(adding(n)),
    "global of an inner function": using_a_global_inside,
    "partial": lambda n: functools.partial(np.add, n),
    "object": Callable,
    "method": lambda n: Callable(n).__call__,
    "tf.function": lambda n: tf.function(adding(n)),
    "layer": dense,
    "dataset": mapped,
    "dict": lambda n: {"b": 1, "a": n},
    "set": lambda n: {1, 5 + n},
    "variable": lambda n: tf.Variable(float(n)),
    "default": lambda n: eval(f"lambda x, y={n}: x + y"),
    "keyword default": lambda n: eval(f"lambda x, *, y={n}: x + y"),
    "operation": lambda n: tf.data.Dataset.range(9).map((tf.abs, tf.negative)[n - 1]),
    "result": lambda n: tf.data.Dataset.range(9).map(lambda x: (-x, tf.abs(x))[n - 1]),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_equal_makes_agree_and_others_differ(make):
    assert digest(make(1)) == digest(make(1))
    assert digest(make(1)) != digest(make(2))


def test_order_and_nesting_count():
    assert digest([1, 2]) != digest([2, 1])
    assert digest([[1], 2]) != digest([1, [2]])
    assert digest("12") != digest(["1", "2"])
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def test_a_value_that_holds_itself_ends():
    loop = [1]
    loop.append(loop)
    assert digest(loop) != digest([1])


def lines(paths):
    return tf.data.TextLineDataset(paths)


def contents(paths):
    return tf.data.Dataset.from_tensor_slices(paths).map(tf.io.read_file)


def interleaved(paths):
    names = tf.data.Dataset.from_tensor_slices([[path] for path in paths])
    return names.interleave(tf.data.TextLineDataset)


def tables_of_lines(paths):
    def read(number):
        return number, tf.io.read_file(paths[-1])

    return tf.data.Dataset.range(3).map(read)


READERS = {
    "lines": lines,
    "contents": contents,
    "interleaved": interleaved,
    "in the function": tables_of_lines,
    "an array of names": np.array,
    "a tensor of names": tf.constant,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("num_files", [1, 2, 40], ids="{}files".format)
def test_a_file_that_is_named_counts_by_its_change(tmp_path, read, num_files):
    paths = [str(tmp_path / f"{number}.txt") for number in range(num_files)]
    for path in paths:
        Path(path).write_text("a\n")
    made = read(paths)
    before = digest(made)
    assert digest(read(paths)) == before
    Path(paths[-1]).write_text("a\nb\n")
    assert digest(made) != before
    assert fingerprint({"source": made}).unseen == ()


@pytest.mark.parametrize(
    "text",
    ["a" * 5000, "a/" * 3000, "a\0b", "\n", "é" * 300],
    ids=lambda text: len(text),
)
def test_texts_that_name_no_file_are_no_error(text):
    assert digest(tf.data.Dataset.from_tensor_slices([text]))
    assert digest(np.array([text], object))


def test_files_under_names_that_a_dataset_makes_are_said(tmp_path):
    folder = tf.constant(str(tmp_path) + "/")
    names = tf.data.Dataset.range(3).map(lambda n: folder + tf.strings.as_string(n))
    unseen = fingerprint({"source": names.map(tf.io.read_file)}).unseen
    assert unseen == ("files that ReadFile reads",)


def test_what_cannot_be_looked_into_is_named():
    generated = tf.data.Dataset.from_generator(
        lambda: range(3), output_signature=tf.TensorSpec((), tf.int64)
    )
    unseen = fingerprint({"source": generated}).unseen
    assert unseen == ("a Python function inside a dataset",)
    assert fingerprint({"source": mapped(1)}).unseen == ()
