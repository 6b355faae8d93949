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
from tfamp.data.augmentation import Flip

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


def noisy_by_helper(x, y):
    return noisy(x, y)


def noisy_now_and_then(x, y):
    return tf.cond(y % 2 == 0, lambda: x, lambda: x + tf.random.normal((1,))), y


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
    "in a helper": noisy_by_helper,
    "in a branch": noisy_now_and_then,
    "a layer of Keras": noisy_by_keras,
    "a variable": Counting(),
    "a lambda": lambda x, y: (x * tf.random.uniform(()), y),
    "tf.function": tf.function(noisy),
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


def test_work_that_is_the_same_each_epoch_is_still_cached():
    given = Pipeline.from_dataset(stock()).cache("memory")
    pipeline = given.map(lambda x, y: (x * 2, y)).shuffle(seed=1).batch(4)
    assert stages_of(pipeline) == ["map", "cache", "shuffle", "batch"]
    told = " ".join(described(pipeline).split())
    assert "ahead of `.cache`" in told


def test_photo_after_photo_in_the_order_of_the_guide():
    # https://www.tensorflow.org/guide/data: decode, cache, shuffle, augment, batch, mix
    def decode(x, y):
        return tf.cast(x, tf.float32) / 8, y

    def mix(x, y):
        return (x + tf.reverse(x, [0])) / 2, y

    pipeline = Pipeline.from_arrays(X, Y).map(decode).cache("memory").shuffle(8, seed=1)
    pipeline = pipeline.map(noisy).batch(4).map(mix).prefetch()
    expected = ["map", "cache", "shuffle", "map", "batch", "map", "prefetch"]
    assert stages_of(pipeline) == expected
    dataset = pipeline.build()
    assert changes_by_epoch(dataset)
    for x, y in dataset:
        assert x.shape == (4, 1)
        np.testing.assert_array_equal(x, x[::-1])  # mixed with its mirror
        assert set(y.numpy()) <= set(range(8))
    assert sorted(np.concatenate([y for _, y in dataset])) == list(range(8))


def sum_of_batch(x, y):
    return tf.reduce_sum(x, 0), y


def size_of_batch(x, y):
    return tf.fill([1], tf.shape(x)[0]), tf.shape(y)


PLAIN = {
    "mixup": lambda d: d.batch(4).map(lambda x, y: ((x + x[::-1]) / 2, y)),
    "a sum": lambda d: d.batch(4).map(sum_of_batch),
    "sizes": lambda d: d.batch(3).map(size_of_batch),
    "a layer of Keras": lambda d: d.batch(4).map(
        lambda x, y: (keras.ops.mean(x, axis=0), y)
    ),
    "two maps": lambda d: (
        d.map(lambda x, y: (x + 1, y)).batch(4).map(lambda x, y: (x - x[0], y))
    ),
    "maps in their order": lambda d: d.map(lambda x, y: (x + 1, y)).map(
        lambda x, y: (x * 2, y)
    ),
    "full batches only": lambda d: d.batch(3).filter(
        lambda x, y: tf.equal(tf.shape(x)[0], 3)
    ),
    "a map after a filter of batches": lambda d: (
        d.batch(2)
        .filter(lambda x, y: tf.reduce_max(y) > 3)
        .map(lambda x, y: (x - tf.reduce_mean(x), y))
    ),
    "a filter before a map": lambda d: d.filter(lambda x, y: y < 5).map(
        lambda x, y: (x, tf.one_hot(y, 5))
    ),
    "a map before a filter": lambda d: d.map(lambda x, y: (x, y * 10)).filter(
        lambda x, y: y < 50
    ),
    "a filter between maps": lambda d: (
        d.map(lambda x, y: (x, y - 4))
        .filter(lambda x, y: y >= 0)
        .map(lambda x, y: (x, tf.math.log(tf.cast(y + 1, tf.float32))))
    ),
    "cache, then batches": lambda d: (
        d.cache("").batch(4).map(lambda x, y: (x - tf.reduce_mean(x), y))
    ),
    "prefetched batches": lambda d: (
        d.batch(4).prefetch(2).map(lambda x, y: (x - tf.reduce_mean(x), y))
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


def test_a_map_behind_bucketed_batches_gets_whole_batches():
    lengths = [3, 5, 9, 10]
    texts = tf.data.Dataset.from_tensor_slices(lengths).map(tf.range)
    pipeline = Pipeline.from_dataset(texts).bucket(2, boundaries=[8, 16])
    pipeline = pipeline.map(lambda x: (x, tf.shape(x)))
    assert [shape.numpy().tolist() for _, shape in pipeline.build()] == [
        [2, 8],
        [2, 16],
    ]


def test_a_map_behind_the_augmentation_gets_augmented_images():
    images = np.arange(3, dtype="uint8").reshape(1, 1, 3, 1) * np.ones((64, 1, 1, 1))
    pipeline = Pipeline.from_arrays(images.astype("uint8"), np.zeros(64))
    pipeline = pipeline.augment(Flip(), seed=1)
    pipeline = pipeline.map(lambda x, y: (tf.cast(x[0, 0, 0], tf.float32), y))
    lefts = [float(x) for x, _ in pipeline.build()]
    assert set(lefts) == {0.0, 2.0}


def test_a_filter_of_labels_behind_the_augmentation_counts_for_a_balance():
    pipeline = Pipeline.from_arrays(X, np.array([0, 0, 0, 0, 0, 1, 2, 2]))
    pipeline = pipeline.augment(lambda x, strength: x + strength, seed=1)
    pipeline = pipeline.filter(lambda x, y: y < 2).balance(seed=1)
    assert sorted(int(y) for _, y in pipeline.build()) == [0, 0, 0, 1, 1, 1]


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


def test_errors_of_whole_batches_are_not_skipped():
    def refuse(x, y):
        with tf.control_dependencies([tf.debugging.assert_none_equal(y, 6)]):
            return tf.identity(x), y

    pipeline = Pipeline.from_arrays(X, Y).map(lambda x, y: (x, y)).batch(4).map(refuse)
    dataset = pipeline.on_error("skip").build()
    with pytest.raises(tf.errors.InvalidArgumentError):
        list(dataset)


def test_rules_on_values_do_not_go_with_a_predicate_on_batches():
    pipeline = Pipeline.from_arrays(X, Y).batch(4)
    pipeline = pipeline.filter(lambda x, y: tf.shape(x)[0] == 4, missing="drop")
    with pytest.raises(ValueError, match="before `.batch`"):
        pipeline.build()


def test_a_predicate_on_batches_returns_one_boolean():
    pipeline = Pipeline.from_arrays(X, Y).batch(4).filter(lambda x, y: y > 3)
    with pytest.raises(ValueError, match="one boolean"):
        pipeline.build()


def test_the_plan_says_what_works_on_batches_and_what_moved():
    pipeline = Pipeline.from_arrays(X, Y).batch(4).shuffle(seed=1).map(sum_of_batch)
    assert stages_of(pipeline) == ["shuffle", "batch", "map"]
    told = " ".join(described(pipeline).split())
    assert "whole batches" in told
    assert "ahead of `.batch`" in told


def test_fit_trains_on_batches_that_were_mixed():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def mix(x, y):
        share = tf.random.uniform((tf.shape(x)[0], 1))
        return share * x + (1 - share) * tf.reverse(x, [0]), y

    dataset = Pipeline.from_arrays(X / 8, Y).batch(4).map(mix).build()
    history = model.fit(dataset, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
