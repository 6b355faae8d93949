"""MicroBatches: a batch that does not fit is trained in parts, to the same end."""

import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging

import tfamp
from tests.refusals import refused_arguments
from tests.replicas import two_replicas
from tfamp.callbacks import (
    FlightRecorder,
    MicroBatches,
    NanRecovery,
    PrecisionMonitor,
    Throughput,
)
from tfamp.callbacks.micro_batches import gradients, split_steps

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(30, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]]).astype("float32")
WEIGHTS = RANDOM.uniform(0.5, 2.0, size=30).astype("float32")
WEIGHTS[::4] = 0.0
ANY = 10**9
# Sums of at most 12 rows in another order.
EXACT = {"rtol": 1e-6, "atol": 1e-6}
# The promise: gradients of parts are rounded to half precision each by itself.
HALF = {"rtol": 1e-3, "atol": 1e-3}


class Room(keras.layers.Layer):
    """Has memory for so many examples; or none for some numbers of them, or calls."""

    def __init__(self, most=ANY, not_for=(), calls=(), in_backward=False):
        super().__init__(dtype="float32")
        self.most, self.not_for = most, not_for
        self.calls, self.in_backward = calls, in_backward
        self.seen = []

    def check(self, num):
        self.seen.append(int(num))
        is_too_much = num > self.most or num in self.not_for
        if is_too_much or len(self.seen) in self.calls:
            raise MemoryError(f"OOM when allocating tensor with shape[{num},3]")
        return num

    def checked(self, x):
        num = tf.numpy_function(self.check, [tf.shape(x)[0]], tf.int32)
        with tf.control_dependencies([num]):
            return tf.identity(x)

    def call(self, x, training=False):
        if not training or self.most is None:  # XLA has no Python in it
            return x
        if not self.in_backward:
            return self.checked(x)

        @tf.custom_gradient
        def forward(x):
            return tf.identity(x), self.checked

        return forward(x)


class Plain(keras.Model):
    """Calls its layers one after the other."""

    def __init__(self, layers):
        super().__init__()
        self.parts = layers

    def call(self, x, training=False):
        for part in self.parts:
            x = part(x, training=training) if isinstance(part, Room) else part(x)
        return x


class Own(keras.Model):
    """Has a training step of its own, which returns a bare loss too."""

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.compute_loss(x, y, prediction, weights, training=True)
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(
            zip(tape.gradient(scaled, variables), variables, strict=True)
        )
        logs = self.compute_metrics(x, y, prediction, sample_weight=weights)
        return {**logs, "bare": loss}


def built(style="functional", room=None, layers=None):
    """Returns a model with the same weights each time, and its room."""
    keras.utils.set_random_seed(7)
    room = room or Room()
    first, *others = layers() if layers else small()
    layers = [first, room, *others]
    if style == "subclassed":
        return Plain(layers), room
    inputs = outputs = keras.Input((3,))
    for layer in layers:
        outputs = layer(outputs)
    kinds = {"functional": keras.Model, "own step": Own}
    return kinds.get(style, style)(inputs, outputs), room


def small():
    return [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]


def normalized():
    return [
        keras.layers.Dense(4),
        keras.layers.BatchNormalization(momentum=0.5),
        keras.layers.Dense(1),
    ]


def compiled(model, optimizer=None, **options):
    optimizer = keras.optimizers.SGD(0.1) if optimizer is None else optimizer
    model.compile(optimizer, "mse", **{"weighted_metrics": ["mae"], **options})
    return model


def fit(model, *callbacks, batch_size=12, **options):
    settings = {"epochs": 2, "shuffle": False, "verbose": 0, **options}
    x, y = settings.pop("data", (X, Y))
    return model.fit(x, y, batch_size, callbacks=list(callbacks), **settings)


def same(one, other, tolerance=EXACT):
    """Whether two models are at the same weights, slots and number of updates."""
    for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)
    slots = zip(one.optimizer.variables, other.optimizer.variables, strict=True)
    for a, b in slots:
        np.testing.assert_allclose(a.numpy(), b.numpy(), **tolerance)
    assert one.optimizer.iterations.numpy() == other.optimizer.iterations.numpy()


def state_of(model):
    """Copies of all weights, seeds and slots."""
    return [v.numpy().copy() for v in (*model.variables, *model.optimizer.variables)]


def same_logs(one, other, tolerance=EXACT):
    assert one.history.keys() == other.history.keys()
    for name, values in one.history.items():
        np.testing.assert_allclose(values, other.history[name], **tolerance)


def train_at_most_6(self, data, num_parts, train=split_steps.SplitSteps._train):
    """Has no memory for more examples at once, as XLA is out of sight."""
    examples = sum(gradients.sizes(self._model.distribute_strategy, data))
    if -(-examples // num_parts) > 6:
        raise tf.errors.ResourceExhaustedError(None, None, "Out of memory")
    return train(self, data, num_parts)


@pytest.fixture
def under():
    """Sets a policy for the length of a test."""
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy("float32")


def optimizer_for(policy):
    adam = keras.optimizers.Adam(0.01)
    if policy != "mixed_float16":
        return adam
    return tfamp.LossScaleOptimizer(adam, 2.0**10, dynamic_growth_steps=3)


MODES = {"graph": {}, "eager": {"run_eagerly": True}, "XLA": {"jit_compile": True}}


@pytest.mark.anchors("mixed_float16-functional-graph", "float32-own step-XLA")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("style", ["functional", "subclassed", "own step"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_parts_end_where_whole_batches_do(policy, style, mode, under, monkeypatch):
    under(policy)
    is_xla = mode == "XLA"
    # XLA compiles for each size; the last batch would be one of its own.
    data = (X[:24], Y[:24]) if is_xla else (X, Y)
    whole, _ = built(style, Room(None if is_xla else ANY))
    compiled(whole, optimizer_for(policy), **MODES[mode])
    expected = fit(whole, data=data)
    if is_xla:
        monkeypatch.setattr(split_steps.SplitSteps, "_train", train_at_most_6)
    model, room = built(style, Room(None if is_xla else 6))
    micro_batches = MicroBatches()
    compiled(model, optimizer_for(policy), **MODES[mode])
    found = fit(model, micro_batches, data=data)
    tolerance = EXACT if policy == "float32" else HALF
    same(model, whole, tolerance)
    same_logs(found, expected, tolerance)
    assert micro_batches.events == model.history.micro_batches
    (event,) = micro_batches.events
    assert (event.epoch, event.step, event.examples, event.splits) == (0, 0, 12, 2)
    if not is_xla:
        # The whole batch, then halves; the last, smaller one is whole again.
        assert room.seen == [12, 6, 6, 6, 6, 6] + [6, 6, 6, 6, 6]


@pytest.mark.anchors("finite-graph")
@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("finite", [True, False], ids=["finite", "until it ends"])
def test_execution_of_several_steps_is_seen_as_one(finite, eagerly, monkeypatch):
    def trained(room, *callbacks):
        model, room = built(room=room)
        adam = keras.optimizers.Adam(0.05)
        compiled(model, adam, run_eagerly=eagerly, steps_per_execution=2)
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
        if not finite:
            data = data.filter(lambda x, y: True)  # its length is not known
        calls = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: calls.append((batch, logs["loss"]))
        )
        run = model.fit(data, epochs=2, verbose=0, callbacks=[note, *callbacks])
        return model, room, run, calls

    lines = []
    monkeypatch.setattr(logging, "info", lambda text, *args: lines.append(text % args))
    whole, _, expected, calls = trained(Room())
    # The second step of an execution does not fit; 5 batches in executions of 2.
    micro_batches = MicroBatches()
    model, room, found, seen = trained(Room(calls=(2,)), micro_batches)
    same(model, whole)
    same_logs(found, expected)
    assert room.seen == [6, 6, *(18 * [3])]
    ((step, splits),) = [(event.step, event.splits) for event in micro_batches.events]
    assert (step, splits) == (1, 2)
    assert [batch for batch, _ in seen] == [batch for batch, _ in calls]
    losses = ([loss for _, loss in each] for each in (seen, calls))
    np.testing.assert_allclose(*losses, **EXACT)
    assert any("2 steps of an execution are a call each" in line for line in lines) is (
        not eagerly
    )


def test_last_smaller_batch_stays_whole_or_has_fewer_parts():
    whole, _ = built()
    fit(compiled(whole), batch_size=7)
    model, room = built(room=Room(3))
    micro_batches = MicroBatches()
    fit(compiled(model), micro_batches, batch_size=7, epochs=2)
    same(model, whole)
    # 7 in 2 parts holds 4, so 4 parts: 1, 2, 2 and 2; the last batch has 2 examples.
    fourths = [1, 2, 2, 2]
    assert room.seen == [7, 3, 4, *fourths, *(3 * fourths), 2, *(4 * fourths), 2]
    assert [event.splits for event in micro_batches.events] == [2, 4]
    assert micro_batches.splits == 1


@pytest.mark.anchors("guarded")
@pytest.mark.parametrize("kind", ["plain", "guarded", "stock", "accumulating"])
def test_everything_of_an_optimizer_happens_once(kind):
    def optimizer():
        adam = keras.optimizers.AdamW(
            keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5),
            weight_decay=0.1,
            clipnorm=0.3,
            use_ema=True,
            ema_momentum=0.5,
            ema_overwrite_frequency=3,
            gradient_accumulation_steps=2 if kind == "accumulating" else None,
        )
        if kind == "guarded":
            return tfamp.LossScaleOptimizer(
                adam, 1.0, dynamic=False, accumulation_steps=2
            )
        return keras.optimizers.LossScaleOptimizer(adam) if kind == "stock" else adam

    def regular():
        return [keras.layers.Dense(4, kernel_regularizer="l2"), keras.layers.Dense(1)]

    whole, _ = built(layers=regular)
    eager = {"run_eagerly": True}
    expected = fit(compiled(whole, optimizer(), **eager), sample_weight=WEIGHTS)
    model, _ = built(room=Room(5), layers=regular)
    compiled(model, optimizer(), **eager)
    found = fit(model, MicroBatches(), sample_weight=WEIGHTS)
    same(model, whole)
    same_logs(found, expected)


@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_rows_of_a_table_are_squared_by_themselves_as_keras_does(eagerly):
    ids = RANDOM.integers(0, 4, size=(24, 3)).astype("int32")

    def embedded(most):
        keras.utils.set_random_seed(7)
        inputs = keras.Input((3,), dtype="int32")
        x = Room(most)(keras.layers.Embedding(5, 2)(inputs))
        outputs = keras.layers.Dense(1)(keras.layers.Flatten()(x))
        model = keras.Model(inputs, outputs)
        return compiled(model, keras.optimizers.Adam(0.1), run_eagerly=eagerly)

    whole, model = embedded(ANY), embedded(4)
    data = ids, ids.sum(-1, keepdims=True).astype("float32")
    fit(whole, data=data, batch_size=8)
    fit(model, MicroBatches(), data=data, batch_size=8)
    same(model, whole)


def test_replicas_split_together():
    def trained(most, *callbacks):
        with two_replicas().scope():
            model, room = built(room=Room(most))
            compiled(model, keras.optimizers.Adam(0.05))
        # The last batch is 5 and 4 examples.
        data = X[:29], Y[:29]
        return model, room, fit(model, *callbacks, data=data, batch_size=20, epochs=1)

    whole, _, expected = trained(ANY)
    micro_batches = MicroBatches()
    model, room, found = trained(4, micro_batches)
    same(model, whole)
    same_logs(found, expected)
    assert [event.splits for event in micro_batches.events] == [2, 4]
    # 10 on each, then parts of 5, of 2 and 3, and of the last 5 and 4.
    assert sorted(room.seen[-4:]) == [2, 2, 2, 3]


def test_only_one_replica_runs_out_of_memory():
    # The last 5 examples are 3 and 2 on the replicas; only the first fails.
    def trained(room, *callbacks):
        with two_replicas().scope():
            model, _ = built(room=room)
            optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1))
            compiled(model, optimizer, run_eagerly=True)
        fit(model, *callbacks, data=(X[:13], Y[:13]), batch_size=8, epochs=1)
        return model

    micro_batches = MicroBatches()
    same(trained(Room(not_for=(3,)), micro_batches), trained(Room()))
    assert [(e.step, e.examples, e.splits) for e in micro_batches.events] == [(1, 5, 2)]


def test_bare_loss_of_an_own_step_is_the_mean_over_the_examples():
    def trained(room, *callbacks):
        model, _ = built("own step", room)
        compiled(model, run_eagerly=True)
        return fit(model, *callbacks, data=(X[:7], Y[:7]), batch_size=7, epochs=1)

    # 3 and 4 examples.
    same_logs(trained(Room(4), MicroBatches()), trained(Room()))


def test_three_weights_by_hand():
    # y = w x with w = 0 on x = 1, 2, 3 and y = 1, 1, 4: the gradient of the mean of
    # (w x - y)^2 is -2 (1 + 2 + 12) / 3 = -10, so w = 0.1 * 10 = 1.
    last = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), Room(2), last])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = np.array([[1.0], [2.0], [3.0]]), np.array([[1.0], [1.0], [4.0]])
    run = fit(model, MicroBatches(), data=(x, y), batch_size=3, epochs=1)
    assert model.get_weights()[0].item() == pytest.approx(1.0, rel=1e-6)
    assert run.history["loss"] == [pytest.approx((1 + 1 + 16) / 3, rel=1e-6)]


@pytest.mark.anchors("later step-graph")
@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("call", [1, 3], ids=["first step", "later step"])
def test_nothing_is_lost_where_the_backward_pass_fails(call, eagerly, monkeypatch):
    """The last layer's gradient is there long before, and so could its update be."""

    def layers():
        return [
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(momentum=0.5),
            *(keras.layers.Dense(64) for _ in range(3)),
            keras.layers.Dense(1),
        ]

    states = []

    class Watch(split_steps.StateBefore):
        def restore(self):
            found = super().restore()
            states.append((found, state_of(self._model)))
            return found

    before = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: before.append(state_of(model))
    )
    monkeypatch.setattr(split_steps, "StateBefore", Watch)
    model, _ = built(room=Room(calls=(call,), in_backward=True), layers=layers)
    compiled(model, keras.optimizers.Adam(0.01), run_eagerly=eagerly)
    model.optimizer.build(model.trainable_variables)
    fit(model, MicroBatches(), note, batch_size=10)
    ((found, weights),) = states
    assert found
    for a, b in zip(weights, before[call - 1], strict=True):
        np.testing.assert_array_equal(a, b)


class Late(keras.Model):
    """Runs out of memory when its weights are written already."""

    def train_step(self, data):
        self.num_steps = getattr(self, "num_steps", 0) + 1
        logs = super().train_step(data)
        if self.num_steps in self.fails:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
        return logs


def late(*fails):
    model, _ = built(Late)
    model.fails = fails
    return compiled(model, keras.optimizers.Adam(0.05), run_eagerly=True)


def test_first_step_is_undone_where_it_has_written():
    whole, model = late(), late(1)
    expected, found = fit(whole), fit(model, MicroBatches())
    same(model, whole)
    same_logs(found, expected)


def test_later_step_that_has_written_is_refused():
    model = late(3)
    text = "ran out of memory while its weights were written, or made variables"
    with pytest.raises(tf.errors.ResourceExhaustedError, match=text):
        fit(model, MicroBatches())


def test_larger_batch_is_copied_for_again():
    def trained(model, *callbacks):
        edges = tf.data.Dataset.from_tensor_slices([[0, 4], [4, 12], [12, 20]])
        rows = edges.map(lambda ends: tf.range(ends[0], ends[1]))
        data = rows.map(lambda each: (tf.gather(X, each), tf.gather(Y, each)))
        model.fit(data, verbose=0, callbacks=list(callbacks))
        return model

    same(trained(late(2), MicroBatches()), trained(late()))


def test_one_example_is_not_split_further():
    model, _ = built(room=Room(0))
    before = model.get_weights()
    micro_batches = MicroBatches()
    text = (
        "A batch of 3 examples does not fit into memory as 3 micro-batches, down to "
        "one example on a replica; expected one to fit. On a device "
    )
    with pytest.raises(tf.errors.ResourceExhaustedError, match=re.escape(text)) as e:
        fit(compiled(model), micro_batches, batch_size=3)
    assert "tfamp.remat" in str(e.value) and "cuda_malloc_async" in str(e.value)
    assert "OOM when allocating tensor with shape[1,3]" in str(e.value)
    assert [event.splits for event in micro_batches.events] == [2, 3]
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_more_parts_than_allowed():
    model, _ = built(room=Room(2))
    text = "as 3 micro-batches; expected it to with `max_splits=3`, which may be larger"
    with pytest.raises(tf.errors.ResourceExhaustedError, match=re.escape(text)):
        fit(compiled(model), MicroBatches(max_splits=3))


def test_update_that_does_not_fit_is_not_split():
    class Full(keras.optimizers.SGD):
        def update_step(self, *args):
            raise MemoryError("no room for a slot")

    model, _ = built()
    micro_batches = MicroBatches()
    text = "The update of the weights does not fit into memory, after the gradients"
    with pytest.raises(MemoryError, match=text):
        fit(compiled(model, Full(), run_eagerly=True), micro_batches)
    assert [event.splits for event in micro_batches.events] == [2]


def test_other_errors_pass_untouched():
    class Broken(Own):
        def train_step(self, data):
            raise error

    error = ZeroDivisionError("of mine")
    model = compiled(built(Broken)[0], run_eagerly=True)
    with pytest.raises(ZeroDivisionError) as caught:
        fit(model, MicroBatches())
    assert caught.value is error


@pytest.mark.parametrize("fails", [False, True], ids=["success", "error"])
def test_training_function_is_given_back(fails):
    model, _ = built(room=Room(6))
    compiled(model, run_eagerly=True)
    fit(model, batch_size=6)
    function, optimizer, settings = model.train_function, model.optimizer, vars(model)
    names = set(settings)
    micro_batches = MicroBatches()

    def fail(batch, logs):
        if fails and batch == 1:
            raise ZeroDivisionError

    stop = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    try:
        fit(model, micro_batches, stop)
    except ZeroDivisionError:
        assert fails
    assert micro_batches.events
    assert model.train_function is function and model.optimizer is optimizer
    assert set(vars(model)) == names
    assert "apply" not in vars(optimizer)


def test_split_is_kept_for_later_fits():
    model, room = built(room=Room(6))
    compiled(model, run_eagerly=True)
    micro_batches = MicroBatches()
    fit(model, micro_batches, epochs=1)
    room.seen.clear()
    fit(model, micro_batches, epochs=1)
    assert room.seen == [6] * 5
    assert micro_batches.events == ()
    whole, _ = built()
    fit(compiled(whole))
    same(model, whole)


def test_traces_are_kept_for_later_fits():
    model, _ = built(room=Room(6))
    compiled(model)
    micro_batches = MicroBatches()
    fit(model, micro_batches, epochs=1)
    traces = []
    train_step = model.train_step
    model.train_step = lambda data: traces.append(data) or train_step(data)
    fit(model, micro_batches, epochs=1)
    assert not traces
    model.compile("sgd", "mse", run_eagerly=True)
    fit(model, micro_batches, epochs=1)
    assert traces


def test_line_says_what_was_done(monkeypatch):
    lines = []
    monkeypatch.setattr(logging, "warning", lambda text, *a: lines.append(text % a))
    model, _ = built(room=Room(6), layers=normalized)
    fit(compiled(model, run_eagerly=True), MicroBatches(), epochs=1)
    (line,) = lines
    assert line.startswith(
        "Batch of 12 examples did not fit into memory at step 1 of epoch 1 "
        "(MemoryError: OOM when allocating tensor with shape[12,3]"
    )
    assert "It is trained as 2 micro-batches of 6 with one update" in line
    assert "Statistics of BatchNormalization are those of the micro-batches" in line
    assert "tfamp.find_batch_size" in line and "tfamp.remat" in line


def test_skipped_step_leaves_statistics_as_they_were():
    model, _ = built(room=Room(6), layers=normalized)
    guard = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1), 1.0, dynamic=False)
    compiled(model, guard, run_eagerly=True)
    before = model.get_weights()
    x = X[:12].copy()
    x[7] = np.inf
    fit(model, MicroBatches(), data=(x, Y[:12]), epochs=1)
    assert guard.skipped_steps == 1 and guard.applied_steps == 0
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_it_goes_with_other_callbacks(is_first, tmp_path):
    guard = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1), 1.0, dynamic=False)
    model, _ = built(room=Room(6))
    x = np.concatenate([X[:12], np.full((12, 3), np.nan, "float32"), X[12:]])
    y = np.concatenate([Y[:12], Y[:12], Y[12:]])
    recovery = NanRecovery(tmp_path / "good", every_seconds=0, remedies="drop batch")
    recorder, micro_batches = FlightRecorder(tmp_path / "bundles"), MicroBatches()
    others = [recorder, recovery, Throughput(), PrecisionMonitor()]
    callbacks = [micro_batches, *others] if is_first else [*others, micro_batches]
    compiled(model, guard, run_eagerly=not is_first)
    run = fit(model, *callbacks, data=(x, y), epochs=1)
    assert [event.splits for event in micro_batches.events] == [2]
    assert len(recovery.recoveries) == 1
    # The recovery drops the second, and what came after its snapshot: the first.
    assert run.history["applied_steps"] == [2]
    assert np.isfinite(run.history["loss"][0])
    assert [path.rsplit("-", 1)[-1] for path in recorder.bundles] == ["loss"]


def test_list_of_callbacks_made_before_fit():
    model, room = built(room=Room(6))
    compiled(model, run_eagerly=True)
    micro_batches = MicroBatches()
    settings = {"add_history": True, "model": model}
    callbacks = keras.callbacks.CallbackList([micro_batches], **settings)
    model.fit(X, Y, 12, callbacks=callbacks, verbose=0, shuffle=False)
    assert room.seen == [12, 6, 6, 6, 6, 6]
    assert micro_batches.splits == 1


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_losses_that_are_no_mean_are_refused(reduction):
    model, _ = built()
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    model.compile("sgd", loss)
    text = f"The loss {loss.name!r} has `reduction={reduction!r}`; expected a mean"
    with pytest.raises(ValueError, match=re.escape(text)):
        fit(model, MicroBatches())
    assert "_make_function" not in vars(model)


def test_several_optimizers_are_refused():
    model, _ = built()
    compiled(model)
    model.other = keras.optimizers.Adam()
    with pytest.raises(ValueError, match=re.escape("2 optimizers, ('SGD', 'Adam')")):
        fit(model, MicroBatches())


def test_training_functions_of_ones_own_are_refused():
    class Twice(keras.Model):
        def make_train_function(self, force=False):
            return super().make_train_function(force)

    model, _ = built(Twice)
    text = "Twice has a `make_train_function` of its own; expected that of Keras"
    with pytest.raises(ValueError, match=re.escape(text)):
        fit(compiled(model), MicroBatches())


def test_function_made_anew_in_the_middle_of_fit():
    class Anew(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                self.model.make_train_function(force=True)

    model, room = built(room=Room(6))
    compiled(model, run_eagerly=True)
    fit(model, MicroBatches(), Anew(), epochs=1)
    whole, _ = built()
    fit(compiled(whole), epochs=1)
    same(model, whole)


def test_several_workers_are_refused():
    with tf.distribute.experimental.CentralStorageStrategy(["CPU:0"]).scope():
        model, _ = built()
        compiled(model)
    with pytest.raises(ValueError, match="under CentralStorageStrategy"):
        fit(model, MicroBatches())


def test_step_with_two_updates_is_refused():
    class Twice(Own):
        def train_step(self, data):
            super().train_step(data)
            return super().train_step(data)

    model = compiled(built(Twice, Room(6))[0], run_eagerly=True)
    with pytest.raises(
        RuntimeError, match="^Twice.train_step updates its weights more"
    ):
        fit(model, MicroBatches())


def test_batch_of_several_lengths_is_not_split():
    class Pairs(keras.Model):
        def train_step(self, data):
            raise MemoryError("too much")

    model = compiled(built(Pairs)[0], run_eagerly=True)
    data = tf.data.Dataset.from_tensors((X[:4], Y[:3]))
    text = "cannot be split: its arrays have (4,) and (3,) rows"
    with pytest.raises(MemoryError, match=re.escape(text)):
        model.fit(data, verbose=0, callbacks=[MicroBatches()])


test_bad_settings_are_refused = refused_arguments(
    MicroBatches,
    ("max_splits", 1, ""),
    ("max_splits", 2.0, "", TypeError),
    ("max_splits", True, "", TypeError),
)


def test_what_has_no_examples_stays_whole_in_each_part():
    strategy = tf.distribute.get_strategy()
    ragged = tf.ragged.constant([[1], [], [2, 3], [4], [5]])
    sparse = tf.sparse.from_dense([[0, 1], [2, 0], [0, 0], [3, 4], [5, 0]])
    data = {"r": ragged, "s": sparse, "n": tf.constant(3.0), "none": None}
    examples = gradients.sizes(strategy, data)
    assert examples == (5,)
    first, second = gradients.cut(strategy, data, examples, 2)
    rows = [piece[0]["r"].to_list() for piece in (first, second)]
    assert rows == [[[1], []], [[2, 3], [4], [5]]]
    dense = [tf.sparse.to_dense(p[0]["s"]).numpy().tolist() for p in (first, second)]
    assert dense == [[[0, 1], [2, 0]], [[0, 0], [3, 4], [5, 0]]]
    assert [float(p[0]["n"]) for p in (first, second)] == [3.0, 3.0]
    shares = [float(share) for _, share in (first, second)]
    assert shares == [pytest.approx(0.4), pytest.approx(0.6)]


PROGRAM = """
import resource
import keras, numpy as np
from tfamp.callbacks import MicroBatches

wide = [keras.layers.Activation("tanh") for _ in range(24)]
first, last = keras.layers.Dense(1024), keras.layers.Dense(1)
model = keras.Sequential([keras.Input((1,)), first, *wide, last])
model.compile("sgd", "mse")
x, y = np.ones((8192, 1), "float32"), np.ones((8192, 1), "float32")
model.fit(x[:8], y[:8], verbose=0)
with open("/proc/self/statm") as pages:
    now = int(pages.read().split()[0]) * resource.getpagesize()
# The whole batch needs 8192 * 1024 * 4 bytes for each of 25 layers, which is 800 MiB.
most = now + 500 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (most, most))
for callbacks in [], [MicroBatches()]:
    before = int(model.optimizer.iterations)
    try:
        model.fit(x, y, 8192, verbose=0, callbacks=callbacks)
    except Exception as error:
        print(type(error).__name__, flush=True)
print(int(model.optimizer.iterations) - before, callbacks[0].events[-1].splits)
"""


@pytest.mark.whole(
    "Others raise the error; batch_search_trials_test runs out of memory"
)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks for /proc")
def test_memory_that_has_a_limit():
    # Where oneDNN finds no address for what it compiles, it ends the process; and its
    # allocator waits 10 s before it says that memory ran out.
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    without, with_it = run.stdout.splitlines()
    assert without == "ResourceExhaustedError"
    num_updates, num_parts = map(int, with_it.split())
    assert num_updates == 1 and num_parts >= 2
