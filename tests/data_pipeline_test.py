"""`tfamp.data.Pipeline`: order, contents, shuffling, caches, options, errors."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusals
from tfamp.data import Pipeline
from tfamp.data.stages import Settings, batches

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


def test_each_method_returns_a_new_pipeline():
    base = numbers().batch(5)
    shuffled = base.shuffle(seed=1)
    assert len(base.stages) == 1
    assert [x for x, _ in rows(base.build())] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert len(shuffled.stages) == 2


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


@pytest.mark.parametrize("names", [(), ("map",), ("batch",), ("map", "batch")], ids=str)
def test_order_by_position_equals_order_by_buffer(names, monkeypatch):
    buffered = written("shuffle", *names).build()
    expected = [rows(buffered), rows(buffered)]
    monkeypatch.setattr(batches, "SHUFFLE_BUFFER_BYTES", 1)
    by_position = written("shuffle", *names)
    assert "gather" in table_stages(by_position.describe())
    dataset = by_position.build()
    assert [rows(dataset), rows(dataset)] == expected


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


def test_a_map_runs_once_before_a_cache_and_orders_still_vary():
    calls = []

    def count(x, y):
        tf.py_function(lambda: calls.append(1), [], [])
        return x, y

    dataset = numbers(20).shuffle(seed=1).map(count).cache("memory").build()
    first, second = rows(dataset), rows(dataset)
    assert len(calls) == 20
    assert first != second
    assert sorted(first) == sorted(second)


def test_a_mapped_function_gives_the_same_eagerly():
    eager = [double(i, 10 * i) for i in range(10)]
    assert rows(numbers().map(double).build()) == eager


def test_a_memory_cache_of_bare_arrays_is_left_out(capsys):
    text = numbers().cache("memory").describe()
    assert capsys.readouterr().out == text + "\n"
    assert "left out" in text
    assert "the arrays are in memory already" in text


def test_options_fix_parallelism_and_autotune_is_off():
    options = written("map", "batch").build().options()
    assert options.autotune.enabled is False
    assert options.threading.private_threadpool_size >= 1
    assert options.deterministic is True
    policy = options.experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.DATA
    assert written("batch").build(autotune=True).options().autotune.enabled is True


def test_autotune_sets_parallel_calls():
    # Two for each thread: one runs while the other waits for its turn.
    assert Settings(3, autotune=False).num_parallel_calls == 6
    assert Settings(3, autotune=True).num_parallel_calls == tf.data.AUTOTUNE


def test_the_plan_says_whether_a_shuffle_is_exact():
    assert "an exact shuffle" in numbers().shuffle().describe()
    assert "as asked" in numbers().shuffle(4).describe()


def test_a_dataset_of_unknown_length_is_shuffled_approximately():
    texts = tf.data.Dataset.from_tensor_slices(["a", "b", "c"]).filter(lambda x: True)
    text = Pipeline.from_dataset(texts).shuffle().describe()
    assert "what fits 256 MiB" in " ".join(text.split())
    assert "approximate" in text


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


def test_describing_a_shuffle_reads_nothing():
    pulled = []
    pipeline = Pipeline.from_dataset(generated(10, 50, pulled)).shuffle()
    pulled.clear()
    pipeline.describe()
    assert pulled == []
    assert sorted(int(text) for text in pipeline.build()) == list(range(50))


def test_an_error_while_sizes_are_measured_comes_in_the_pass():
    def refuse(x):
        tf.debugging.assert_less(x, tf.constant(3, tf.int64))
        return tf.strings.as_string(x)

    dataset = Pipeline.from_dataset(tf.data.Dataset.range(9)).map(refuse).shuffle()
    dataset = dataset.build()
    with pytest.raises(tf.errors.InvalidArgumentError):
        list(dataset)


WRONG = {
    "none": (lambda p: p.batch(0), "`batch_size` is 0; expected"),
    "a half": (
        lambda p: p.batch(2.5),
        "is 2.5, of type float;",
        TypeError,
    ),
    "a flag": (
        lambda p: p.batch(True),
        "is True, of type bool;",
        TypeError,
    ),
    "buffer": (lambda p: p.shuffle(-1), "`buffer_size` is -1; expected"),
    "seed": (
        lambda p: p.shuffle(seed="a"),
        "`seed` is 'a', of type str; expected",
        TypeError,
    ),
    "ahead": (lambda p: p.prefetch(0), "`num_batches` is 0; expected"),
    "function": (lambda p: p.map(3), "`function` is 3; expected something", TypeError),
    "cache": (lambda p: p.cache(None), "`where` is None; expected 'memory'", TypeError),
    "autotune": (
        lambda p: p.build(autotune="on"),
        "`autotune` is 'on'; expected 'auto', True or False.",
    ),
}
test_wrong_arguments_are_refused_at_once = refusals(WRONG, lambda call: call(numbers()))


def array(tmp_path):
    return numbers(100)


def text_files(tmp_path):
    (tmp_path / "a.txt").write_text("line\n" * 100)
    return Pipeline.from_text(str(tmp_path / "a.txt"))


def csv_files(tmp_path):
    (tmp_path / "a.csv").write_text("x\n" + "1\n" * 100)
    return Pipeline.from_csv(str(tmp_path / "a.csv"))


def record_files(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "a")) as writer:
        for _ in range(100):
            writer.write(b"record")
    return Pipeline.from_tfrecord(str(tmp_path / "a"))


@pytest.mark.parametrize("begin", [array, text_files, csv_files, record_files])
def test_no_batch_left_is_an_error(tmp_path, begin):
    pipeline = begin(tmp_path)
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


def test_fit_takes_it_with_steps_per_execution():
    model = keras.Sequential([keras.Input((4,), dtype="uint8"), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=2)
    x = np.arange(40, dtype=np.uint8).reshape(10, 4) % 3
    dataset = Pipeline.from_arrays(x, np.ones(10)).shuffle(seed=1).batch(2).build()
    history = model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert model.optimizer.iterations == 10


def test_a_pipeline_is_iterated_as_what_it_builds():
    pipeline = numbers(3).map(double).batch(2)
    assert [x.numpy().tolist() for x, _ in pipeline] == [[0, 2], [4]]
    assert [x.numpy().tolist() for x, _ in pipeline] == [[0, 2], [4]]


def test_arrays_that_are_handed_to_the_class_itself_are_an_error_with_the_right_call():
    for call in (lambda: Pipeline(np.zeros(3), np.ones(3)), lambda: Pipeline([1])):
        with pytest.raises(TypeError, match=re.escape("`Pipeline.from_arrays(x, y)`")):
            call()


def test_a_cache_is_in_memory_unless_told():
    assert "memory" in numbers(3).map(double).cache().describe()
