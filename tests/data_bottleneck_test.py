"""`tfamp.data.bottleneck`: verdicts on known truths, and a model left as it was."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.clocks import Ticks
from tests.refusals import refusals
from tfamp.stepping import input_waits
from tfamp.stepping.input_waits import Bottleneck, bottleneck, judge, time_in_rounds
from tfamp.stepping.snapshots import named_variables

# Verdicts on times whose truth is set by construction ----------------------------


# Seconds of real steps, of the model and of the input alone; what they come to.
JUDGED = {
    "a small gain that may be a large one": (
        ([1.0] * 7, [0.95, 0.98, 0.60, 0.96, 0.55, 0.97, 0.58], [0.1] * 7),
        ("unclear", 0.05),
    ),
    "faster with the pipeline": (([9.0] * 5, [10.0] * 5, [1.0] * 5), ("compute", 0)),
    "shared cores": (([20.0] * 7, [10.0] * 7, [10.0] * 7), ("contention", 0.5)),
    "a slow input": (([10.0] * 5, [2.0] * 5, [9.0] * 5), ("input", 0.8)),
    "load that comes and goes": (
        tuple(
            [one * load for load in [1.0, 3.0, 3.0, 1.0, 3.0]] for one in (10, 9.5, 1)
        ),
        ("compute", 0.05),
    ),
}


@pytest.mark.parametrize("times, expected", JUDGED.values(), ids=JUDGED)
def test_times_come_to_a_judgement(times, expected):
    verdict, (gain, low, high), _ = judge(*times)
    assert (verdict, gain) == (expected[0], pytest.approx(expected[1]))
    assert 0 <= low <= gain <= high


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def taking(self, *seconds):
        """A call that takes so long: the first, the second, and the last for ever."""
        left = list(seconds)

        def call():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def no_wait():
    return None


def test_a_verdict_that_is_clear_ends_the_rounds():
    clock = Clock()
    seconds = {"input": 0.001, "real": 0.1, "compute": 0.099}
    turns = {name: (clock.taking(one), no_wait) for name, one in seconds.items()}
    times = time_in_rounds(turns, seconds=1000, clock=clock)
    assert {len(values) for values in times.values()} == {9}


# A real model, on a clock that ticks ---------------------------------------------


def pairs(n=40, batch=4):
    x = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)


def plainly(data, read):
    """`pairs` told to a function, batch by batch: nothing parallel, nothing ahead."""

    def told(x):
        read(x)
        return x

    data = data.map(lambda x, y: (tf.numpy_function(told, [x], x.dtype), y))
    data = data.map(lambda x, y: (tf.ensure_shape(x, (None, 3)), y))
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    return data.with_options(options)


def momentum():
    return keras.optimizers.SGD(0.01, momentum=0.9)


def make_model(make_optimizer=momentum, *, policy="float32", **options):
    """Few weights, and every kind of state: statistics, a seed, slots, metrics."""
    with tfamp.scope(policy):
        model = keras.Sequential(
            [
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
    model.compile(make_optimizer(), "mse", metrics=["mae"], **options)
    return model


def measured(model, data):
    """What two rounds of turns give, the first of which is not counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_waits, "_MIN_ROUNDS", 1)
        return bottleneck(model, data, seconds=0.3, clock=Ticks(0.01))


def state(model):
    """The bits of every variable by path, on each replica."""
    variables = [named.variable for named in named_variables(model)]
    local = model.distribute_strategy.experimental_local_results
    bits = {
        variable.path: [part.numpy().tobytes() for part in local(variable.value)]
        for variable in variables
    }
    assert len(bits) == len(variables)
    return bits


WAYS = {
    "moving average": (lambda: keras.optimizers.Adam(use_ema=True), {}),
    "schedule, three steps a call": (
        lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9), momentum=0.9
        ),
        {"steps_per_execution": 3},
    ),
    "scale, xla": (lambda: tfamp.LossScaleOptimizer(momentum()), {"jit_compile": True}),
    "mixed_bfloat16": (momentum, {"policy": "mixed_bfloat16"}),
    "eager": (momentum, {"run_eagerly": True}),
}


@pytest.mark.quick("mixed_bfloat16")
@pytest.mark.parametrize("make_optimizer, options", WAYS.values(), ids=WAYS)
def test_a_trained_model_is_left_as_it_was_bit_by_bit(make_optimizer, options):
    model = make_model(make_optimizer, **options)
    model.fit(pairs(), verbose=0)
    before = state(model)
    result = measured(model, pairs())
    assert state(model) == before
    assert 0 <= result.possible_gain < 1
    rounds = len(result.times["real"])
    assert rounds == len(result.times["compute"]) == len(result.times["input"]) >= 1


class Failing(keras.layers.Layer):
    """Raises in the step once the limit of calls is reached."""

    def __init__(self, limit):
        super().__init__()
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.limit = limit

    def call(self, x):
        self.calls.assign_add(1.0)
        check = tf.debugging.assert_less(self.calls.value, float(self.limit), "enough")
        with tf.control_dependencies([check] if check is not None else []):
            return tf.identity(x)


def test_a_step_that_fails_leaves_the_model_as_it_was():
    model = keras.Sequential([Failing(30), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(pairs(), verbose=0)  # 10 calls, and one to build
    before = state(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match="enough"):
        measured(model, pairs())
    assert state(model) == before


class Working(keras.layers.Layer):
    """Takes some time of a clock that only goes on when it is told to."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.seconds = clock, 0.0

    def call(self, x):
        def work(x):
            self.clock.now += self.seconds
            return x

        return tf.ensure_shape(tf.numpy_function(work, [x], x.dtype), x.shape)


@pytest.fixture(scope="module")
def clocked():
    """A clock, and a model whose step takes `model.layers[0].seconds` of it."""
    clock = Clock()
    model = keras.Sequential([Working(clock), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return clock, model


WHOLE = {
    "slow map": (0.020, 0.004, "input", 20 / 24),
    "slow step": (0.0002, 0.010, "compute", 0.2 / 10.2),
}


@pytest.mark.quick("slow step")
@pytest.mark.parametrize("load, work, verdict, gain", WHOLE.values(), ids=WHOLE)
def test_steps_and_batches_are_timed_in_their_places(
    clocked, load, work, verdict, gain
):
    clock, model = clocked

    def read(x):
        clock.now += load

    model.layers[0].seconds = work
    result = bottleneck(model, plainly(pairs(80), read), seconds=0.2, clock=clock)
    assert min(map(len, result.times.values())) >= 5
    assert result.verdict == verdict
    assert result.possible_gain == pytest.approx(gain, abs=1e-6)
    assert result.compute_seconds == pytest.approx(work)
    assert result.input_seconds == pytest.approx(load)


# Records and advice --------------------------------------------------------------

RESULT = Bottleneck(
    verdict="input",
    possible_gain=0.8,
    gain_low=0.75,
    gain_high=0.85,
    reason="alone, the input takes 5.0 times as long as the model",
    advice="Cache.",
    times={"real": (0.01, 0.011, 0.01), "compute": (0.002,) * 3, "input": (0.01,) * 3},
    batch_size=64,
)


def test_the_record_comes_back_from_json():
    assert Bottleneck.from_json(RESULT.to_json()) == RESULT


def test_the_table_says_what_was_measured():
    text = str(RESULT)
    assert "3 rounds, batches of 64" in text
    assert "Verdict: input; alone, the input takes 5.0 times as long" in text
    assert "Possible gain: 80.0 % of a step (75.0 % to 85.0 %)." in text
    assert "6,400" in text  # 64 examples in 10 ms
    assert text.endswith("Cache.")
    assert max(map(len, text.splitlines()[:10])) <= 110


IMAGES = {"float": tf.zeros((2, 8, 8, 3)), "uint8": tf.zeros((2, 8, 8, 3), tf.uint8)}
ADVICE = {
    "float images": ("input", IMAGES["float"], "Deliver images as uint8"),
    "float images in a dict": ("contention", {"a": IMAGES["float"]}, "as uint8"),
    "bytes": ("input", IMAGES["uint8"], "an epoch as delivered is 3.8 KiB"),
    "a table": ("contention", tf.zeros((2, 8)), "`.prefetch(2)`"),
    "leave it": ("compute", IMAGES["float"], "Leave the pipeline as it is"),
    "measure longer": ("unclear", IMAGES["float"], "Measure longer"),
}


@pytest.mark.parametrize("verdict, x, words", ADVICE.values(), ids=ADVICE)
def test_advice_is_one_sentence_for_the_verdict_and_the_data(
    verdict, x, words, monkeypatch
):
    found = (verdict, (0.5, 0.4, 0.6), "why")
    monkeypatch.setattr(input_waits, "judge", lambda **times: found)
    monkeypatch.setattr(
        input_waits, "time_in_rounds", lambda turns, **o: dict.fromkeys(turns, [1.0])
    )

    class Nothing(keras.Model):
        def call(self, x):
            return tf.zeros((2, 1))

        def train_step(self, data):
            return {"loss": tf.constant(0.0)}

    model = Nothing()
    model.compile()
    data = tf.data.Dataset.from_tensors((x, tf.zeros((2, 1)))).repeat(10)
    advice = bottleneck(model, data).advice
    assert words in advice and len(advice.splitlines()) == 1


ERRORS = {
    "no model": (
        lambda: bottleneck(pairs(), make_model()),
        "expected a compiled `keras.Model`. Pass the model first, then the dataset.",
        TypeError,
    ),
    "not compiled": (
        lambda: bottleneck(keras.Sequential(name="plain"), pairs()),
        "Model 'plain' is not compiled; expected one that `fit` takes.",
    ),
    "lengths": (
        lambda: bottleneck(make_model(), (np.zeros(3), np.zeros(2))),
        "`dataset` holds arrays of shapes ((3,), (2,)); expected the same number",
    ),
    "seconds": (
        lambda: bottleneck(make_model(), pairs(), seconds=0),
        "`seconds` is 0.0; expected a finite number above 0.",
    ),
}


test_errors = refusals(ERRORS)


def test_an_iterator_is_not_drawn_from():
    iterator = iter(pairs(8))
    message = "would be used up: pass what it iterates"
    with pytest.raises(TypeError, match=re.escape(message)):
        bottleneck(make_model(), iterator)
    assert len(list(iterator)) == 2


# Real time -----------------------------------------------------------------------


def busy(x):
    """Work for some milliseconds on one core."""
    a = tf.random.stateless_uniform((64, 64), (1, 2))
    _, a = tf.while_loop(
        lambda i, a: i < 200, lambda i, a: (i + 1, tf.tanh(a @ a * 0.01)), (0, a)
    )
    return x + 0 * a[0, 0]


# The width of the model, whether the map is busy, the opposite of the truth, and
# where the possible gain lies even when most of the step is noise.
REAL = {
    "slow map": (16, True, ("compute",), (0.15, 1.0)),
    "slow step": (512, False, ("input", "contention"), (0.0, 0.3)),
    "both": (512, True, ("compute",), (0.05, 1.0)),
    "neither": (128, False, ("input", "contention"), (0.0, 0.3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("width, is_busy, opposite, gains", REAL.values(), ids=REAL)
def test_verdicts_on_real_datasets(width, is_busy, opposite, gains):
    """Many times as slow on one side, since the machine may be busy otherwise.

    What else it does may leave the verdict unclear, but not turn it round.
    """
    model = keras.Sequential([keras.layers.Dense(width) for _ in range(3)])
    model.add(keras.layers.Dense(1))
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.ones((64, 32)), tf.ones((64, 1))))
    data = data.repeat(500)
    if is_busy:
        data = data.map(lambda x, y: (busy(x), y), num_parallel_calls=2)
    result = bottleneck(model, data.prefetch(2), seconds=2)
    assert result.verdict not in opposite
    assert gains[0] <= result.possible_gain <= gains[1]
