"""`FlightRecorder`: what it keeps, when it writes, that replays are exact, no trace."""

import contextlib
import gc
import os
import re
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.clocks import Ticks
from tests.refusals import refused_arguments
from tests.replicas import two_replicas
from tfamp.callbacks import PrecisionMonitor, Throughput
from tfamp.callbacks._batch_ring import ring_of
from tfamp.callbacks.flight_recorder import FlightRecorder
from tfamp.callbacks.flight_recorder.call_log import FlightLog, calls_to_next, core_of
from tfamp.loss_scale.fit_hooks import FIT_HOOKS
from tfamp.numerics.triage.bundle_replay import failing_step, rebuilt, replay
from tfamp.stepping import bundles, snapshots
from tfamp.stepping.bundles import part_of

# 13 batches of 4 and one of 2; the 13th has a NaN.
NUM_EXAMPLES, BATCH, BAD_STEP = 54, 4, 13
layers = keras.layers


@keras.saving.register_keras_serializable("flight_recorder_test")
class OwnStep(keras.Model):
    """A subclassed model with a train step of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.head = layers.Dense(2), layers.Dense(1)
        self.drop = layers.Dropout(0.5)

    def call(self, x, training=False):
        return self.head(self.drop(self.hidden(x), training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@keras.saving.register_keras_serializable("flight_recorder_test")
class Checked(layers.Layer):
    """Raises where its input is not finite."""

    def call(self, x):
        return tf.debugging.check_numerics(x, "the input is bad")


def sequential():
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, activation="tanh"),
            layers.Dropout(0.5),
            layers.BatchNormalization(),
            layers.Dense(1),
        ]
    )


def functional():
    inputs = keras.Input((3,))
    outputs = layers.Dense(1)(layers.GaussianNoise(0.1)(inputs) + inputs)
    return keras.Model(inputs, outputs)


def unbuilt():
    return keras.Sequential([layers.Dropout(0.5), layers.Dense(1)])


def checked():
    return keras.Sequential([keras.Input((3,)), Checked(), layers.Dense(1)])


def small():
    return keras.Sequential([keras.Input((3,)), layers.Dropout(0.5), layers.Dense(1)])


def compiled(make=small, *, on_replicas=False, **settings):
    keras.utils.set_random_seed(1)
    scope = contextlib.nullcontext()
    if on_replicas:
        scope = two_replicas().scope()
    with scope:
        model = make()
        optimizer = settings.pop("optimizer", None) or keras.optimizers.Adam(0.01)
        model.compile(optimizer, "mse", **settings)
    return model


def arrays(bad=BAD_STEP):
    x = np.random.default_rng(0).random((NUM_EXAMPLES, 3), "float32")
    y = x[:, :1].copy()
    if bad is not None:
        y[BATCH * (bad - 1) + 1] = np.nan
    return x, y


def fit(model, recorder, *, data=None, callbacks=(), **settings):
    x, y = arrays() if data is None else data
    settings = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | settings
    return model.fit(x, y, callbacks=[recorder, *callbacks], **settings)


def kinds(recorder):
    return [os.path.basename(path) for path in recorder.bundles]


WAYS = {
    "Sequential": (sequential, {"metrics": ["mae"]}),
    "Functional": (functional, {}),
    "a train_step of its own": (OwnStep, {}),
    "not built before": (unbuilt, {}),
    "eager": (sequential, {"run_eagerly": True}),
    "three steps a call": (sequential, {"steps_per_execution": 3}),
    "three eager steps": (unbuilt, {"steps_per_execution": 3, "run_eagerly": True}),
    "two replicas": (sequential, {"on_replicas": True}),
    "XLA": (sequential, {"jit_compile": True}),
}


@pytest.mark.anchors("Sequential", "a train_step of its own")
@pytest.mark.parametrize("make, settings", WAYS.values(), ids=WAYS)
def test_the_failing_step_is_kept_and_replayed_bit_by_bit(tmp_path, make, settings):
    model, recorder = compiled(make, **settings), FlightRecorder(tmp_path, keep=4)
    fit(model, recorder)
    step = -(-BAD_STEP // 3) * 3 if "steps_per_execution" in settings else BAD_STEP
    step = min(step, 14)
    assert kinds(recorder) == [f"failure-{step:08d}-loss"]
    contents = bundles.read(recorder.bundles[0])
    record, (x, y) = contents.record, arrays()
    assert (record.epoch, record.step, record.leads) == (0, step, True)
    assert record.batches[-1].number == step - 1
    for batch in record.batches[-4:]:
        parts = [part_of(contents, batch.number, i) for i in range(len(batch.parts))]
        rows = slice(BATCH * batch.number, BATCH * (batch.number + 1))
        for position, expected in enumerate((x[rows], y[rows])):
            kept = np.concatenate([part[position] for part in parts])
            np.testing.assert_array_equal(kept, expected)
    replayed = replay(recorder.bundles[0], explain=False)
    assert replayed.verdict == "Reproduced: the step fails as it did, bit by bit."
    assert replayed.differences == () and replayed.is_same_device
    assert np.isnan(replayed.steps[-1].replayed_loss)
    assert len(replayed.steps) == len(record.calls) >= 1


def texts():
    words = np.array([str(i % 7) for i in range(NUM_EXAMPLES)])[:, None]
    inputs = keras.Input((1,), dtype="string")
    ids = layers.StringLookup(vocabulary=list("0123456"))(inputs)
    hidden = layers.Flatten()(layers.Embedding(8, 2)(ids))
    return keras.Model(inputs, layers.Dense(1)(hidden)), words


def two_inputs():
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    outputs = layers.Dense(1)(layers.Add()([a, b]))
    return keras.Model({"a": a, "b": b}, outputs), {"a": arrays()[0], "b": arrays()[0]}


@pytest.mark.parametrize("build", [texts, two_inputs], ids=["strings", "a dict"])
def test_batches_of_every_kind_are_replayed(tmp_path, build):
    model, x = build()
    model = compiled(lambda: model)
    recorder = FlightRecorder(tmp_path)
    dataset = tf.data.Dataset.from_tensor_slices((x, arrays()[1])).batch(BATCH)
    model.fit(dataset, verbose=0, callbacks=[recorder])
    assert replay(recorder.bundles[0], explain=False).is_exact


def test_batches_of_varying_length_with_sample_weights_are_replayed(tmp_path):
    def make():
        for length in (1, 2, 3, 2, 5):
            x = np.full((2, length, 3), length, "float32")
            y = np.full((2, 1), np.nan if length == 5 else 1.0, "float32")
            yield x, y, np.array([0.5, 2.0], "float32")

    signature = tuple(tf.TensorSpec(shape) for shape in ((2, None, 3), (2, 1), (2,)))
    dataset = tf.data.Dataset.from_generator(make, output_signature=signature)
    pooled = [keras.Input((None, 3)), layers.GlobalAveragePooling1D(), layers.Dense(1)]
    recorder = FlightRecorder(tmp_path)
    model = compiled(lambda: keras.Sequential(pooled))
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(5))
    model.fit(dataset, verbose=0, callbacks=[recorder])
    contents = bundles.read(recorder.bundles[0])
    shapes = [tuple(part_of(contents, n)[0].shape) for n in range(5)]
    assert shapes == [(2, n, 3) for n in (1, 2, 3, 2, 5)]
    assert part_of(contents, 4)[2].numpy().tolist() == [0.5, 2.0]
    assert replay(recorder.bundles[0], explain=False).is_exact


def test_ragged_and_sparse_batches_are_kept(tmp_path):
    ring = ring_of(model := compiled(), keep=2, max_bytes=2**20)
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0]])
    sparse = tf.sparse.from_dense([[0, 1], [2, 0], [0, 0], [3, 4]])
    dataset = tf.data.Dataset.from_tensor_slices((ragged, sparse)).batch(2)
    draw = tf.function(lambda it: ring.draw(it)[0].flat_values, autograph=False)
    iterator = iter(dataset)
    drawn = [draw(iterator).numpy().tolist() for _ in range(2)]
    kept = [batch.parts[0] for batch in ring.batches()]
    assert [x.to_list() for x, _ in kept] == [[[1.0], [2.0, 3.0]], [[], [4.0]]]
    dense = [tf.sparse.to_dense(y).numpy().tolist() for _, y in kept]
    assert dense == [[[0, 1], [2, 0]], [[0, 0], [3, 4]]]
    assert drawn == [[1.0, 2.0, 3.0], [4.0]]
    assert model is not None


def test_epochs_between_the_state_and_the_failure_are_replayed(tmp_path):
    model = compiled(metrics=["mae"])
    dataset = tf.data.Dataset.from_tensor_slices(arrays(9)).batch(BATCH)
    recorder = FlightRecorder(tmp_path, keep=20)
    model.fit(dataset, epochs=2, steps_per_epoch=7, verbose=0, callbacks=[recorder])
    record = bundles.read_record(recorder.bundles[0])
    places = [(call.epoch, call.index) for call in record.calls]
    assert places == [(0, i) for i in range(7)] + [(1, 0), (1, 1)]
    assert any("An epoch ended between" in note for note in record.notes)
    assert replay(recorder.bundles[0], explain=False).is_exact


def test_training_is_the_same_to_the_last_bit(tmp_path):
    def trained(callbacks):
        model = compiled(unbuilt)
        run = model.fit(
            *arrays(None), batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks
        )
        return snapshots.take(model), run.history

    one, losses = trained([])
    other, other_losses = trained([FlightRecorder(tmp_path, keep=2)])
    assert losses == other_losses
    assert list(one.arrays) == list(other.arrays)
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(array, other.arrays[name], err_msg=name)
    assert os.listdir(tmp_path) == []


def guarded(**settings):
    inner = keras.optimizers.Adam(0.01)
    return tfamp.LossScaleOptimizer(inner, 1024.0, max_consecutive_skips=3, **settings)


@pytest.mark.anchors("graph")
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "XLA"])
def test_a_streak_of_skips_is_replayed_to_its_end(tmp_path, jit_compile):
    model = compiled(optimizer=guarded(), jit_compile=jit_compile)
    x, y = arrays(None)
    y[40:] = np.nan  # from step 11 on, so that three are skipped by step 13
    recorder = FlightRecorder(tmp_path)
    with pytest.raises(tfamp.LossScaleError):
        fit(model, recorder, data=(x, y))
    loss, error = recorder.bundles
    assert replay(loss, explain=False).is_exact
    record = bundles.read_record(error)
    assert record.error == "LossScaleError" and record.digest is None
    assert record.message.startswith("Skipped 3 updates in a row")
    replayed = replay(error, explain=False)
    assert replayed.is_reproduced and replayed.differences == ()
    assert "late_stop_error" not in vars(model.optimizer)


def test_each_skipped_step_is_a_failure_if_asked(tmp_path):
    model = compiled(optimizer=guarded())
    x, y = arrays(None)
    # The loss is some 1e35, but the square of the gradients' norm above 3e38.
    y[4] = y[16] = 1e18
    recorder = FlightRecorder(tmp_path, on_skip=True)
    fit(model, recorder, data=(x, y))
    assert kinds(recorder) == ["failure-00000002-skip", "failure-00000005-skip"]
    replayed = replay(recorder.bundles[1], explain=False)
    assert replayed.is_exact and replayed.failed_again


def test_an_exception_in_the_step_is_replayed(tmp_path):
    x, y = arrays(None)
    x[30] = np.inf
    recorder = FlightRecorder(tmp_path)
    with pytest.raises(tf.errors.InvalidArgumentError):
        fit(compiled(checked), recorder, data=(x, y))
    record = bundles.read_record(recorder.bundles[0])
    assert (record.step, record.error) == (8, "InvalidArgumentError")
    assert record.message == "the input is bad : Tensor had Inf values"
    assert replay(recorder.bundles[0], explain=False).is_reproduced


class Mends(keras.callbacks.Callback):
    """Goes back to the weights of the first step after a step that failed."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.state = snapshots.take(self.model)
        if np.isnan(logs["loss"]) and batch == 4:
            snapshots.put(self.model, self.state)
            self.model.make_train_function(force=True)


def test_a_failure_after_a_mended_one_is_replayed_from_where_it_was_mended(tmp_path):
    x, y = arrays(5)
    y[4 * 8] = np.nan
    recorder = FlightRecorder(tmp_path)
    fit(compiled(), recorder, data=(x, y), callbacks=[Mends()])
    assert kinds(recorder) == ["failure-00000005-loss", "failure-00000009-loss"]
    record = bundles.read_record(recorder.bundles[1])
    assert (record.state_step, record.leads) == (5, True)
    assert replay(recorder.bundles[1], explain=False).is_exact


class Raises(keras.callbacks.Callback):
    def __init__(self, error, batch=5):
        super().__init__()
        self.error, self.batch = error, batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            raise self.error


@pytest.mark.parametrize("is_first", [True, False], ids=["before it", "after it"])
def test_an_exception_of_another_callback_is_a_failure(tmp_path, is_first):
    recorder, other = FlightRecorder(tmp_path), Raises(RuntimeError("boom"))
    order = [other, recorder] if is_first else [recorder, other]
    model = compiled()
    with pytest.raises(RuntimeError, match="boom"):
        model.fit(*arrays(None), batch_size=4, verbose=0, callbacks=order)
    record = bundles.read_record(recorder.bundles[0])
    assert (record.step, record.error, record.message) == (6, "RuntimeError", "boom")
    assert any("came from outside of the training step" in n for n in record.notes)


def test_an_interrupt_is_no_failure(tmp_path):
    recorder = FlightRecorder(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit(compiled(), recorder, callbacks=[Raises(KeyboardInterrupt())])
    assert recorder.bundles == () and os.listdir(tmp_path) == []


def test_an_exception_before_the_first_batch_is_no_failure(tmp_path):
    recorder = FlightRecorder(tmp_path)
    with pytest.raises(ValueError):
        fit(compiled(), recorder, data=(np.ones((4, 7)), np.ones((4, 1))))
    assert recorder.bundles == ()


def test_weights_that_are_not_finite_are_seen_at_the_next_snapshot(tmp_path):
    class Spoils(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                self.model.layers[2].moving_mean.assign(np.full(4, np.nan))

    recorder = FlightRecorder(tmp_path, keep=4)
    fit(compiled(sequential), recorder, data=arrays(None), callbacks=[Spoils()])
    assert kinds(recorder) == ["failure-00000004-weights"]
    record = bundles.read_record(recorder.bundles[0])
    where = "4 numbers are not finite, first in 'sequential"
    assert record.message.startswith(where) and "moving_mean" in record.message
    assert (record.state_step, record.leads) == (0, True)


@pytest.mark.parametrize("is_first", [False, True], ids=["before it", "after it"])
def test_it_stands_beside_other_callbacks(tmp_path, is_first):
    model, recorder = compiled(optimizer=guarded()), FlightRecorder(tmp_path)
    others, function = [Throughput(), PrecisionMonitor(every_steps=1)], None
    first, *last = [recorder, *others] if is_first else [*others, recorder]
    for _ in range(2):
        run = fit(model, first, callbacks=last)
        assert function in (None, model.train_function)
        function = model.train_function
    assert set(run.history) > {"loss"} and recorder.notes == ()
    assert kinds(recorder) == ["failure-00000013-loss", "failure-00000013-loss-2"]
    assert replay(recorder.bundles[1], explain=False).is_exact


def test_nothing_is_left_behind(tmp_path):
    gc.collect()
    held = set(FIT_HOOKS._holders)  # by what other tests have left
    model, recorder = compiled(), FlightRecorder(tmp_path)
    fit(model, recorder)
    traced, own = model.train_function, set(vars(model))
    with pytest.raises(RuntimeError):
        fit(model, recorder, callbacks=[Throughput(), Raises(RuntimeError("boom"))])
    assert model.train_function is traced
    assert own == set(vars(model))
    ring = ring_of(model, keep=1, max_bytes=1)
    assert ring.batches() == []
    del recorder, model
    gc.collect()
    assert set(FIT_HOOKS._holders) <= held


def test_a_second_recorder_rests_and_says_so(tmp_path):
    one, other = FlightRecorder(tmp_path / "a"), FlightRecorder(tmp_path / "b")
    fit(compiled(), one, callbacks=[other])
    assert len(one.bundles) == 1 and other.bundles == ()
    assert other.notes[0].startswith("No bundles of this recorder, since another")


def test_no_more_bundles_are_written_than_allowed(tmp_path):
    model, recorder = compiled(), FlightRecorder(tmp_path, max_bundles=1)
    for _ in range(2):
        fit(model, recorder)
    assert len(recorder.bundles) == 1
    assert recorder.notes == (
        "No more bundles: 1 were written. Pass a larger `max_bundles` for more.",
    )


def test_a_full_disk_costs_no_training(tmp_path, monkeypatch):
    usage = shutil._ntuple_diskusage(100, 90, 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    recorder = FlightRecorder(tmp_path)
    run = fit(compiled(), recorder, epochs=2)
    assert len(run.history["loss"]) == 2
    assert recorder.bundles == () and os.listdir(tmp_path) == []
    text = "No bundle of the failure at step 13 (The loss is nan.) in "
    assert recorder.notes[0].startswith(text)
    assert "does not fit" in recorder.notes[0]


def test_fewer_batches_are_kept_where_more_do_not_fit(tmp_path):
    # A batch of 4 x 3 and 4 x 1 float32 takes 64 bytes.
    recorder = FlightRecorder(tmp_path, keep=8, max_bytes=200)
    fit(compiled(), recorder, data=arrays(7))
    record = bundles.read_record(recorder.bundles[0])
    assert [batch.number for batch in record.batches][-1] == 6
    assert sum(batch.num_bytes for batch in record.batches) <= 200
    text = "Keeps 3 batches, not 8: more take above 200 bytes. Pass a larger "
    assert recorder.notes[0].startswith(text)


def test_a_dear_snapshot_is_rare_and_the_bundle_says_what_that_means(tmp_path):
    # By that clock a snapshot takes as long as all calls between two of them, so there
    # are two of them; more batches than three do not fit.
    recorder = FlightRecorder(tmp_path, keep=3, max_bytes=200, clock=Ticks())
    fit(compiled(), recorder)
    record = bundles.read_record(recorder.bundles[0])
    assert not record.leads and record.state_step < 10
    assert len(record.calls) == 1 and record.calls[0].first == BAD_STEP - 1
    assert record.notes[0].startswith("The state was taken ")
    replayed = replay(recorder.bundles[0], explain=False)
    assert replayed.is_exact is None and replayed.failed_again
    text = "Reproduced: the step fails again; there are no bits to compare."
    assert replayed.verdict == text


def test_batches_are_kept_for_as_long_as_snapshots_are_apart(tmp_path):
    model = compiled()
    ring = ring_of(model, keep=2, max_bytes=2**20)
    log = FlightLog(model, ring, max_share=0.5, clock=Ticks())
    assert (log.interval, ring.keep) == (2, 2)
    for _ in range(3):
        log.note({})
    # Two calls took 1 s, the snapshot 1 s: so many that it is half of the time.
    log.snapshot()
    assert (log.interval, ring.keep) == (4, 4)


CADENCES = {
    "as often as is kept": ((1e-4, 0.1, 8), 8),
    "just dear enough": ((0.9, 10.0, 8), 9),
    "dear": ((1.0, 0.1, 8), 1000),
    "no time known": ((1.0, 0.0, 8), 8),
}


@pytest.mark.parametrize("numbers, calls", CADENCES.values(), ids=CADENCES)
def test_snapshots_take_no_more_than_their_share(numbers, calls):
    assert calls_to_next(*numbers, max_share=0.01) == calls


def test_the_failing_step_is_found_among_several(tmp_path):
    recorder = FlightRecorder(tmp_path)
    fit(compiled(steps_per_execution=5), recorder, data=arrays(9))
    path = recorder.bundles[0]
    contents = bundles.read(path)
    again = rebuilt(path, contents)
    _, y = failing_step(again, contents)
    np.testing.assert_array_equal(y, arrays(9)[1][32:36])
    assert snapshots.num_nonfinite(snapshots.take(again)) == 0


def make_for_replay():
    model = small()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model, None


def test_a_model_of_a_function_is_told_and_built_again(tmp_path):
    class Local(keras.Sequential):
        pass

    recorder = FlightRecorder(tmp_path)
    fit(compiled(lambda: Local(unbuilt().layers)), recorder)
    path = recorder.bundles[0]
    why = bundles.read_record(path).needs_build
    assert why.endswith("Local is defined inside a function")
    with pytest.raises(ValueError, match=re.escape(f"since {why}; expected a")):
        replay(path)


def test_a_function_that_builds_the_model_is_called(tmp_path):
    target = f"{__name__}:make_for_replay"
    recorder = FlightRecorder(tmp_path, build=target)
    fit(compiled(), recorder)
    path = recorder.bundles[0]
    assert bundles.read_record(path).build == target
    assert replay(path, build=target, explain=False).is_reproduced


test_bad_arguments_are_refused = refused_arguments(
    lambda **given: FlightRecorder(**{"directory": "x"} | given),
    ("directory", None, "; expected", TypeError),
    ("keep", 0, "; expected an integer of at least 1"),
    ("max_bytes", 1.5, ", of type float", TypeError),
    ("max_bundles", 0, "; expected an"),
    ("build", "x", "; expected 'module:function'"),
)


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    recorder = FlightRecorder(tmp_path / "file")
    with pytest.raises(ValueError, match="which cannot be written"):
        fit(compiled(), recorder)


def test_an_exception_without_a_text_is_told_too():
    assert core_of("") == "An exception without a message."


def test_nan_that_a_relu_hides_is_seen_when_training_ends(tmp_path):
    """The loss is finite to the end, and no snapshot was due since."""
    # It gives 0 for NaN, as TensorFlow's own does on some processors.
    relu = layers.Activation(
        lambda x: keras.ops.where(x > 0, x, keras.ops.zeros_like(x))
    )
    parts = [keras.Input((3,)), layers.Dense(4), relu, layers.Dense(1)]
    model = compiled(lambda: keras.Sequential(parts))
    x, y = arrays(bad=None)
    x[BATCH * 2] = np.nan
    recorder = FlightRecorder(tmp_path, keep=NUM_EXAMPLES // BATCH)
    run = fit(model, recorder, data=(x, y))
    assert np.isfinite(run.history["loss"]).all()
    assert len(recorder.bundles) == 1
    assert recorder.bundles[0].endswith("-weights")
