"""One run of a comparison: windows of steps, losses, latencies, what it records."""

import itertools
import json
import math
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.replicas import two_replicas
from tfamp.trials import batches, measurements, parcel, training, worker
from tfamp.trials.clock import Window, curve, seconds_per_step, steady
from tfamp.trials.run_records import Run
from tfamp.trials.tasks import Task
from tfamp.trials.training import train

pytest.importorskip("cloudpickle")
X = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def compiled(model, **options):
    # Keras itself fails on compiled metrics that a `train_step` leaves alone.
    metrics = None if isinstance(model, OwnStep) else ["mae"]
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=metrics, **options)
    return model


def functional():
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(1)(inputs))


def sequential():
    return keras.Sequential([keras.layers.Dense(1)])


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = functional()

    def call(self, inputs):
        return self.inner(inputs)


class OwnStep(Subclassed):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        return {"loss": loss}


WAYS = {
    "functional": (functional, {}),
    "sequential": (sequential, {}),
    "subclassed": (Subclassed, {}),
    "own train_step": (OwnStep, {}),
    "several steps a call": (functional, {"steps_per_execution": 2}),
    "eager": (functional, {"run_eagerly": True}),
    "XLA": (functional, {"jit_compile": True}),
}


def trained(model, data, validation=None, **how):
    """The figures of a run."""
    given = {"run": Run("float32", 0), "epochs": 3, **how}
    return train(model, data, validation, **given)[0]


@pytest.mark.quick("functional", "own train_step")
@pytest.mark.parametrize("make, options", WAYS.values(), ids=WAYS)
def test_every_way_of_writing_a_model_is_measured(make, options, tmp_path):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
    model = compiled(make(), **options)
    ticks = itertools.count(step=0.001)  # far from the length of a window
    found = trained(model, data, data, clock=lambda: next(ticks))
    assert (found.batch_size, found.num_steps, found.warmup_steps) == (10, 12, 4)
    assert found.examples_per_second > 0
    assert found.first_step_seconds > 0
    assert len(found.history["loss"]) == 3
    assert found.final_metrics["loss"] == found.history["val_loss"][-1]
    assert [step for step, _ in found.losses][-1] == 12
    assert len(found.losses) == 4  # the first step, and the ends of epochs
    if make is OwnStep:  # it logs the loss of a step, which Keras's history has as 0
        assert found.losses[1][1] > 0
    else:
        first, rest = found.losses[0], found.losses[1]
        mean = (first[0] * first[1] + (rest[0] - first[0]) * rest[1]) / rest[0]
        assert mean == pytest.approx(found.history["loss"][0], rel=1e-5)


@pytest.mark.slow
def test_arrays_and_a_pydataset_are_taken(tmp_path):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            part = slice(10 * index, 10 * index + 10)
            return X[part], Y[part]

    arrays = trained(compiled(functional()), (X, Y), (X, Y), batch_size=16)
    # 40 rows in batches of 16, 16 and 8.
    assert (arrays.batch_size, arrays.num_steps) == (16, 9)
    own = trained(compiled(functional()), Batches())
    assert (own.batch_size, own.num_steps) == (10, 12)
    # Without validation data the metrics are those of training.
    assert own.final_metrics == {
        "loss": own.history["loss"][-1],
        "mae": own.history["mae"][-1],
    }


@pytest.mark.slow
def test_two_replicas_are_measured(tmp_path):
    # TensorFlow's collectives take a second model of a process for the first one.
    strategy = two_replicas()
    with strategy.scope():
        model = compiled(functional())
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
    found = trained(model, data, data, epochs=1)
    assert (found.batch_size, found.num_steps) == (10, 4)


REFUSED = {
    "empty": (
        lambda: tf.data.Dataset.range(0).batch(1),
        {},
        "holds no batches; expected",
    ),
    "endless": (
        lambda: tf.data.Dataset.from_tensors((X, Y)).repeat(),
        {},
        "The training data has no end",
    ),
    "batch size": (
        lambda: tf.data.Dataset.from_tensors((X, Y)),
        {"batch_size": 8},
        "`batch_size` is 8, but the training data comes in batches",
    ),
}


@pytest.mark.parametrize("data, settings, message", REFUSED.values(), ids=REFUSED)
def test_data_that_cannot_be_used_is_refused(data, settings, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        trained(compiled(functional()), data(), None, **settings)


def test_skipped_steps_are_noted(tmp_path):
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.01), 1024.0)
    model = functional()
    model.compile(optimizer, "mse")
    bad = X.copy()
    bad[10] = np.inf
    data = tf.data.Dataset.from_tensor_slices((bad, Y)).batch(10)
    found = trained(model, data, None, epochs=1)
    assert found.skipped_steps == 1


def test_keras_own_scale_says_that_skips_are_unknown(tmp_path):
    model = functional()
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    found = trained(model, (X, Y), None, epochs=1)
    assert found.notes == (
        "Keras's own loss-scale optimizer does not tell which steps it skipped.",
    )


def test_a_training_tells_how_far_it_is():
    now = [0.0]

    def clock():
        now[0] += 0.06  # two looks at the clock make a window
        return now[0]

    told = []
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(1)
    trained(compiled(functional()), data, None, epochs=2, tell=told.append, clock=clock)
    assert told == sorted(told)
    assert 0 < told[0] < told[-1] <= 1


# Windows


def windows(*steps, epoch=0, seconds=1.0):
    last = list(itertools.accumulate(steps))
    return [
        Window(epoch, last[i], steps[i], last[i], seconds, None)
        for i in range(len(steps))
    ]


def test_the_first_of_three_epochs_is_warm_up():
    run = [Window(epoch, 10 * epoch + 10, 10, 10, 1.0, None) for epoch in range(3)]
    assert steady(run, num_epochs=3) == (tuple(run[1:]), 10)


def test_of_one_epoch_a_tenth_is_warm_up_and_at_most_50_steps():
    kept, warmup_steps = steady(windows(*[10] * 200), num_epochs=1)
    assert (len(kept), warmup_steps) == (195, 50)


def test_a_rare_stall_does_not_count_and_is_told():
    run = [Window(1, step, 1, step, 0.1, None) for step in range(1, 40)]
    stalled = [*run[:20], Window(1, 40, 1, 40, 16.1, None), *run[20:]]
    seconds, note = seconds_per_step(stalled)
    assert seconds == pytest.approx(0.1)
    # Two of forty are left out: 16 s in one of them, nothing in the other.
    assert note == "Stalls of 16.0 s in 2 of 40 windows of steps do not count."


def test_the_rate_is_the_mean_of_what_is_not_rare():
    # A window of two fast steps, one of a slow step, in turn: 3 steps in 0.5 s.
    run = [
        Window(1, 3 * i, 1 + i % 2, i, (0.3, 0.2)[i % 2], None) for i in range(1, 41)
    ]
    seconds, note = seconds_per_step(run)
    # Two slow steps and two windows of fast ones are left out, 18 of each stay.
    assert seconds == pytest.approx(0.5 / 3)
    assert note == ""


def test_of_few_windows_all_count():
    run = [Window(1, step, 1, step, 0.1 * step, None) for step in range(1, 8)]
    assert seconds_per_step(run) == (pytest.approx(0.4), "")


def test_the_first_window_is_never_steady():
    kept, warmup_steps = steady(windows(1, 1, 1), num_epochs=1)
    assert (len(kept), warmup_steps) == (2, 1)


def test_one_window_has_to_do_where_there_is_no_other():
    assert steady(windows(1), num_epochs=1)[1] == 0


# Windows: epoch, last step, steps, steps in the epoch, seconds, running mean.
CURVES = {
    # Means 4 after two steps and 3 after three: the third step had a loss of 1.
    "means of each epoch": (
        [(0, 2, 2, 2, 1.0, 4.0), (0, 3, 1, 3, 1.0, 3.0), (1, 4, 1, 1, 1.0, 0.5)],
        ((2, 4.0), (3, 1.0), (4, 0.5)),
    ),
    # Six in the first step, six in the two after it.
    "a loss that was not read": (
        [(0, 1, 1, 1, 1.0, 6.0), (0, 2, 1, 2, 1.0, None), (0, 3, 1, 3, 1.0, 4.0)],
        ((1, 6.0), (3, 3.0)),
    ),
}


@pytest.mark.parametrize("run, expected", CURVES.values(), ids=CURVES)
def test_losses_come_from_running_means(run, expected):
    assert curve([Window(*each) for each in run]) == expected


def test_the_loss_of_a_step_is_taken_as_it_is():
    run = [Window(0, n, 1, n, 1.0, float(n), is_mean=False) for n in (1, 2)]
    assert curve(run) == ((1, 1.0), (2, 2.0))


def test_a_nan_stays_until_the_epoch_ends():
    run = [Window(0, 1, 1, 1, 1.0, math.nan), Window(1, 2, 1, 1, 1.0, 2.0)]
    assert math.isnan(curve(run)[0][1])
    assert curve(run)[1] == (2, 2.0)


def test_many_points_are_joined_by_weight():
    run = [Window(0, n, 1, n, 1.0, 1.0) for n in range(1, 11)]
    assert curve(run, max_points=4) == ((3, 1.0), (6, 1.0), (9, 1.0), (10, 1.0))


# Single examples


def classifier(**options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, **{"metrics": ["accuracy"], **options})
    return model


LABELS = (Y[:, 0] > 0).astype("int32")
FORMS = {
    "arrays": lambda: (X, LABELS),
    "a dataset": lambda: tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(16),
}


def measured_examples(model, data, **changed):
    arrays = data[:2] if isinstance(data, tuple) else (data,)
    final = model.evaluate(*arrays, verbose=0, return_dict=True)
    return measurements.measure_examples(
        model, data, {**final, **changed}, batch_size=16
    ), final


@pytest.mark.quick("a dataset")
@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_metrics_are_known_of_each_example(make):
    model = classifier()
    found, final = measured_examples(model, make())
    right = model.predict(X, verbose=0).argmax(axis=1) == LABELS
    assert found.number == 40
    np.testing.assert_array_equal(found.values["accuracy"], right.astype(np.float32))
    assert np.mean(found.values["loss"]) == pytest.approx(final["loss"], rel=1e-5)


NOT_PER_EXAMPLE = {
    "an accuracy that fit logged otherwise": ({}, {"accuracy": 0.123}, "accuracy"),
    "no mean": ({"metrics": [keras.metrics.AUC(from_logits=True)]}, {}, "auc"),
}


@pytest.mark.quick("an accuracy that fit logged otherwise")
@pytest.mark.parametrize(
    "options, changed, name", NOT_PER_EXAMPLE.values(), ids=NOT_PER_EXAMPLE
)
def test_a_metric_that_is_no_mean_over_examples_is_left_out(options, changed, name):
    model = classifier(**options)
    if name == "auc":
        model = functional()
        model.compile("sgd", "binary_crossentropy", **options)
    found, _ = measured_examples(model, (X, LABELS), **changed)
    assert name not in found.values
    assert found.number == 40


def test_weighted_examples_are_counted_and_no_more():
    found, _ = measured_examples(classifier(), (X, LABELS, np.ones(40, np.float32)))
    assert (found.values, found.number) == ({}, 40)


def test_examples_are_compared_where_all_runs_saw_the_same(tmp_path):
    pair = Run("float32", 0), Run("auto", 0)

    def write(run, values, fingerprint="a"):
        given = {"accuracy": np.float32(values)}
        path = tmp_path / f"{run.policy}_seed0{measurements.SUFFIX}"
        measurements.PerExample(given, fingerprint, 3).write(path)

    assert measurements.differences(tmp_path, [pair], "accuracy") is None
    write(pair[0], [1, 1, 0])
    write(pair[1], [1, 0, 1])
    found = measurements.differences(tmp_path, [pair], "accuracy")
    assert found.tolist() == [[0, -1, 1]]
    assert measurements.differences(tmp_path, [pair], "loss") is None
    write(pair[1], [1, 0, 1], "another order")
    assert measurements.differences(tmp_path, [pair], "accuracy") is None


def test_the_order_of_examples_is_in_their_fingerprint():
    model, turned = classifier(), (X[::-1], LABELS[::-1])
    first, second = (measured_examples(model, d)[0] for d in ((X, LABELS), turned))
    assert first.fingerprint != second.fingerprint
    assert first.fingerprint == measured_examples(model, (X, LABELS))[0].fingerprint


# Latencies


def test_calls_are_timed_for_each_size():
    ticks = itertools.count(step=0.25)
    found, why = training.latencies(
        functional(), tf.constant(X[:2]), sizes=[1, 5], clock=lambda: next(ticks)
    )
    assert why == []
    assert [each.batch_size for each in found] == [1, 5]
    assert found[0].p50_seconds == 0.25
    assert found[0].num_calls == 10
    assert found[1].examples_per_second == pytest.approx(5 / 0.25)


def test_sizes_are_timed_in_several_rounds_and_turns():
    seen, now = [], [0.0]

    class Model(keras.Model):
        def call(self, inputs):
            size = tf.shape(inputs)[0]
            tf.py_function(lambda n: seen.append(int(n)), [size], [])
            return inputs

    def clock():
        now[0] += 0.06
        return now[0]

    found, _ = training.latencies(
        Model(), tf.constant(X[:2]), sizes=[1, 5], clock=clock
    )
    order = [size for size, _ in itertools.groupby(seen)]
    assert order == [1, 5] * (1 + training.ROUNDS)
    # A look at the clock before each call and one after it.
    assert [each.p99_seconds for each in found] == [pytest.approx(0.06)] * 2
    assert {each.num_calls for each in found} == {2 * training.ROUNDS}


def test_rows_are_repeated_for_a_larger_size():
    rows = batches.rows(tf.constant([[1.0], [2.0]]), 5)
    assert rows.numpy().ravel().tolist() == [1, 2, 1, 2, 1]
    ragged = batches.rows(tf.ragged.constant([[1.0], [2.0, 3.0]]), 3)
    assert ragged.to_list() == [[1.0], [2.0, 3.0], [1.0]]


def test_a_model_that_cannot_take_a_size_says_so():
    class OnlyFour(keras.Model):
        def call(self, inputs):
            return tf.ensure_shape(inputs, (4, 3))

    found, (why,) = training.latencies(OnlyFour(), tf.constant(X[:4]), sizes=[4, 8])
    assert [each.batch_size for each in found] == [4]
    assert why.startswith("Calls of the model with a batch of 8 were not timed:")


# A run


def build(seed):
    keras.utils.set_random_seed(seed)
    return compiled(functional())


@pytest.fixture
def disabled():
    yield
    tfamp.disable()
    keras.config.set_dtype_policy("float32")


def measured(tmp_path, policy, *parcelled, **given):
    """What a process records of a task that this one does."""
    task = Task(policy, **given)
    parcel.pack(tmp_path, *parcelled)
    worker.main([str(tmp_path), task.to_json()])
    return Run.from_json(tmp_path / f"{task.name}.json")


def test_a_run_has_every_figure(tmp_path, disabled):
    given = {"batch_size": 20, "latency_batch_sizes": (2,), "seed": 7, "epochs": 3}
    data = (X, Y), (X, Y)
    run = measured(tmp_path, "mixed_bfloat16", build, *data, command="c", **given)
    assert Run.from_json(run.to_json()) == run
    assert run.policy == run.resolved_policy == "mixed_bfloat16"
    assert run.seed == 7
    assert (run.num_epochs, run.num_steps, run.num_parameters) == (3, 6, 4)
    assert run.num_examples == 40
    assert (tmp_path / "mixed_bfloat16_seed7.examples").is_file()
    assert [each.batch_size for each in run.latencies] == [2, 20]
    # The rest of memory is measured in a process of its own.
    assert 2**26 < run.memory.start_bytes and run.memory.training_bytes is None
    assert run.file_bytes > 1000
    assert not list(tmp_path.glob("*.keras"))
    assert run.num_nonfinite_weights == 0
    (head,) = [layer for layer in run.layers if layer.class_name == "Dense"]
    assert head.compute_dtype == "float32"
    context = json.loads((tmp_path / "context.json").read_text())
    assert context["command"] == "c"
    assert context["versions"]["keras"] == keras.__version__


@pytest.mark.slow
def test_stock_keras_runs_without_tfamp(tmp_path, disabled):
    run = measured(tmp_path, "keras:mixed_bfloat16", build, (X, Y), None)
    assert run.reason == "stock Keras"
    dense = next(layer for layer in run.layers if layer.class_name == "Dense")
    assert (dense.compute_dtype, dense.rule) == ("bfloat16", "not managed")
    assert not tfamp.status().enabled


@pytest.mark.slow
def test_the_building_function_may_bring_the_data_and_take_seed_and_epochs(
    tmp_path, disabled
):
    def build_all(*, seed, epochs):
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(epochs * seed)
        return compiled(functional()), data, lambda: (X[:8], Y[:8])

    run = measured(tmp_path, "float32", build_all, None, None, seed=4, epochs=3)
    # Three epochs of 40 / (3 * 4) batches.
    assert (run.batch_size, run.num_steps) == (12, 12)
    assert "val_loss" in run.history


WRONG_BUILDS = {
    "no model": (
        lambda: 3,
        "TypeError",
        "`build_model` returned 3; expected a compiled",
    ),
    "not compiled": (functional, "TypeError", "Call `model.compile` in it and return"),
    "four values": (
        lambda: (1, 2, 3, 4),
        "TypeError",
        "`build_model` returned (1, 2, 3, 4); expected a compiled model, (model,",
    ),
    "no data": (
        lambda: compiled(functional()),
        "ValueError",
        "There is no training data; expected `train`, or a `build_model` that",
    ),
}


@pytest.mark.parametrize("make, kind, message", WRONG_BUILDS.values(), ids=WRONG_BUILDS)
def test_what_was_built_is_checked(make, kind, message, tmp_path, disabled):
    run = measured(tmp_path, "float32", make, None, None)
    assert message in run.error and run.error.startswith(kind)


def test_data_comes_from_the_building_function_or_from_the_call(tmp_path, disabled):
    def build_all():
        return compiled(functional()), (X, Y)

    run = measured(tmp_path, "float32", build_all, (X, Y), None)
    assert "and `train` was passed too; expected one of" in run.error


def test_a_child_that_fails_leaves_its_error(tmp_path, capsys, disabled):
    parcel.pack(tmp_path, lambda: 1 / 0, None, None)
    assert worker.main([str(tmp_path), Task("float32").to_json()]) == 1
    run = Run.from_json(tmp_path / "float32_seed0.json")
    assert (run.status, run.error) == ("failed", "ZeroDivisionError: division by zero")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_few_steps_tell_time_and_memory_of_one_size(tmp_path, disabled):
    run = measured(tmp_path, "float32", build, (X, Y), None, steps=3, batch_size=24)
    assert (run.outcome, run.batch_size) == ("fits", 24)
    assert run.examples_per_second == pytest.approx(24 / run.step.median)
    assert run.memory.training_bytes > 2**26
