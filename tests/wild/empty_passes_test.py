"""Passes that would train on nothing, and generators that can be read only once."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tfamp.data import Pipeline

NUMBER = tf.TensorSpec((), tf.int64)


def sequences(lengths):
    given = tf.data.Dataset.from_tensor_slices(np.array(lengths, np.int64))
    return given.map(lambda n: (tf.range(n), n % 2))


BUCKETS = {
    "boundaries that are chosen": {},
    "boundaries of one's own": {"boundaries": [8, 16]},
}


@pytest.mark.parametrize("options", BUCKETS.values(), ids=BUCKETS)
@pytest.mark.parametrize("is_known", [True, False], ids=["length", "no length"])
def test_buckets_that_fill_no_batch_are_an_error(options, is_known):
    lengths = [2, 10, 2, 10, 2, 10]
    given = sequences(lengths)
    given = given if is_known else given.filter(lambda x, y: True)
    pipeline = Pipeline.from_dataset(given).bucket(8, drop_remainder=True, **options)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as caught:
        list(pipeline.build())
    text = str(caught.value)
    assert "drop_remainder" in text
    assert "batch" in text
    kept = Pipeline.from_dataset(given).bucket(8, **options)
    assert sum(len(y) for _, y in kept.build()) == len(lengths)


@pytest.mark.parametrize("options", BUCKETS.values(), ids=BUCKETS)
def test_one_full_bucket_is_enough(options):
    given = sequences([3] * 9 + [10])
    pipeline = Pipeline.from_dataset(given).bucket(8, drop_remainder=True, **options)
    dataset = pipeline.build()
    for _ in range(2):
        assert [x.shape[0] for x, _ in dataset] == [8]
    assert dataset.element_spec[0].shape[0] == 8, "XLA wants static sizes"


def test_a_batch_that_never_fills_is_an_error_where_the_length_shows_in_the_pass():
    given = Pipeline.from_arrays(np.arange(100)).filter(lambda x: x < 5)
    dataset = given.batch(8, drop_remainder=True).build()
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="drop_remainder"
    ) as caught:
        list(dataset)
    assert "no batch" in str(caught.value)
    full = given.batch(5, drop_remainder=True).build()
    assert len(list(full)) == 1
    assert tf.nest.flatten(full.element_spec)[0].shape[0] == 5


def one_shot(values, spec=NUMBER):
    """What people write: a generator that was called already, so it is read once."""
    generator = (value for value in values)
    return tf.data.Dataset.from_generator(lambda: generator, output_signature=spec)


FIRST = {
    "as it is": lambda p: p,
    "shuffled": lambda p: p.shuffle(seed=1),
    "cached": lambda p: p.cache("memory"),
    "batched": lambda p: p.batch(3).map(lambda x: x).prefetch(),
}


@pytest.mark.parametrize("write", FIRST.values(), ids=FIRST)
def test_a_generator_that_is_read_once_loses_no_element(write):
    dataset = write(Pipeline.from_dataset(one_shot(range(10)))).build()
    found = np.concatenate([np.ravel(x) for x in dataset])
    assert sorted(found.tolist()) == list(range(10))


def test_the_second_epoch_of_a_generator_that_is_read_once_is_an_error():
    dataset = Pipeline.from_dataset(one_shot(range(4))).batch(2).build()
    assert len(list(dataset)) == 2
    with pytest.raises(tf.errors.InvalidArgumentError, match="generator") as caught:
        list(dataset)
    assert "makes a new one" in str(caught.value)


READ_FIRST = {
    "balance": lambda p: p.map(lambda x: (x, x % 2)).balance(seed=1),
    "subset": lambda p: p.subset(3),
}


@pytest.mark.parametrize("write", READ_FIRST.values(), ids=READ_FIRST)
def test_what_reads_all_elements_first_says_that_they_are_gone(write):
    pipeline = write(Pipeline.from_dataset(one_shot(range(10))))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as caught:
        list(pipeline.build())
    assert re.search("generator|looked at|changed since", str(caught.value))
