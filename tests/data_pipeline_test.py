"""`tfamp.data.Pipeline`: order, contents, shuffling, lengths, forms of use, errors."""

import gc
import re
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusals
from tfamp.data import Pipeline
from tfamp.data.stages import batches

STAGES = {
    "map": lambda p: p.map(double),
    "cache": lambda p: p.cache("memory"),
    "shuffle": lambda p: p.shuffle(seed=3),
    "batch": lambda p: p.batch(4),
    "prefetch": lambda p: p.prefetch(tf.data.AUTOTUNE),
}


def double(x, y):
    return x * 2, y


def numbers(n=10):
    return Pipeline.from_arrays(np.arange(n), np.arange(n) * 10)


def written(*names):
    pipeline = numbers()
    for name in names:
        pipeline = STAGES[name](pipeline)
    return pipeline


def rows(dataset):
    return [tuple(part.numpy().tolist() for part in element) for element in dataset]


def table_stages(text):
    return [line.split()[0] for line in text.splitlines()[2:] if line[1] != " "]


@pytest.mark.parametrize(
    "names",
    [
        ("map", "cache", "shuffle", "batch", "prefetch"),
        ("prefetch", "shuffle", "cache", "map", "batch"),
        ("map", "batch", "prefetch", "cache", "shuffle"),
    ],
    ids=["right", "reversed", "mixed"],
)
def test_any_order_of_calls_runs_in_the_right_order(names):
    pipeline, stages = written(*names), ["map", "cache", "shuffle", "batch", "prefetch"]
    assert table_stages(pipeline.describe()) == ["source", *stages, "threads"]
    in_order = written(*stages)
    assert rows(pipeline.build()) == rows(in_order.build())


def test_a_stage_given_twice_is_an_error():
    for name in ("cache", "shuffle", "batch", "prefetch"):
        with pytest.raises(ValueError, match=rf"`\.{name}` came twice; expected each"):
            written(name, name)


@pytest.fixture(params=[False, True], ids=["buffer", "position"])
def by_position(request, monkeypatch):
    """Elements are shuffled in a buffer, or, where they do not fit, by their places."""
    if request.param:
        monkeypatch.setattr(batches, "SHUFFLE_BUFFER_BYTES", 1)
    return request.param


def test_cardinality_and_spec_are_kept(by_position):
    images = np.zeros((10, 8, 8, 1), np.uint8)
    pipeline = Pipeline.from_arrays(images, np.arange(10)).shuffle(seed=1)
    assert ("gather" in table_stages(pipeline.batch(4).describe())) is by_position
    dataset = pipeline.batch(4).build()
    assert int(dataset.cardinality()) == 3
    assert dataset.element_spec[0] == tf.TensorSpec((None, 8, 8, 1), tf.uint8)
    static = pipeline.batch(4, drop_remainder=True).build()
    assert int(static.cardinality()) == 2
    assert static.element_spec[0] == tf.TensorSpec((4, 8, 8, 1), tf.uint8)


def test_each_epoch_is_a_new_order_of_all_elements(by_position):
    def epochs(seed):
        dataset = numbers(50).shuffle(seed=seed).build()
        return [[x for x, _ in rows(dataset)] for _ in range(3)]

    found = epochs(7)
    assert [sorted(epoch) for epoch in found] == [list(range(50))] * 3
    assert len({tuple(epoch) for epoch in found}) == 3
    assert epochs(7) == found and epochs(8)[0] != found[0]


def generated(size, count, pulled):
    """Texts of a size each, of which every one that is read is noted."""

    def texts():
        for number in range(count):
            pulled.append(number)
            yield f"{number:0{size}}"

    spec = tf.TensorSpec((), tf.string)
    return tf.data.Dataset.from_generator(texts, output_signature=spec)


@pytest.mark.quick("many")
@pytest.mark.parametrize("size, held", [(900, 250), (10_000, 64)], ids=["many", "few"])
def test_elements_of_varying_size_are_held_by_their_bytes(monkeypatch, size, held):
    # 300 bytes of the tensor itself beside the text: 250 of 1,200 fit 300,000.
    monkeypatch.setattr("tfamp.data.stages.batches.SHUFFLE_BUFFER_BYTES", 300_000)
    pulled = []
    dataset = Pipeline.from_dataset(generated(size, 2000, pulled)).shuffle(seed=1)
    dataset = dataset.build()
    pulled.clear()
    next(iter(dataset))
    # One more fills the place of the first that goes; a generator runs ahead by one.
    assert held <= len(pulled) <= held + 2
    found = sorted(int(text[-9:]) for text in dataset.as_numpy_iterator())
    assert found == list(range(2000))


@pytest.mark.parametrize("is_cached", [False, True], ids=["positions", "cache"])
def test_behind_a_cache_balance_repeats_what_was_cached(tmp_path, is_cached):
    pipeline = Pipeline.from_arrays(np.arange(8), np.array([0] * 6 + [1] * 2))
    stages = ["source", "balance", "gather", "threads"]
    if is_cached:
        pipeline = pipeline.map(lambda x, y: (x, y)).cache(tmp_path / "train")
        stages = ["source", "map", "cache", "balance", "threads"]
    pipeline = pipeline.balance(seed=1)
    assert table_stages(pipeline.describe()) == stages
    dataset = pipeline.build()
    assert int(dataset.cardinality()) == 8
    assert sorted(int(y) for _, y in dataset) == [0] * 4 + [1] * 4


def test_rows_that_nothing_looks_at_come_in_whole_batches_of_a_known_number(tmp_path):
    (tmp_path / "table.csv").write_text("a\n" + "1\n" * 9)
    pipeline = Pipeline.from_csv(tmp_path / "table.csv").batch(4)
    assert "from chunks" in pipeline.describe()
    assert len(pipeline) == 3
    assert [len(x["a"]) for x in pipeline] == [4, 4, 1]


COUNT = {
    "elements": (lambda p: p.take(7).batch(4), [[0, 1, 2, 3], [4, 5, 6]]),
    "batches": (lambda p: p.batch(4).take(2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "what a filter keeps": (
        lambda p: p.filter(lambda x: x % 2 == 0).take(3).batch(8),
        [[0, 2, 4]],
    ),
    "of no end": (
        lambda p: p.take(2).repeat().batch(3).take(2),
        [[0, 1, 0], [1, 0, 1]],
    ),
}


@pytest.mark.parametrize("make, expected", COUNT.values(), ids=COUNT)
def test_take_and_repeat_count_what_is_written_before_them(make, expected):
    made = make(Pipeline.from_dataset(tf.data.Dataset.range(20)))
    assert [batch.numpy().tolist() for batch in made] == expected


def test_fit_evaluate_and_predict_take_a_pipeline_as_it_is():
    x = np.random.default_rng(0).normal(size=(60, 3)).astype("float32")
    y = x @ np.array([[1.0], [-2.0], [0.5]], "float32")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    pairs = Pipeline.from_arrays(x, y).batch(20)
    seen = model.fit(pairs, validation_data=pairs, epochs=3, verbose=0).history
    assert seen["loss"][-1] < seen["loss"][0] and len(seen["val_loss"]) == 3
    loss = model.evaluate(x, y, verbose=0)  # of batches of 32
    assert model.evaluate(pairs, verbose=0) == pytest.approx(loss, rel=1e-6)
    inputs = Pipeline.from_arrays(x).batch(7)
    np.testing.assert_allclose(
        model.predict(inputs, verbose=0), model.predict(x, verbose=0), rtol=1e-6
    )


def test_a_build_that_nobody_holds_any_more_is_let_go():
    # A search over settings builds a dataset for each trial.
    pipeline = numbers(50).subset(0.5).map(double).shuffle(seed=1).batch(4)
    builds = [pipeline.build() for _ in range(2)]
    assert [len(list(each.take(2))) for each in builds] == [2, 2]
    left = [weakref.ref(each) for each in builds]
    del builds
    gc.collect()
    assert [reference() for reference in left] == [None, None]


WRONG = {
    "none": (lambda p: p.batch(0), "`batch_size` is 0; expected"),
    "function": (lambda p: p.map(3), "`function` is 3; expected something", TypeError),
    "cache": (lambda p: p.cache(None), "`where` is None; expected 'memory'", TypeError),
    "autotune": (lambda p: p.build(autotune="on"), "`autotune` is 'on'; expected"),
    "take": (lambda p: p.take(0), "`count` is 0; expected"),
    "repeat": (lambda p: p.repeat().balance().build(), "got a dataset without end"),
    "the class": (lambda p: Pipeline([1]), "`Pipeline.from_arrays(x, y)`", TypeError),
    "batch": (
        lambda p: p.batch(128, drop_remainder=True).build(),
        "Batch size 128 with `drop_remainder=True` leaves no batch of 10 el",
    ),
    "attribute": (
        lambda p: p.apply(None),
        "`Pipeline` has no `apply`. Did you mean pipeline.build().apply",
        AttributeError,
    ),
}
test_wrong_arguments_are_refused = refusals(WRONG, lambda call: call(numbers()))


def test_batching_batches_warns():
    batches = tf.data.Dataset.from_tensor_slices(np.zeros((6, 2))).batch(4)
    pipeline = Pipeline.from_dataset(batches).batch(2)
    with pytest.warns(UserWarning, match="look like batches already") as caught:
        pipeline.build()
    assert caught[0].filename == __file__


def test_a_length_is_that_of_batches_and_unknown_where_nobody_knows():
    spec = tf.TensorSpec((), tf.int64)
    made = Pipeline.from_generator(lambda: iter(range(5)), output_signature=spec)
    assert [int(x) for x in made.map(lambda x: x + 1)] == [1, 2, 3, 4, 5]
    assert len(numbers(10).batch(4)) == 3 and bool(numbers(1))
    with pytest.raises(TypeError, match=re.escape("`steps_per_epoch`")):
        len(made.batch(2))


def test_a_batch_that_never_fills_is_an_error_where_the_length_shows_in_the_pass():
    given = Pipeline.from_arrays(np.arange(100)).filter(lambda x: x < 5)
    dataset = given.batch(8, drop_remainder=True).build()
    message = "(?s)no batch.*drop_remainder|drop_remainder.*no batch"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(dataset)
    full = given.batch(5, drop_remainder=True).build()
    assert len(list(full)) == 1
    assert tf.nest.flatten(full.element_spec)[0].shape[0] == 5
