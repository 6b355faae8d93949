"""`Pipeline.bucket`: boundaries, batches, padding, masks, and what it wastes."""

import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusals
from tfamp.data.stages import Settings
from tfamp.data.stages.batches import Bucket
from tfamp.data.stages.sequences import choose_boundaries, plan_of, sizes_of_batches

SETTINGS = Settings(num_threads=2, autotune=False)
LENGTHS = [3, 17, 8, 5, 30, 1, 9, 16, 2, 12, 31, 4]


def zipf_lengths(n=400, longest=120):
    return np.minimum(np.random.default_rng(0).zipf(1.5, n) + 2, longest)


def sequences(lengths):
    """Returns (tokens, number): sequence i is filled with i + 1."""
    numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return tf.RaggedTensor.from_row_lengths(numbers.astype(np.int32), lengths)


def stream_of(lengths):
    """Returns pairs of a dense sequence of unknown length and its number."""
    tensors = (sequences(lengths), tf.range(len(lengths)))
    pairs = tf.data.Dataset.from_tensor_slices(tensors)
    return pairs.map(lambda x, y: (tf.ensure_shape(tf.identity(x), [None]), y))


def listed(dataset):
    return [(x.numpy().tolist(), y.numpy().tolist()) for x, y in dataset]


def built(stage, lengths):
    stage.check(stream_of(lengths))
    return stage.apply(stream_of(lengths), SETTINGS)


# Plans.


def places(lengths, boundaries):
    """Returns how many places sequences take, one by one."""
    return sum(min(b for b in boundaries if b >= length) for length in lengths)


@pytest.mark.parametrize("max_shapes", [1, 2, 3, 4])
@pytest.mark.parametrize("multiple", [1, 8])
def test_chosen_boundaries_have_the_least_padding_of_all(max_shapes, multiple):
    lengths = np.random.default_rng(max_shapes).integers(
        0, 60 if multiple > 1 else 9, 40
    )
    top = -(-lengths.max() // multiple) * multiple
    candidates = range(multiple, top, multiple)
    least = min(
        places(lengths, (*chosen, top))
        for size in range(max_shapes)
        for chosen in itertools.combinations(candidates, size)
    )
    found = choose_boundaries(lengths, multiple=multiple, max_shapes=max_shapes)
    assert places(lengths, found) == least
    assert len(found) <= max_shapes
    assert list(found) == sorted(set(found))
    assert all(boundary % multiple == 0 for boundary in found)
    assert found[-1] == top


def test_lengths_far_apart_are_taken_in_wider_steps():
    lengths = np.arange(0, 80_000, 8)
    boundaries = choose_boundaries(lengths, max_shapes=2)
    # Uniform lengths are cut in the middle; steps are 8 wide, then 16, 32 and 64.
    assert boundaries == (40_000, 80_000)
    # Sequences without length have a bucket too.
    assert choose_boundaries(np.array([0, 0]), max_shapes=3) == (8,)


def test_a_plan_counts_batches_and_padding():
    plan = plan_of(np.array([0, 8, 8, 9, 16, 20]), (8, 16), (2, 2))
    assert plan.num_too_long == 1
    # 41 of 3 * 8 + 2 * 16 = 56 places, and of 5 * 16 = 80.
    assert plan.waste == pytest.approx(15 / 56)
    assert plan.waste_of_one_shape == pytest.approx(39 / 80)
    cut = plan_of(np.array([8, 20]), (8, 16), (2, 2), keeps_too_long=True)
    assert cut.waste == 0


def test_a_budget_gives_long_sequences_smaller_batches():
    sizes = sizes_of_batches((8, 40, 64, 100), batch_size=None, token_budget=400)
    assert sizes == (48, 8, 6, 4)


# Batches.


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
    stage = Bucket(16, boundaries=boundaries)
    assert listed(built(stage, lengths)) == listed(stock)


@pytest.mark.parametrize("drop_remainder", [False, True], ids=["kept", "dropped"])
def test_every_sequence_comes_once_and_whole(drop_remainder):
    lengths = zipf_lengths()
    stage = Bucket(16, drop_remainder=drop_remainder, max_shapes=4)
    seen, used, total = [], 0, 0
    for tokens, numbers in built(stage, lengths):
        assert tokens.shape[1] in stage.plan.boundaries
        for row, number in zip(tokens.numpy(), numbers.numpy(), strict=True):
            length = lengths[number]
            assert (row[:length] == number + 1).all()
            assert (row[length:] == 0).all()
            seen.append(number)
            used += length
            total += len(row)
    if drop_remainder:
        last = np.searchsorted(stage.plan.boundaries, lengths)
        whole = sum(np.bincount(last) // 16)
        assert len(set(seen)) == len(seen) == 16 * whole
    else:
        assert sorted(seen) == list(range(len(lengths)))
        assert stage.plan.waste == pytest.approx(1 - used / total)


def test_dropping_what_is_not_full_leaves_one_shape_for_each_bucket():
    stage = Bucket(4, max_shapes=3, drop_remainder=True)
    dataset = built(stage, zipf_lengths())
    shapes = {tuple(x.shape) for x, _ in dataset}
    assert shapes == {(4, boundary) for boundary in stage.plan.boundaries}
    assert dataset.element_spec[0].shape.as_list() == [4, None]


def test_xla_compiles_once_for_each_bucket():
    stage = Bucket(4, max_shapes=3, drop_remainder=True)
    traced = []

    @tf.function(jit_compile=True)
    def step(tokens):
        traced.append(tokens.shape)
        return tf.reduce_sum(tokens)

    for _ in range(2):
        for tokens, _ in stage.apply(stream_of(zipf_lengths()), SETTINGS):
            step(tokens)
    assert len(traced) == len(stage.plan.boundaries) == 3


@pytest.mark.slow
def test_a_compiled_model_trains_on_buckets_with_masks_and_weights():
    lengths = [3, 9, 5, 12, 7, 10, 2, 16]
    dataset = stream_of(lengths).map(lambda x, y: (x, tf.cast(x > 2, tf.int32)))
    stage = Bucket(2, max_shapes=2, drop_remainder=True, weight_padding=True)
    model = keras.Sequential(
        [
            keras.layers.Embedding(10, 4, mask_zero=True),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
    # Keras warns of a dataset whose length it does not know.
    batches = stage.apply(dataset, SETTINGS)
    batches = batches.apply(tf.data.experimental.assert_cardinality(len(list(batches))))
    history = model.fit(batches, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


def test_a_token_budget_bounds_every_batch():
    stage = Bucket(token_budget=128, max_shapes=4)
    sizes = []
    for tokens, _ in built(stage, zipf_lengths()):
        assert tokens.shape.num_elements() <= 128
        sizes.append(tokens.shape[0])
    assert max(sizes) == 128 // stage.plan.boundaries[0] > min(sizes)


def test_shuffled_streams_give_other_batches_each_epoch():
    shuffled = stream_of(LENGTHS).shuffle(12, seed=1)
    dataset = Bucket(4, max_shapes=2).apply(shuffled, SETTINGS)
    first, second = listed(dataset), listed(dataset)
    assert first != second
    assert sorted(n for _, batch in first for n in batch) == list(range(12))


# Padding.


def steps_of(length):
    """Returns an element with inputs, targets and a weight for each example."""
    tokens = tf.ensure_shape(tf.range(1, length + 1), [None])
    inputs = {"tokens": tokens, "features": tf.ones([length, 2]), "id": length}
    return inputs, tf.ones([length], tf.int64) * 5, tf.constant(0.5, tf.float64)


def steps(lengths):
    dataset = tf.data.Dataset.from_tensor_slices(np.asarray(lengths, np.int32))
    free = {"tokens": [None], "features": [None, 2], "id": []}

    def element(length):
        x, y, w = steps_of(length)
        x = {key: tf.ensure_shape(x[key], free[key]) for key in x}
        return x, tf.ensure_shape(y, [None]), w

    return dataset.map(element)


def test_all_sequences_of_an_element_are_padded():
    (x, y, w), *_ = Bucket(2, boundaries=[8]).apply(steps([3, 5]), SETTINGS)
    assert x["tokens"].numpy().tolist() == [
        [1, 2, 3, 0, 0, 0, 0, 0],
        [1, 2, 3, 4, 5, 0, 0, 0],
    ]
    assert x["features"].shape == (2, 8, 2)
    assert x["features"].numpy().sum(axis=(1, 2)).tolist() == [6, 10]
    assert x["id"].numpy().tolist() == [3, 5]
    assert y.numpy().sum(axis=1).tolist() == [15, 25]
    assert w.numpy().tolist() == [0.5, 0.5]


def test_a_mask_and_weights_tell_padding():
    stage = Bucket(
        2, boundaries=[8], mask="mask", weight_padding=True, padding_values=-1
    )
    dataset = stage.apply(steps([0, 5]), SETTINGS)
    (x, y, w), *_ = dataset
    assert x["mask"].dtype == tf.bool
    assert x["mask"].numpy().tolist() == [[False] * 8, [True] * 5 + [False] * 3]
    assert y.numpy().tolist() == [[-1] * 8, [5] * 5 + [-1] * 3]
    assert w.dtype == tf.float32
    assert w.numpy().tolist() == [[0.0] * 8, [0.5] * 5 + [0.0] * 3]
    assert stage.preview(steps([0, 5]), SETTINGS).element_spec == dataset.element_spec


def test_weights_of_each_step_are_kept():
    dataset = stream_of([2, 3]).map(lambda x, y: (x, x, tf.cast(x, tf.float32) / 4))
    stage = Bucket(2, boundaries=[4], pad_to_multiple=4, weight_padding=True)
    ((_, _, w),) = stage.apply(dataset, SETTINGS)
    assert w.numpy().tolist() == [[0.25, 0.25, 0, 0], [0.5, 0.5, 0.5, 0]]


def test_each_part_may_have_its_own_padding():
    words = stream_of([1, 2]).map(
        lambda x, y: (tf.strings.as_string(x), x, tf.cast(x, tf.float32))
    )
    cases = {
        None: (b"", 0, 0.0),
        "<pad>": (b"<pad>", 0, 0.0),
        7: (b"", 7, 7.0),
        ("<p>", -1, 0.5): (b"<p>", -1, 0.5),
    }
    for given, expected in cases.items():
        stage = Bucket(2, boundaries=[8], padding_values=given)
        ((text, numbers, floats),) = stage.apply(words, SETTINGS)
        assert (text[0, 1], numbers[0, 1], floats[0, 1]) == expected
        assert text[0, 0] == b"1"


def test_the_length_that_counts_may_be_given():
    stage = Bucket(2, boundaries=[8, 16], length=lambda x, y: y)
    ((x, _),) = stage.apply(stream_of([2, 3]).map(lambda x, y: (x, 9)), SETTINGS)
    assert x.shape == (2, 16)


def test_one_part_alone_is_an_element_too():
    alone = stream_of([2, 3]).map(lambda x, y: x)
    (x,) = Bucket(2, boundaries=[8]).apply(alone, SETTINGS)
    assert x.shape == (2, 8)
    one_tuple = stream_of([2, 3]).map(lambda x, y: (x,))
    ((x,),) = Bucket(2, boundaries=[8], weight_padding=False).apply(one_tuple, SETTINGS)
    assert x.shape == (2, 8)


# Too long.


def test_a_sequence_above_the_last_boundary_is_named_on_a_stream():
    dataset = Bucket(2, boundaries=[8]).apply(stream_of([3, 11]), SETTINGS)
    message = (
        "A sequence is above the last boundary, of length] [11] [Expected at most 8"
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        list(dataset)


@pytest.mark.quick("drop-[3, 8, 5]")
@pytest.mark.parametrize(
    "too_long, kept", [("truncate", [3, 8, 8, 5]), ("drop", [3, 8, 5])], ids=str
)
def test_sequences_may_be_cut_or_left_out_and_are_counted(too_long, kept):
    stage = Bucket(8, boundaries=[8], too_long=too_long)
    ((x, _),) = built(stage, [3, 8, 11, 5])
    assert (x.numpy() > 0).sum(axis=1).tolist() == kept
    assert stage.plan.num_too_long == 1
    setting, reason = stage.explain(stream_of([3]), SETTINGS)
    assert "1 too long, " in reason


def test_lengths_that_come_up_later_are_padded_to_the_longest_of_them():
    lengths = iter([[3, 5], [3, 21, 19]])

    def generate():
        for length in next(lengths):
            yield np.ones(length, np.int32)

    dataset = tf.data.Dataset.from_generator(
        generate, output_signature=tf.TensorSpec([None], tf.int32)
    )
    batches = list(Bucket(2).apply(dataset, SETTINGS))
    assert [tuple(batch.shape) for batch in batches] == [(2, 21), (1, 8)]


# Reading lengths.


def counted_stream(reads):
    def generate():
        reads.append(1)
        yield from (np.ones(length, np.int32) for length in LENGTHS)

    return tf.data.Dataset.from_generator(
        generate, output_signature=tf.TensorSpec([None], tf.int32)
    )


def test_lengths_are_read_once_and_only_where_needed():
    reads = []
    dataset = counted_stream(reads)
    stage = Bucket(4)
    stage.apply(dataset, SETTINGS)
    stage.apply(dataset, SETTINGS)
    assert len(reads) == 1
    given = Bucket(4, boundaries=[32])
    given.apply(dataset, SETTINGS)
    assert len(reads) == 1
    assert given.plan.waste is None


def test_explaining_reads_nothing_and_tells_the_waste_afterwards():
    reads = []
    dataset = counted_stream(reads)
    stage = Bucket(4, max_shapes=2)
    stage.check(dataset)
    assert stage.explain(dataset, SETTINGS) == (
        "4 a batch, up to 2 lengths",
        "least padding for so few shapes; lengths are read once, at build; rest of a "
        "bucket kept, one smaller batch each",
    )
    preview = stage.preview(dataset, SETTINGS)
    assert reads == []
    assert stage.plan is None
    built = stage.apply(dataset, SETTINGS)
    assert preview.element_spec == built.element_spec
    # 138 tokens: 6 up to 8 and 6 up to 32 take 240 places; 12 of 32 take 384.
    assert stage.explain(dataset, SETTINGS) == (
        "4 a batch, length 8, 32",
        "padding is 42.5 %, else 64.1 %; rest of a bucket kept, one smaller batch each",
    )
    given = Bucket(token_budget=4096, boundaries=[8, 32], drop_remainder=True)
    assert given.explain(dataset, SETTINGS) == (
        "4,096 places a batch, length 8, 32",
        "like lengths together; padding unknown, lengths are not read; rest of a "
        "bucket dropped",
    )


# Errors.


def check(stage, dataset):
    stage.check(dataset)
    stage.apply(dataset, SETTINGS)


def sized(**options):
    return {"batch_size": 3, **options}


OPTIONS = {
    "no size": ({}, "`batch_size` is None and `token_budget` is None; expected one of"),
    "two sizes": (
        {"batch_size": 3, "token_budget": 99},
        "`batch_size` is 3 and `token_budget` is 99; expected one of them.",
    ),
    "descending": (sized(boundaries=[16, 8]), "`boundaries` are (16, 8); expected at"),
    "none": (sized(boundaries=[]), "`boundaries` are (); expected at least one length"),
    "no multiple": (
        sized(boundaries=[8, 20]),
        "`boundaries` has 20, which is no multiple of 8; expected such multiples, "
        "which tensor cores want. Pass (8, 24), or `pad_to_multiple=1`.",
    ),
    "unknown": (sized(boundaries="best"), "Unknown `boundaries` 'best'; expected"),
    "small budget": (
        {"token_budget": 60, "boundaries": [64]},
        "`token_budget` is 60, and the longest sequences are padded to 64; expected",
    ),
    "nothing is too long": (
        sized(too_long="drop"),
        "`too_long` is 'drop' with boundaries chosen from the lengths, and none is",
    ),
    "length": (sized(length=5), "`length` is 5; expected a function", TypeError),
    "size": ({"batch_size": 2.5}, "`batch_size` is 2.5, of type float", TypeError),
}
test_wrong_options_are_refused = refusals(OPTIONS, lambda given: Bucket(**given))
TWO_FREE = tf.TensorSpec((None, None))
ERRORS = {
    "budget below the longest": (
        lambda: check(Bucket(token_budget=16), stream_of([3, 40])),
        "`token_budget` is 16, and the longest sequences are padded to 40; expected",
    ),
    "no sequence": (
        lambda: check(Bucket(3), tf.data.Dataset.range(3)),
        "expected a part whose first dimension is None, which is what varies.",
    ),
    "two free dimensions": (
        lambda: check(
            Bucket(3),
            tf.data.Dataset.from_generator(lambda: [], output_signature=TWO_FREE),
        ),
        "An element has a part of shape (None, None); expected one whose first",
    ),
    "sparse": (
        lambda: check(Bucket(3), tf.data.Dataset.from_tensors(tf.sparse.eye(2))),
        "expected dense tensors. Pad or convert it in `.map`, with `.to_tensor()`.",
    ),
    "no dict": (
        lambda: check(Bucket(3, mask="mask"), stream_of([3])),
        "`mask` is 'mask', and inputs are TensorSpec(shape=(None,)",
    ),
    "mask is there": (
        lambda: check(Bucket(3, mask="id"), steps([3])),
        "`mask` is 'id', which is one of the inputs ('tokens', 'features', 'id');",
    ),
    "one target": (
        lambda: check(Bucket(3, weight_padding=True), stream_of([3])),
        "`weight_padding` is True, and elements are (TensorSpec(shape=(None,)",
    ),
    "other structure": (
        lambda: check(Bucket(3, padding_values=(0, 1, 2)), stream_of([3])),
        "`padding_values` is (0, 1, 2); expected one value, or a structure like",
    ),
    "no end": (
        lambda: check(Bucket(3), stream_of([3]).repeat()),
        "`.bucket` got a dataset without end; expected one that ends",
    ),
    "empty": (
        lambda: check(Bucket(3), stream_of([3]).filter(lambda x, y: y > 5)),
        "The dataset has no elements to read the length of; expected at least one.",
    ),
    "returned length": (
        lambda: check(Bucket(3, length=lambda x, y: x), stream_of([3])),
        "expected an integer scalar. Return the number of steps",
        TypeError,
    ),
    "padding": (
        lambda: check(Bucket(3, padding_values=0.5), stream_of([3])),
        "`padding_values` holds 0.5; expected a number that int32 can hold.",
        TypeError,
    ),
}
test_datasets_that_do_not_suit_are_refused = refusals(ERRORS)


def test_a_dataset_without_end_may_have_boundaries_of_its_own():
    stage = Bucket(2, boundaries=[8])
    endless = stream_of([3, 5]).repeat()
    stage.check(endless)
    x, _ = next(iter(stage.apply(endless, SETTINGS)))
    assert x.shape == (2, 8)
