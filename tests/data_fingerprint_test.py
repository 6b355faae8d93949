"""Fingerprints of pipelines: what changes them, what does not, and what they miss."""

import collections
import dataclasses
import enum
import functools
import json
import operator
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp.data.fingerprints import fingerprint


def digest(value):
    return fingerprint(value).digest


def unseen(value):
    return fingerprint(value).unseen


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

    @tf.function
    def traced(self, x):
        return x * self.number


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number


class OwnList(list):
    pass


@dataclasses.dataclass
class Record:
    number: int = dataclasses.field(compare=False)


class Held(keras.layers.Layer):
    """A layer that holds something its configuration does not tell."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def get_config(self):
        return {}


class NoConfig(Held):
    def get_config(self):
        raise NotImplementedError("none")


def class_of(attribute):
    """Returns an object of a class that has one attribute."""
    return type("Made", (), {"attribute": attribute, "__module__": __name__})()


def below(attribute):
    """Returns an object whose class inherits the attribute."""
    base = type(class_of(attribute))
    return type("Made", (base,), {"__module__": __name__})()


def bound(number, held=[]):  # noqa: B006, TensorFlow holds the object weakly
    held.append(Callable(number))
    return held[-1].traced


def mapped(number):
    def branch(x):
        return tf.cond(x > 3, lambda: x + number, lambda: x)

    return tf.data.Dataset.range(10).map(branch).shuffle(4, seed=1)


def using_a_global_inside(number):
    names = {"__name__": __name__, "scale": number}
    exec("def outer(x):\n    return (lambda y: y * scale)(x)", names)
    return names["outer"]


def layer_class(number):
    class Scale(keras.layers.Layer):
        def call(self, x):
            return x * number

    return Scale()


def dense(value):
    layer = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(value))
    layer.build((1, 2))
    return layer


def adapted(number):
    layer = keras.layers.TextVectorization()
    layer.adapt([f"one word{number}"])
    return layer


def filled(*words):
    numbers = tf.range(len(words), dtype=tf.int64)
    return tf.lookup.KeyValueTensorInitializer(tf.constant(words), numbers)


def table(number):
    return tf.lookup.StaticHashTable(filled("a", f"b{number}"), default_value=0)


def mutable_table(number):
    made = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)
    made.insert(tf.constant(["a", "b", "c"]), tf.constant([number, 5, 6], tf.int64))
    return made


def looked_up(number):
    lookup = table(number).lookup
    return tf.data.Dataset.from_tensor_slices(["a", "b"]).map(lambda x: lookup(x))


def scaled_by_variable(number):
    factor = tf.Variable(float(number))
    return tf.data.Dataset.range(3).map(lambda x: tf.cast(x, tf.float32) * factor)


def nested(number):
    return functools.reduce(lambda value, _: [value], range(3000), [number])


def wrapped(number):
    function = adding(number)
    return functools.wraps(function)(lambda *args: function(*args))


def with_attribute(number):
    def function(x):
        return x * function.factor

    function.factor = number
    return function


def single_dispatch(number):
    function = functools.singledispatch(lambda x: x)
    function.register(int, adding(number))
    return function


MAKERS = {
    "number": lambda n: n,
    "array": lambda n: np.arange(3) + n,
    "tensor": lambda n: tf.constant([n, 2]),
    "strings": lambda n: np.array([f"a{n}", "b"], object),
    "dict": lambda n: {"b": 1, "a": n},
    "set": lambda n: {1, 5 + n},
    "variable": lambda n: tf.Variable(float(n)),
    "range": lambda n: range(n),
    "bytearray": lambda n: bytearray([n]),
    "pattern": lambda n: re.compile(f"a{n}"),
    "generator of numbers": np.random.default_rng,
    "structured array": lambda n: np.array([(1, n)], [("a", "i4"), ("b", "O")]),
    "masked array": lambda n: np.ma.array([1, 2], mask=[n == 1, False]),
    "default dict": lambda n: collections.defaultdict(adding(n)),
    "deque": lambda n: collections.deque([n]),
    "own list": lambda n: OwnList([n]),
    "deep list": nested,
    "ragged tensor": lambda n: tf.ragged.constant([[1], [n, 3]]),
    "enum": lambda n: enum.Enum("Colour", {"RED": n}).RED,
    "closure": adding,
    "inner function": lambda n: calling(adding(n)),
    "global of an inner function": using_a_global_inside,
    "default": lambda n: eval(f"lambda x, y={n}: x + y"),
    "keyword default": lambda n: eval(f"lambda x, *, y={n}: x + y"),
    "partial": lambda n: functools.partial(np.add, n),
    "partial of itemgetter": lambda n: functools.partial(operator.itemgetter(n), 1),
    "itemgetter": operator.itemgetter,
    "attrgetter": lambda n: operator.attrgetter(f"a{n}"),
    "methodcaller": lambda n: operator.methodcaller("get", n),
    "methodcaller by keyword": lambda n: operator.methodcaller("get", key=n),
    "bound method of a dict": lambda n: {"n": n}.get,
    "cached function": lambda n: functools.lru_cache(adding(n)),
    "wrapped function": wrapped,
    "function's attribute": with_attribute,
    "single dispatch": single_dispatch,
    "np.vectorize": lambda n: np.vectorize(adding(n)),
    "tf.function": lambda n: tf.function(adding(n)),
    "bound tf.function": bound,
    "object": Callable,
    "method of an object": lambda n: Callable(n).__call__,
    "slots": Slotted,
    "dataclass": Record,
    "attribute: tuple": lambda n: class_of((1, n)),
    "attribute: list": lambda n: class_of([n]),
    "attribute: dict": lambda n: class_of({"n": n}),
    "attribute: array": lambda n: class_of(np.full(2, n)),
    "attribute: inherited": lambda n: below([n]),
    "attribute: object": lambda n: class_of(Slotted(n)),
    "method": lambda n: class_of(adding(n)),
    "method: inherited": lambda n: below(adding(n)),
    "method: static": lambda n: class_of(staticmethod(adding(n))),
    "method: class": lambda n: class_of(classmethod(adding(n))),
    "method: property": lambda n: class_of(property(adding(n))),
    "method: cached property": lambda n: class_of(functools.cached_property(adding(n))),
    "method: tf.function": lambda n: class_of(tf.function(adding(n))),
    "method: partial": lambda n: class_of(functools.partialmethod(adding(n), 1)),
    "layer": dense,
    "layer: class": layer_class,
    "layer: attribute": lambda n: Held({"factor": n}),
    "layer: no configuration": NoConfig,
    "layer: table": lambda n: Held(table(n)),
    "layer: variable": lambda n: Held(tf.Variable(float(n))),
    "layer: inner layers": lambda n: Held([Held(n)]),
    "layer: adapted": adapted,
    "layer: in a Sequential": lambda n: keras.Sequential([adapted(n)]),
    "table": table,
    "table: mutable": mutable_table,
    "table: vocabulary": lambda n: tf.lookup.StaticVocabularyTable(
        filled("a", f"b{n}"), num_oov_buckets=2
    ),
    "dataset": mapped,
    "dataset: table": looked_up,
    "dataset: variable": scaled_by_variable,
    "dataset: operation": lambda n: tf.data.Dataset.range(9).map(
        (tf.abs, tf.negative)[n - 1]
    ),
    "dataset: result": lambda n: tf.data.Dataset.range(9).map(
        lambda x: (-x, tf.abs(x))[n - 1]
    ),
}


@pytest.mark.quick("number", "array", "tensor", "strings", "dict")
@pytest.mark.parametrize("name", MAKERS)
def test_equal_makes_agree_and_others_differ(name):
    make = MAKERS[name]
    one, same, other = make(1), make(1), make(2)  # together, so that none is reused
    assert digest(one) == digest(same)
    assert digest(one) != digest(other)
    if name != "np.vectorize":
        assert unseen(one) == ()


def digests():
    return [digest(make(1)) for make in MAKERS.values()]


@pytest.mark.slow
def test_another_process_gives_the_same_fingerprints():
    program = (
        "import json; from tests.data_fingerprint_test import digests; "
        "print(json.dumps(digests()))"
    )
    # Hashes of strings, which order sets, are others there.
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == digests()


def test_order_and_nesting_count():
    assert digest([1, 2]) != digest([2, 1])
    assert digest([[1], 2]) != digest([1, [2]])
    assert digest("12") != digest(["1", "2"])
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def test_a_value_that_holds_itself_ends():
    loop = [1]
    loop.append(loop)
    assert digest(loop) != digest([1])


def interleaved(paths):
    names = tf.data.Dataset.from_tensor_slices([[path] for path in paths])
    return names.interleave(tf.data.TextLineDataset)


READERS = {
    "lines": tf.data.TextLineDataset,
    "contents": lambda paths: tf.data.Dataset.from_tensor_slices(paths).map(
        tf.io.read_file
    ),
    "interleaved": interleaved,
    "in the function": lambda paths: tf.data.Dataset.range(3).map(
        lambda number: (number, tf.io.read_file(paths[-1]))
    ),
    "an array of names": np.array,
    "a tensor of names": tf.constant,
}


@pytest.mark.quick(
    "1files-lines",
    "1files-interleaved",
    "1files-an array of names",
    "2files-contents",
    "40files-in the function",
)
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
    assert unseen(made) == ()


@pytest.mark.parametrize(
    "text", ["a" * 5000, "a/" * 3000, "a\0b", "\n", "é" * 300], ids=len
)
def test_texts_that_name_no_file_are_no_error(text):
    assert digest(tf.data.Dataset.from_tensor_slices([text]))
    assert digest(np.array([text], object))


def test_what_cannot_be_looked_into_is_named(tmp_path):
    generated = tf.data.Dataset.from_generator(
        lambda: range(3), output_signature=tf.TensorSpec((), tf.int64)
    )
    assert unseen(generated) == ("a Python function inside a dataset",)
    folder = tf.constant(str(tmp_path) + "/")
    names = tf.data.Dataset.range(3).map(lambda n: folder + tf.strings.as_string(n))
    assert unseen(names.map(tf.io.read_file)) == ("files that ReadFile reads",)
    assert unseen({"a": (x for x in range(3))}) == ("a builtins.generator",)
    assert unseen(np.frompyfunc(adding(1), 1, 1)) != ()
    made = tf.lookup.experimental.DenseHashTable(tf.string, tf.int64, 0, "", "$")
    assert unseen(made) == ("a DenseHashTable",)
    made.insert(tf.constant(["a"]), tf.constant([1], tf.int64))
    looked = tf.data.Dataset.from_tensor_slices(["a"]).map(lambda x: made.lookup(x))
    assert unseen(looked) == ("a resource that a dataset holds",)


def test_installed_packages_count_by_version():
    assert digest(tf.image.resize) == digest(tf.image.resize)
    assert unseen(tf.image.resize) == unseen(np) == unseen(keras.layers.Dense) == ()
    assert digest(tf.abs) != digest(tf.negative)


def test_a_function_reads_the_same_before_and_after_it_was_traced():
    layer = keras.layers.Rescaling(0.5)
    config = types.SimpleNamespace(factor=2)

    def unchanged(x):
        return x

    def function(x):
        x = tf.ensure_shape(tf.numpy_function(unchanged, [x], tf.int64), ())
        return layer(tf.cast(x, tf.float32)) * config.factor

    before = digest(function)
    list(tf.data.Dataset.range(3).map(function))
    assert digest(function) == before
