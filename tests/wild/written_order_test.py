"""Pipelines written in tf.data's order: what its order decides, a Pipeline keeps.

The same calls are made of a `tf.data.Dataset` and of a `Pipeline`, and both must give
the same, or, where they draw, be equal or differ from epoch to epoch alike.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp.data import Pipeline

X = np.arange(8, dtype="float32")[:, None]
Y = np.arange(8, dtype="int32")


def stock(x=X, y=Y):
    return tf.data.Dataset.from_tensor_slices((x, y))


def values(dataset):
    return [tf.nest.map_structure(lambda t: t.numpy().tolist(), e) for e in dataset]


def changes_by_epoch(dataset):
    first, second = (
        np.sort(np.concatenate([np.ravel(x) for x, _ in dataset])) for _ in range(2)
    )
    return not np.array_equal(first, second)


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


@pytest.mark.parametrize("function", NOISY.values(), ids=NOISY)
def test_augmentation_after_a_cache_differs_each_epoch_and_before_it_does_not(function):
    assert changes_by_epoch(stock().cache().map(function).batch(4))
    given = Pipeline.from_dataset(stock())
    after = given.cache("memory").map(function).batch(4)
    assert changes_by_epoch(after.build())
    before = given.shuffle(seed=1).map(function).cache("memory").batch(4)
    assert not changes_by_epoch(before.build())


def sum_of_batch(x, y):
    return tf.reduce_sum(x, 0), y


PLAIN = {
    "mixup": lambda d: d.batch(4).map(lambda x, y: ((x + x[::-1]) / 2, y)),
    "a sum": lambda d: d.batch(4).map(sum_of_batch),
    "full batches only": lambda d: d.batch(3).filter(
        lambda x, y: tf.equal(tf.shape(x)[0], 3)
    ),
    "cache, then batches": lambda d: (
        d.cache().batch(4).map(lambda x, y: (x - tf.reduce_mean(x), y))
    ),
}


@pytest.mark.parametrize("write", PLAIN.values(), ids=PLAIN)
def test_the_same_calls_give_what_tf_data_gives(write):
    for given in (Pipeline.from_arrays(X, Y), Pipeline.from_dataset(stock())):
        assert values(write(given).build()) == values(write(stock()))


def test_copies_of_a_rare_class_are_each_augmented_anew():
    # As tf.data's own repeat, then map: otherwise each copy is the same picture.
    rare = np.array([0] * 15 + [1])
    given = stock(np.zeros((16, 1), "float32"), rare)
    pipeline = Pipeline.from_dataset(given).balance(seed=1).map(noisy)
    found = [float(x[0]) for x, y in pipeline.build() if y == 1]
    assert len(found) == len(set(found)) == 8


def test_the_plan_says_what_works_on_batches_and_what_moved():
    pipeline = Pipeline.from_arrays(X, Y).batch(4).shuffle(seed=1).map(sum_of_batch)
    told = " ".join(pipeline.describe().split())
    assert "whole batches" in told
    assert "ahead of `.batch`" in told
    pipeline = Pipeline.from_arrays(X, Y).batch(4)
    pipeline = pipeline.filter(lambda x, y: tf.shape(x)[0] == 4, missing="drop")
    with pytest.raises(ValueError, match="before `.batch`"):
        pipeline.build()
