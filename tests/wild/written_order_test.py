"""Pipelines written in tf.data's order: what its order decides, a Pipeline keeps.

The same calls are made of a `tf.data.Dataset` and of a `Pipeline`, and both must give
the same, or, where they draw, be equal or differ from epoch to epoch alike.
"""

import contextlib
import io

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp.data import Pipeline

X = np.arange(8, dtype="float32")[:, None]
Y = np.arange(8, dtype="int32")


def described(pipeline):
    with contextlib.redirect_stdout(io.StringIO()):
        return pipeline.describe()


def stages_of(pipeline):
    lines = described(pipeline).splitlines()[2:]
    return [line.split()[0] for line in lines if line[1] != " "][1:-1]


def stock(x=X, y=Y):
    return tf.data.Dataset.from_tensor_slices((x, y))


def values(dataset):
    return [tf.nest.map_structure(lambda t: t.numpy().tolist(), e) for e in dataset]


def inputs(dataset):
    rows = [np.ravel(x) for x, _ in dataset.as_numpy_iterator()]
    return np.sort(np.concatenate(rows))


def changes_by_epoch(dataset):
    return not np.array_equal(inputs(dataset), inputs(dataset))


# Maps whose results differ each time they run.


def noisy(x, y):
    return x + tf.random.uniform((1,)), y


def noisy_by_numpy(x, y):
    draw = np.random.default_rng(0)
    noise = tf.numpy_function(lambda: np.float32(draw.random()), [], tf.float32)
    return x + tf.ensure_shape(noise, ()), y


drop = keras.layers.Dropout(0.5)


def noisy_by_keras(x, y):
    return drop(tf.ones_like(x) * (x + 1), training=True), y


class Counting:
    """Preprocessing that carries a state."""

    def __init__(self):
        self.seen = tf.Variable(0.0)

    def __call__(self, x, y):
        return x + self.seen.assign_add(1.0), y


NOISY = {
    "tf.random": noisy,
    "a NumPy generator": noisy_by_numpy,
    "a layer of Keras": noisy_by_keras,
    "a variable": Counting(),
}


@pytest.mark.quick("memory-tf.random")
@pytest.mark.parametrize("function", NOISY.values(), ids=NOISY)
@pytest.mark.parametrize("where", ["memory", "files"])
def test_augmentation_written_after_a_cache_differs_each_epoch(
    function, where, tmp_path
):
    path = "memory" if where == "memory" else tmp_path / "cache"
    assert changes_by_epoch(stock().cache().map(function).batch(4))
    given = Pipeline.from_dataset(stock())
    assert changes_by_epoch(given.cache(path).map(function).batch(4).build())


@pytest.mark.quick("tf.random-")
@pytest.mark.parametrize("ahead", ["", "shuffle"])
@pytest.mark.parametrize("function", NOISY.values(), ids=NOISY)
def test_a_random_map_written_before_a_cache_is_frozen_by_it(function, ahead):
    given = Pipeline.from_dataset(stock())
    given = given.shuffle(seed=1) if ahead else given
    given = given.map(function).cache("memory")
    assert not changes_by_epoch(given.batch(4).build())


def sum_of_batch(x, y):
    return tf.reduce_sum(x, 0), y


PLAIN = {
    "mixup": lambda d: d.batch(4).map(lambda x, y: ((x + x[::-1]) / 2, y)),
    "a sum": lambda d: d.batch(4).map(sum_of_batch),
    "full batches only": lambda d: d.batch(3).filter(
        lambda x, y: tf.equal(tf.shape(x)[0], 3)
    ),
    "cache, then batches": lambda d: (
        d.cache("").batch(4).map(lambda x, y: (x - tf.reduce_mean(x), y))
    ),
}


class Memory(Pipeline):
    """A pipeline whose `.cache("")` is in memory, as tf.data writes it."""

    def cache(self, where, **options):
        return super().cache(where or "memory", **options)


@pytest.mark.quick("arrays-mixup")
@pytest.mark.parametrize("write", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("source", ["arrays", "dataset"])
def test_the_same_calls_give_what_tf_data_gives(write, source):
    given = {
        "arrays": Memory.from_arrays(X, Y),
        "dataset": Memory.from_dataset(stock()),
    }[source]
    assert values(write(given).build()) == values(write(stock()))


def test_copies_of_a_rare_class_are_each_augmented_anew():
    # As tf.data's own repeat, then map: otherwise each copy is the same picture.
    rare = np.array([0] * 15 + [1])
    given = tf.data.Dataset.from_tensor_slices((np.zeros((16, 1), "float32"), rare))
    pipeline = Pipeline.from_dataset(given).balance(seed=1).map(noisy)
    found = [float(x[0]) for x, y in pipeline.build() if y == 1]
    assert len(found) == 8
    assert len(set(found)) == 8


def test_a_damaged_element_costs_itself_behind_a_filter_too():
    def refuse(x, y):
        with tf.control_dependencies([tf.debugging.assert_none_equal(y, 6)]):
            return tf.identity(x), y

    pipeline = (
        Pipeline.from_arrays(X, Y).map(lambda x, y: (x, y)).filter(lambda x, y: y > 3)
    )
    pipeline = pipeline.map(refuse).on_error("skip", max_fraction=0.5)
    assert [int(y) for _, y in pipeline.build()] == [4, 5, 7]
    (skipped,) = pipeline.skipped
    assert "element 2" in skipped.where


def test_rules_on_values_do_not_go_with_a_predicate_on_batches():
    pipeline = Pipeline.from_arrays(X, Y).batch(4)
    pipeline = pipeline.filter(lambda x, y: tf.shape(x)[0] == 4, missing="drop")
    with pytest.raises(ValueError, match="before `.batch`"):
        pipeline.build()


def test_the_plan_says_what_works_on_batches_and_what_moved():
    pipeline = Pipeline.from_arrays(X, Y).batch(4).shuffle(seed=1).map(sum_of_batch)
    assert stages_of(pipeline) == ["shuffle", "batch", "map"]
    told = " ".join(described(pipeline).split())
    assert "whole batches" in told
    assert "ahead of `.batch`" in told
