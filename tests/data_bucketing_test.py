"""`Pipeline.bucket`: boundaries, batches, padding, and what it wastes."""

import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.file_sources import told
from tests.refusals import refusals
from tfamp.data import Pipeline

LENGTHS = [3, 17, 8, 5, 30, 1, 9, 16, 2, 12, 31, 4]


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


def listed(dataset):
    return [(x.numpy().tolist(), y.numpy().tolist()) for x, y in dataset]


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


def test_lengths_far_apart_are_taken_in_wider_steps():
    lengths = np.arange(0, 80_000, 8)
    given = tf.data.Dataset.from_tensor_slices(lengths).map(
        lambda n: tf.zeros([n], tf.bool)
    )
    pipeline = Pipeline.from_dataset(given).bucket(1000, max_shapes=2)
    pipeline.build()
    # Uniform lengths are cut in the middle.
    assert "length 40000, 80000" in told(pipeline)


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
    assert listed(found) == listed(stock)


@pytest.mark.parametrize("drop_remainder", [False, True], ids=["kept", "dropped"])
def test_every_sequence_comes_once_and_whole(drop_remainder):
    lengths = zipf_lengths()
    pipeline = bucketed(lengths, 16, drop_remainder=drop_remainder, max_shapes=4)
    seen, used, total, widths = [], 0, 0, set()
    for tokens, numbers in pipeline.build():
        widths.add(tokens.shape[1])
        for row, number in zip(tokens.numpy(), numbers.numpy(), strict=True):
            length = lengths[number]
            assert (row[:length] == number + 1).all()
            assert (row[length:] == 0).all()
            seen.append(number)
            used, total = used + length, total + len(row)
    assert len(set(seen)) == len(seen)
    if drop_remainder:
        last = np.searchsorted(sorted(widths), lengths)
        assert len(seen) == 16 * sum(np.bincount(last) // 16)
    else:
        assert sorted(seen) == list(range(len(lengths)))
        assert f"padding is {100 * (1 - used / total):.0f}" in told(pipeline)


def test_xla_compiles_once_for_each_bucket():
    dataset = bucketed(zipf_lengths(), 4, max_shapes=3, drop_remainder=True).build()
    assert dataset.element_spec[0].shape.as_list() == [4, None]
    traced = []

    @tf.function(jit_compile=True)
    def step(tokens):
        traced.append(tokens.shape)
        return tf.reduce_sum(tokens)

    for _ in range(2):
        for tokens, _ in dataset:
            step(tokens)
    assert len(traced) == 3


def test_a_compiled_model_trains_on_buckets():
    lengths = [3, 9, 5, 12, 7, 10, 2, 16]
    pairs = stream_of(lengths).map(lambda x, y: (x, tf.cast(x > 2, tf.int32)))
    pipeline = Pipeline.from_dataset(pairs).bucket(2, max_shapes=2, drop_remainder=True)
    model = keras.Sequential(
        [
            keras.layers.Embedding(10, 4, mask_zero=True),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
    batches = pipeline.build()
    # Keras warns of a dataset whose length it does not know.
    batches = batches.apply(tf.data.experimental.assert_cardinality(len(list(batches))))
    history = model.fit(batches, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


def test_shuffled_streams_give_other_batches_each_epoch():
    dataset = bucketed(LENGTHS, 4, max_shapes=2).shuffle(seed=1).build()
    first, second = listed(dataset), listed(dataset)
    assert first != second
    assert sorted(n for _, batch in first for n in batch) == list(range(12))


@pytest.mark.parametrize("value, padded", [(None, 0), (-1, -1)], ids=["0", "-1"])
def test_all_sequences_of_an_element_are_padded(value, padded):
    def element(length):
        tokens = tf.ensure_shape(tf.range(1, length + 1), [None])
        inputs = {"tokens": tokens, "words": tf.strings.as_string(tokens), "id": length}
        return inputs, tf.ensure_shape(tf.ones([length, 2]), [None, 2])

    given = tf.data.Dataset.from_tensor_slices(np.array([3, 5], np.int32)).map(element)
    pipeline = Pipeline.from_dataset(given)
    (x, y), *_ = pipeline.bucket(2, boundaries=[8], padding_value=value).build()
    assert x["tokens"].numpy().tolist() == [
        [1, 2, 3, *[padded] * 5],
        [1, 2, 3, 4, 5, *[padded] * 3],
    ]
    assert x["words"].numpy()[0].tolist() == [b"1", b"2", b"3", *[b""] * 5]
    assert x["id"].numpy().tolist() == [3, 5]
    assert y.shape == (2, 8, 2)
    assert y.numpy().sum(axis=(1, 2)).tolist() == [6 + 10 * padded, 10 + 6 * padded]


TOO_LONG = {"truncate": (4, "cut"), "drop": (3, "left out")}


@pytest.mark.parametrize("too_long", TOO_LONG)
def test_what_is_too_long_is_cut_or_dropped_and_told(too_long, caplog):
    kept, done = TOO_LONG[too_long]
    pipeline = bucketed([3, 8, 20, 16], 9, boundaries=[8, 16], too_long=too_long)
    found = listed(pipeline.build())
    assert sum(len(numbers) for _, numbers in found) == kept
    assert "1 of 4 sequences are longer than 16" in caplog.text
    assert f"1 too long, {done}" in told(pipeline)


def test_by_default_what_is_too_long_ends_the_pass():
    dataset = bucketed([3, 20], 2, boundaries=[8, 16]).build()
    message = "A sequence is above the last boundary, of length"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(dataset)


def test_rows_of_ragged_tensors_are_sequences():
    ragged = tf.ragged.constant([[1], [2, 3], []])
    given = tf.data.Dataset.from_tensor_slices(ragged)
    (batch,) = Pipeline.from_dataset(given).bucket(3, boundaries=[8]).build()
    assert batch.numpy()[:, :2].tolist() == [[1, 0], [2, 3], [0, 0]]


def test_describing_reads_no_lengths():
    def refuse():
        raise AssertionError("read")
        yield

    spec = tf.TensorSpec((None,), tf.int32)
    given = tf.data.Dataset.from_generator(refuse, output_signature=spec)
    assert "up to 8 lengths" in told(Pipeline.from_dataset(given).bucket(2))


def dense():
    return Pipeline.from_arrays(np.zeros((3, 4)))


REFUSED = {
    "no sequences": (
        lambda: dense().bucket(2).build(),
        "expected a part whose first dimension is None, which is what varies.",
    ),
    "two dimensions": (
        lambda: (
            Pipeline.from_dataset(
                tf.data.Dataset.range(3).map(
                    lambda n: tf.ensure_shape(tf.zeros([n, n]), [None, None])
                )
            )
            .bucket(2)
            .build()
        ),
        "expected one whose first dimension alone is unknown.",
    ),
    "not ascending": (
        lambda: dense().bucket(2, boundaries=[8, 8]),
        "`boundaries` are (8, 8); expected at least one length, ascending.",
    ),
    "word": (
        lambda: dense().bucket(2, boundaries="best"),
        "Unknown `boundaries` 'best'; expected 'auto'",
    ),
    "too long": (
        lambda: dense().bucket(2, too_long="drop"),
        "`too_long` is 'drop' with boundaries chosen from the lengths",
    ),
    "no end": (
        lambda: Pipeline.from_dataset(stream_of([1, 2]).repeat()).bucket(2).build(),
        "`.bucket` got a dataset without end; expected one that ends",
    ),
    "empty": (
        lambda: (
            Pipeline.from_dataset(stream_of([1])).filter(lambda x, y: y >= 0).bucket(0)
        ),
        "`batch_size` is 0; expected",
    ),
}
test_wrong_uses_are_refused = refusals(REFUSED)


def test_padding_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=re.escape("`padding_value` is 0.5; expected")):
        bucketed([1, 2], 2, padding_value=0.5).build()
