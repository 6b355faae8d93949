"""`Throughput`: rates in logs and files, the wait for input; training is the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.clocks import Ticks
from tests.replicas import two_replicas
from tests.styles import Subclassed
from tfamp.callbacks import Throughput

# 22 examples in batches of 4 are five of 4 and one of 2.
NUM_EXAMPLES, BATCH = 22, 4
KEYS = ("examples_per_second", "step_seconds", "input_wait")
# By a clock that ticks when it is read: before a draw, after it, and after the step.
STEP, WAIT = 3.0, 1 / 3


class TracedSlowly(keras.Model):
    """Takes a hundred seconds of a clock to trace its step."""

    clock = None
    num_traces = 0

    def train_step(self, data):
        self.num_traces += 1
        if self.clock is not None:
            self.clock.now += 100
        return super().train_step(data)


def traced_slowly():
    inputs = keras.Input((2,))
    return TracedSlowly(inputs, keras.layers.Dense(3, use_bias=False)(inputs))


MODELS = {
    "Sequential": lambda: keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(3, use_bias=False)]
    ),
    "subclassed": lambda: Subclassed([keras.layers.Dense(3, use_bias=False)]),
}


def compiled(make=MODELS["Sequential"], **settings):
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(settings.pop("optimizer", "sgd"), "mse", **settings)
    return model


def arrays(num_examples=NUM_EXAMPLES):
    x = np.arange(2 * num_examples, dtype="float32").reshape(-1, 2) / 100
    return x, np.ones((num_examples, 3), "float32")


def fit(model, *callbacks, data=None, epochs=2, **settings):
    x, y = arrays() if data is None else (data, None)
    settings = {"shuffle": False, "verbose": 0} | settings
    if data is None:
        settings |= {"batch_size": BATCH}
    return model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **settings).history


# Of the first epoch's six steps the first is left out, and the last, whose batch is the
# first of its shape: 16 examples in 4 steps, then 22 in 6.
PER_SECOND = [16 / (4 * STEP), 22 / (6 * STEP)]
EXPECTED = {
    "examples_per_second": PER_SECOND,
    "step_seconds": [STEP, STEP],
    "input_wait": [WAIT, WAIT],
}


@pytest.mark.quick("Sequential")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_rates_of_each_epoch_are_in_the_history(make):
    rate = Throughput(clock=Ticks())
    history = fit(compiled(make), rate)
    for key in KEYS:
        assert history[key] == pytest.approx(EXPECTED[key]), key
    assert history["first_step_seconds"] == [rate.first_step_seconds] == [STEP]


def dataset(kind=None):
    made = tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)
    if kind == "dict":
        return made.map(lambda x, y: ({"a": x}, y))
    return made.filter(lambda x, y: True) if kind == "unknown length" else made


def by_name():
    inputs = keras.Input((2,), name="a")
    return keras.Model({"a": inputs}, keras.layers.Dense(3)(inputs))


@pytest.mark.quick("dict")
@pytest.mark.parametrize("kind", ["dict", "unknown length"])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_examples_are_counted_in_batches_of_every_form(kind):
    model = compiled(by_name if kind == "dict" else MODELS["Sequential"])
    history = fit(model, Throughput(clock=Ticks()), data=dataset(kind))
    expected = EXPECTED["examples_per_second"]
    assert history["examples_per_second"] == pytest.approx(expected)


WAYS = {
    "XLA": {"jit_compile": True},
    "three steps a call": {"steps_per_execution": 3},
    "eager": {"run_eagerly": True},
}


@pytest.mark.quick("eager")
@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_examples_and_steps_are_right_however_the_step_runs(settings):
    rate = Throughput(clock=Ticks())
    history = fit(compiled(**settings), rate)
    if "steps_per_execution" not in settings:
        assert history["examples_per_second"] == pytest.approx(PER_SECOND)
        assert history["step_seconds"] == [STEP, STEP]
        return
    # A call is a second of three steps; the second call holds 4 + 4 + 2 examples.
    assert history["examples_per_second"] == pytest.approx([10.0, 22 / 2])
    assert history["step_seconds"] == pytest.approx([1 / 3, 1 / 3])
    assert "input_wait" not in history
    assert any("No input_wait" in note for note in rate.notes)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_examples_of_all_replicas_are_counted_together(steps):
    strategy = two_replicas()
    with strategy.scope():
        model = compiled(steps_per_execution=steps)
    history = fit(model, Throughput(clock=Ticks()))
    expected = PER_SECOND if steps == 1 else [10.0, 11.0]
    assert history["examples_per_second"] == pytest.approx(expected)


def test_tracing_is_told_apart_and_left_out_of_the_rates_now_and_later():
    model = compiled(traced_slowly)
    model.clock = clock = Ticks()

    class Forget(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.make_train_function(force=True)

    history = fit(model, Forget(), Throughput(clock=clock))
    assert history["first_step_seconds"][0] > 100
    assert history["step_seconds"] == [STEP, STEP]
    assert history["examples_per_second"] == pytest.approx([PER_SECOND[0]] * 2)


class Slow(keras.callbacks.Callback):
    """Takes an hour of a clock at each end."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def on_epoch_end(self, epoch, logs=None):
        self.clock.now += 3600

    on_test_begin = on_test_end = lambda self, logs=None: self.on_epoch_end(0)


def test_validation_and_ends_of_epochs_are_left_out():
    clock = Ticks()
    callbacks = [Slow(clock), Throughput(clock=clock)]
    history = fit(compiled(), *callbacks, data=dataset(), validation_data=dataset())
    for key in KEYS:
        assert history[key] == pytest.approx(EXPECTED[key]), key


def test_the_second_of_two_rests_and_says_so():
    first, second = Throughput(clock=Ticks()), Throughput(clock=Ticks())
    history = fit(compiled(), first, second)
    assert history["examples_per_second"] == pytest.approx(PER_SECOND)
    text = "A second Throughput in the same `fit` does nothing: use one."
    assert (text in first.notes, text in second.notes) == (False, True)
