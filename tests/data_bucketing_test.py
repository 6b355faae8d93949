"""`Pipeline.bucket`: boundaries, batches, padding, and what it wastes."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.file_sources import told
from tfamp.data import Pipeline


def zipf_lengths(n=400, longest=120):
    return np.minimum(np.random.default_rng(0).zipf(1.5, n) + 2, longest)


def stream_of(lengths):
    """Returns pairs of a sequence of unknown length, filled with i + 1, and i."""
    numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    tokens = tf.RaggedTensor.from_row_lengths(numbers.astype(np.int32), lengths)
    pairs = tf.data.Dataset.from_tensor_slices((tokens, tf.range(len(lengths))))
    return pairs.map(lambda x, y: (tf.ensure_shape(tf.identity(x), [None]), y))


def bucketed(lengths, *arguments, **options):
    return Pipeline.from_dataset(stream_of(lengths)).bucket(*arguments, **options)


def places(lengths, boundaries):
    """Returns how many places sequences take, one by one."""
    return sum(min(b for b in boundaries if b >= length) for length in lengths)


@pytest.mark.parametrize("max_shapes", [1, 2, 3, 4])
def test_chosen_boundaries_have_the_least_padding_of_all(max_shapes):
    lengths = np.random.default_rng(max_shapes).integers(1, 60, 40)
    lengths[0] = 59
    least = min(
        places(lengths, (*chosen, 64))
        for size in range(max_shapes)
        for chosen in itertools.combinations(range(8, 64, 8), size)
    )
    batches = list(bucketed(lengths, 1, max_shapes=max_shapes).build())
    found = sorted({x.shape[1] for x, _ in batches})
    assert len(found) <= max_shapes
    assert places(lengths, found) == least == sum(x.shape[1] for x, _ in batches)


def test_batches_and_their_order_are_those_of_stock_bucketing():
    lengths = zipf_lengths()
    boundaries = [8, 16, 40, 120]
    # Stock buckets end below their boundary, and pad to one less than it.
    stock = stream_of(lengths).bucket_by_sequence_length(
        lambda x, y: tf.shape(x)[0],
        [boundary + 1 for boundary in boundaries],
        [16, 16, 16, 16, 1],
        pad_to_bucket_boundary=True,
    )
    found = bucketed(lengths, 16, boundaries=boundaries).build()
    for ours, theirs in zip(found, stock, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


def test_every_sequence_comes_once_and_whole():
    lengths = zipf_lengths()
    pipeline = bucketed(lengths, 16, max_shapes=4)
    seen, used, total = [], 0, 0
    for tokens, numbers in pipeline.build():
        for row, number in zip(tokens.numpy(), numbers.numpy(), strict=True):
            length = lengths[number]
            assert (row[:length] == number + 1).all()
            assert (row[length:] == 0).all()
            seen.append(number)
            used, total = used + length, total + len(row)
    assert sorted(seen) == list(range(len(lengths)))
    assert f"padding is {100 * (1 - used / total):.0f}" in told(pipeline)
    whole = bucketed(lengths, 16, max_shapes=4, drop_remainder=True).build()
    assert {len(numbers) for _, numbers in whole} == {16}


def test_by_default_what_is_too_long_ends_the_pass():
    dataset = bucketed([3, 20], 2, boundaries=[8, 16]).build()
    message = "A sequence is above the last boundary, of length"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(dataset)


BUCKETS = {
    "boundaries that are chosen": {},
    "boundaries of one's own": {"boundaries": [8, 16]},
}


@pytest.mark.parametrize("options", BUCKETS.values(), ids=BUCKETS)
@pytest.mark.parametrize("is_known", [True, False], ids=["length", "no length"])
def test_buckets_that_fill_no_batch_are_an_error(options, is_known):
    lengths = [2, 10, 2, 10, 2, 10]
    given = stream_of(lengths)
    given = given if is_known else given.filter(lambda x, y: True)
    pipeline = Pipeline.from_dataset(given).bucket(8, drop_remainder=True, **options)
    errors = (ValueError, tf.errors.InvalidArgumentError)
    with pytest.raises(errors, match="(?s)batch.*drop_remainder|drop_remainder.*batch"):
        list(pipeline.build())
    kept = Pipeline.from_dataset(given).bucket(8, **options)
    assert sum(len(y) for _, y in kept.build()) == len(lengths)


@pytest.mark.parametrize("options", BUCKETS.values(), ids=BUCKETS)
def test_one_full_bucket_is_enough(options):
    pipeline = bucketed([3] * 9 + [10], 8, drop_remainder=True, **options)
    dataset = pipeline.build()
    for _ in range(2):
        assert [x.shape[0] for x, _ in dataset] == [8]
    assert dataset.element_spec[0].shape[0] == 8, "XLA wants static sizes"
