"""`tfamp.data.Pipeline`: order, contents, shuffling, caches, options, errors."""

import re

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
    "prefetch": lambda p: p.prefetch(),
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


@pytest.mark.parametrize("name", sorted({*STAGES} - {"map"}))
def test_a_stage_given_twice_is_an_error(name):
    pipeline = STAGES[name](numbers())
    message = f"`.{name}` came twice; expected each stage once"
    with pytest.raises(ValueError, match=re.escape(message)):
        STAGES[name](pipeline)


@pytest.mark.parametrize("by_position", [False, True], ids=["buffer", "position"])
def test_cardinality_and_spec_are_kept(by_position, monkeypatch):
    if by_position:
        monkeypatch.setattr(batches, "SHUFFLE_BUFFER_BYTES", 1)
    images = np.zeros((10, 8, 8, 1), np.uint8)
    pipeline = Pipeline.from_arrays(images, np.arange(10)).shuffle(seed=1)
    assert ("gather" in table_stages(pipeline.batch(4).describe())) is by_position
    dataset = pipeline.batch(4).build()
    assert int(dataset.cardinality()) == 3
    assert dataset.element_spec[0] == tf.TensorSpec((None, 8, 8, 1), tf.uint8)
    static = pipeline.batch(4, drop_remainder=True).build()
    assert int(static.cardinality()) == 2
    assert static.element_spec[0] == tf.TensorSpec((4, 8, 8, 1), tf.uint8)


@pytest.mark.parametrize("by_position", [False, True], ids=["buffer", "position"])
def test_each_epoch_is_a_new_order_of_all_elements(by_position, monkeypatch):
    if by_position:
        monkeypatch.setattr(batches, "SHUFFLE_BUFFER_BYTES", 1)
    dataset = numbers(50).shuffle(seed=7).build()
    epochs = [[x for x, _ in rows(dataset)] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = numbers(50).shuffle(seed=7).build()
    assert [[x for x, _ in rows(again)] for _ in range(3)] == epochs
    other = numbers(50).shuffle(seed=8).build()
    assert [x for x, _ in rows(other)] != epochs[0]


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


WRONG = {
    "none": (lambda p: p.batch(0), "`batch_size` is 0; expected"),
    "function": (lambda p: p.map(3), "`function` is 3; expected something", TypeError),
    "cache": (lambda p: p.cache(None), "`where` is None; expected 'memory'", TypeError),
    "autotune": (
        lambda p: p.build(autotune="on"),
        "`autotune` is 'on'; expected 'auto', True or False.",
    ),
}
test_wrong_arguments_are_refused_at_once = refusals(WRONG, lambda call: call(numbers()))


@pytest.mark.parametrize("is_file", [False, True], ids=["arrays", "rows"])
def test_no_batch_left_is_an_error(tmp_path, is_file):
    (tmp_path / "a.csv").write_text("x\n" + "1\n" * 100)
    pipeline = Pipeline.from_csv(tmp_path / "a.csv") if is_file else numbers(100)
    message = "Batch size 128 with `drop_remainder=True` leaves no batch of 100 el"
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline.batch(128, drop_remainder=True).build()
    assert int(pipeline.batch(100, drop_remainder=True).build().cardinality()) == 1


def test_batching_batches_warns():
    batches = tf.data.Dataset.from_tensor_slices(np.zeros((6, 2))).batch(4)
    pipeline = Pipeline.from_dataset(batches).batch(2)
    with pytest.warns(UserWarning, match="look like batches already") as caught:
        pipeline.build()
    assert caught[0].filename == __file__


def test_arrays_that_are_handed_to_the_class_itself_are_an_error_with_the_right_call():
    for call in (lambda: Pipeline(np.zeros(3), np.ones(3)), lambda: Pipeline([1])):
        with pytest.raises(TypeError, match=re.escape("`Pipeline.from_arrays(x, y)`")):
            call()


def test_guesses_of_users_of_tf_data_work_or_say_what_to_write():
    spec = tf.TensorSpec((), tf.int64)
    made = Pipeline.from_generator(lambda: iter(range(5)), output_signature=spec)
    assert [int(x) for x in made.map(lambda x: x + 1)] == [1, 2, 3, 4, 5]
    assert len(numbers(10).batch(4)) == 3 and bool(numbers(1))
    with pytest.raises(TypeError, match="`steps_per_epoch`"):
        len(made.batch(2))
    message = "`Pipeline` has no `apply`. Did you mean pipeline.build().apply"
    with pytest.raises(AttributeError, match=re.escape(message)):
        made.apply(None)
    assert not hasattr(made, "nonsense") and not hasattr(made, "__array__")
