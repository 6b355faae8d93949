"""Two replicas judge, clip, add up, send and count as one."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.arrays import assert_close
from tests.linear_training import (
    BIAS,
    KERNEL,
    TOLERANCE,
    X,
    Y,
    inner,
    linear,
    one_device,
    spoiled,
    without,
)
from tests.replicas import check_replicas_agree, on_both, two_replicas
from tests.styles import stock_policy
from tfamp.loss_scale import step as steps

layers = keras.layers
SGD = keras.optimizers.SGD
BATCH = 8
INF = float("inf")
# Which of the two replicas overflow.
FAILING = [(True, False), (False, True), (True, True)]
FAILING_IDS = ["first", "second", "both"]

# Three updates of weights near 1; the sum of two parts is rounded once in each.
SUM_TOLERANCE = {"float16": 6 * 2.0**-11, "bfloat16": 6 * 2.0**-8}

pytestmark = pytest.mark.filterwarnings("ignore:'.*float16' ")


@pytest.fixture(scope="module")
def strategy():
    return two_replicas()


class Training:
    """Variables, an optimizer, and steps whose gradients each replica is given.

    Steps are run eagerly, which takes a tenth of the time, or traced as `fit` does.
    """

    def __init__(self, strategy, make_optimizer, *starts, is_traced=False, scales=True):
        self.strategy, self.scales = strategy, scales
        with strategy.scope():
            self.variables = [keras.Variable(s, dtype="float32") for s in starts]
            self.optimizer = make_optimizer()
        run = lambda parts: strategy.run(self.on_replica, args=(parts,))  # noqa: E731
        self.run = tf.function(run) if is_traced else run

    def on_replica(self, factors):
        """Takes a step of a linear loss, whose gradients are `factors`."""
        values = [variable.value for variable in self.variables]
        with tf.GradientTape() as tape:
            loss = tf.add_n(list(map(self.term, factors, values)))
            loss = self.optimizer.scale_loss(loss) if self.scales else loss
        self.optimizer.apply(tape.gradient(loss, values), self.variables)

    def term(self, factor, value):
        """Returns a loss whose gradient is a factor: an array, or rows and indices."""
        if isinstance(factor, tuple):
            factor, indices = factor
            value = tf.gather(value, indices)
        return tf.reduce_sum(factor * value)

    def step(self, *gradients):
        """Takes a step with the first unscaled gradients on one replica, and so on."""
        parts = [
            [g if isinstance(g, tuple) else np.asarray(g, "float32") for g in part]
            for part in gradients
        ]
        given = self.strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )
        self.run(given)

    def values(self):
        """Returns the value of each variable, which all replicas have."""
        return [on_both(self.strategy, v) for v in self.variables]


def fitted(strategy, x, optimizer, *, model=linear, batch_size=BATCH, **options):
    """Returns a model after one epoch of `fit`."""
    with strategy.scope():
        made = model()
        made.compile(optimizer(), "mse", **options)
    made.fit(x, Y[: len(x)], batch_size=batch_size, shuffle=False, verbose=0)
    return made


def check_weights(strategy, model, expected):
    for variable, value in zip(model.weights, expected.get_weights(), strict=True):
        np.testing.assert_allclose(on_both(strategy, variable), value, **TOLERANCE)


@pytest.mark.quick("second-adam-graph")
@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("make", [SGD, keras.optimizers.Adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("fails", FAILING, ids=FAILING_IDS)
def test_an_overflow_on_any_replica_changes_no_bit(strategy, make, fails, is_traced):
    training = Training(
        strategy,
        lambda: tfamp.LossScaleOptimizer(make(0.5), 8.0),
        1.0,
        [2.0, 3.0],
        is_traced=is_traced,
    )
    optimizer = training.optimizer
    training.step([1.0, [1.0, 2.0]], [3.0, [4.0, 5.0]])
    weights = training.values()
    slots = [on_both(strategy, v) for v in optimizer.inner_optimizer.variables]
    first, second = ([1.0, [INF, 1.0]] if bad else [1.0, [1.0, 1.0]] for bad in fails)
    training.step(first, second)
    np.testing.assert_equal(training.values(), weights)
    now = [on_both(strategy, v) for v in optimizer.inner_optimizer.variables]
    np.testing.assert_equal(now, slots)
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (1, 1)
    assert optimizer.scale == 4.0
    assert optimizer.nonfinite_variables == (training.variables[1].path,)
    check_replicas_agree(strategy, optimizer.variables)


CLIPS = [
    # The sum is 11; clipped to 1. Each clipped alone adds up to 2.
    ({"clipnorm": 1.0}, ([1.0], [10.0]), [-1.0]),
    ({"clipvalue": 1.0}, ([1.0], [10.0]), [-1.0]),
    # The sums are 3 and 4, of norm 5.
    ({"global_clipnorm": 1.0}, ([1.0, 0.0], [2.0, 4.0]), [-0.6, -0.8]),
]


@pytest.mark.parametrize(
    ("clip", "gradients", "expected"),
    CLIPS,
    ids=["clipnorm", "clipvalue", "global_clipnorm"],
)
def test_clipping_acts_on_the_sum_over_replicas(strategy, clip, gradients, expected):
    training = Training(
        strategy,
        lambda: tfamp.LossScaleOptimizer(SGD(1.0, **clip), 8.0),
        *[0.0 for _ in expected],
    )
    training.step(*gradients)
    np.testing.assert_allclose(training.values(), expected, rtol=1e-6)


def test_microbatches_make_the_batch_they_are_parts_of(strategy):
    bad_rows = {1: [2], 4: [1]}  # on the second replica, on the first
    model = fitted(
        strategy,
        spoiled(X, bad_rows, 4),
        lambda: tfamp.LossScaleOptimizer(inner(), accumulation_steps=4),
        batch_size=4,
    )
    # Of the other 10 microbatches two windows and the last two, flushed at the end.
    expected, _ = one_device(*without(bad_rows, 4), batch_size=4 * 4)
    check_weights(strategy, model, expected)
    optimizer = model.optimizer
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (3, 2)
    assert on_both(strategy, optimizer.iterations) == 3
    check_replicas_agree(strategy, optimizer.variables)


def normalized():
    """Returns a model whose moving statistics stand on a constant layer."""
    x = keras.Input((4,))
    h = layers.BatchNormalization(momentum=0.5)(x)
    model = keras.Model(x, layers.Dense(1)(h))
    model.layers[-1].set_weights([KERNEL, BIAS])
    return model


def statistics(strategy, model, layer=1):
    """Returns the moving mean and variance on each replica."""
    norm = model.layers[layer]
    return [
        [value.numpy() for value in strategy.experimental_local_results(v.value)]
        for v in (norm.moving_mean, norm.moving_variance)
    ]


def test_moving_statistics_survive_a_skipped_step(strategy):
    bad_rows = {1: [5], 3: [1], 4: [0, 7]}  # on the second replica, the first, both
    x = spoiled(X, bad_rows, BATCH)
    make = lambda: tfamp.LossScaleOptimizer(inner())  # noqa: E731
    model = fitted(strategy, x, make, model=normalized)
    found = statistics(strategy, model)
    assert np.isfinite(found).all()
    x, y = without(bad_rows, BATCH)
    with strategy.scope():
        clean = normalized()
        clean.compile(inner(), "mse")  # each replica keeps its own in stock Keras
    clean.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    means = [np.mean(parts, axis=0) for parts in statistics(strategy, clean)]
    for both, mean in zip(found, means, strict=True):
        np.testing.assert_allclose(both, [mean, mean], **TOLERANCE)


def uniform_data():
    """Returns U(0, 1) data in whose first batch only the second replica overflows.

    The error of a model that begins at 0 is at most 1 elsewhere: gradients of the
    bias of up to 8 * 2 * 1 / 16 * 32768, that is 32768. Here one is 163840.
    """
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(64, 4)).astype("float32")
    y = 0.25 * x.sum(-1, keepdims=True)
    y[8:16] += 40.0
    return x, y


def dense_norm_dense():
    """Returns a model whose first output is 0, with the same weights every time."""
    x = keras.Input((4,))
    h = layers.BatchNormalization()(layers.Dense(4)(x))
    model = keras.Model(x, layers.Dense(1, kernel_initializer="zeros")(h))
    model.layers[1].set_weights([np.eye(4) + np.tile(KERNEL, 4), np.zeros(4)])
    return model


def in_float16(strategy, make_optimizer, policy):
    """Returns a model of float16 layers, compiled under the strategy."""
    with stock_policy(policy), strategy.scope():
        model = dense_norm_dense()
        model.compile(make_optimizer(), "mse")
    return model


UNIFORM_FIT = {"batch_size": 16, "shuffle": False, "verbose": 0}


def test_a_float16_model_trains_past_the_second_replica(strategy):
    x, y = uniform_data()
    ours = lambda: tfamp.LossScaleOptimizer(SGD(0.125))  # noqa: E731
    model = in_float16(strategy, ours, "mixed_float16")
    model.fit(x, y, **UNIFORM_FIT)
    assert model.optimizer.skipped_steps == 1
    assert np.isfinite(statistics(strategy, model, layer=2)).all()
    check_replicas_agree(strategy, model.optimizer.variables)
    reference = in_float16(strategy, lambda: SGD(0.125), "float32")
    reference.fit(x[16:], y[16:], **UNIFORM_FIT)
    for found, expected in zip(
        model.trainable_weights, reference.trainable_weights, strict=True
    ):
        expected = on_both(strategy, expected)
        # Updates are rounded a few times to float16, in steps of what came before.
        tolerance = 16 * 2.0**-11 * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(
            on_both(strategy, found), expected, rtol=0, atol=tolerance
        )


@pytest.mark.parametrize("in_fit", [True, False], ids=["fit", "loop"])
def test_an_optimizer_from_outside_the_scope_is_an_error(strategy, in_fit):
    outside = tfamp.LossScaleOptimizer(SGD(1.0), 8.0)
    message = "The optimizer was made outside the MirroredStrategy that trains with it;"
    with pytest.raises(ValueError, match=re.escape(message)):
        if in_fit:
            fitted(strategy, X, lambda: outside)
        else:
            Training(strategy, lambda: outside, 1.0).step([1.0], [1.0])


def test_a_compiled_loop_on_two_cpus_is_an_error_that_says_so(strategy):
    message = (
        "`jit_compile=True` under MirroredStrategy: TensorFlow cannot compile a step "
        "of several replicas by XLA on these devices (keras#21366). Pass "
        "`jit_compile=False`."
    )

    def make():
        return tfamp.LossScaleOptimizer(SGD(1.0), 8.0)

    training = Training(strategy, make, 1.0)

    @tf.function(jit_compile=True)
    def on_replica():
        training.optimizer.scale_loss(1.0)
        training.optimizer.apply([tf.constant(1.0)], training.variables)

    with pytest.raises(RuntimeError, match=re.escape(message)):
        tf.function(lambda: strategy.run(on_replica))()


# --- gradients sent in half precision ---


@pytest.fixture
def sent(monkeypatch):
    """The dtypes of the gradients that a replica sent last."""
    found, original = [], steps.summed

    def summed(context, values):
        found[:] = [v.dtype.name for v in values[:-2]]
        return original(context, values)

    monkeypatch.setattr(steps, "summed", summed)
    return found


def trained(strategy, policy="mixed_float16", **options):
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy, loss_scale_options=options), strategy.scope():
        hidden = layers.Dense(8, activation="tanh")
        model = keras.Sequential([keras.Input((4,)), hidden, layers.Dense(1)])
        model.compile(SGD(0.125), "mse", run_eagerly=True)
    model.fit(X[:24], Y[:24], batch_size=8, shuffle=False, verbose=0)
    return model


CASES = [
    ("mixed_float16", {"reduce_dtype": "float16", "initial_scale": 1024.0}),
    ("mixed_float16", {"reduce_dtype": "bfloat16", "accumulation_steps": 2}),
    ("mixed_bfloat16", {"reduce_dtype": "bfloat16"}),
    ("float32", {"reduce_dtype": "float16"}),
]


@pytest.mark.quick("case2")
@pytest.mark.parametrize("case", CASES, ids=["case0", "case1", "case2", "case3"])
def test_gradients_are_sent_as_asked_and_train_as_in_float32(strategy, sent, case):
    policy, options = case
    model = trained(strategy, policy, **options)
    dtype = options.pop("reduce_dtype")
    assert set(sent) == {dtype}
    assert model.optimizer.dynamic == ("float16" in (policy[6:], dtype))
    variables = [*model.trainable_variables, *model.optimizer.variables]
    check_replicas_agree(strategy, variables)
    if policy == "mixed_float16":
        exact = trained(strategy, policy, **options)
        assert set(sent) == {"float32"}
        assert_close(model, exact, rtol=0, atol=SUM_TOLERANCE[dtype])


def sending(strategy, dtype, start, scale):
    make = lambda: tfamp.LossScaleOptimizer(SGD(1.0), scale, reduce_dtype=dtype)  # noqa: E731
    return Training(strategy, make, start, scales=False)


def test_a_sum_that_overflows_in_float16_is_a_skipped_step(strategy):
    training = sending(strategy, "float16", [0.0], 1024.0)
    # At the scale 40960 on each: the sum is beyond 65504.
    training.step([[40.0]], [[40.0]])
    assert training.values() == [[0.0]]
    optimizer = training.optimizer
    assert (optimizer.skipped_steps, optimizer.scale) == (1, 512.0)
    training.step([[40.0]], [[40.0]])
    assert training.values() == [[-80.0]]
    assert optimizer.applied_steps == 1


def test_float16_is_sent_at_the_loss_scale(strategy):
    # 2**-26 is below the smallest number of float16, and so is a sum of two.
    training = sending(strategy, "float16", [0.0], 2.0**15)
    training.step([[2.0**-26]], [[2.0**-26]])
    assert training.values() == [[-(2.0**-25)]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sparse_gradients_of_replicas_add_up(strategy, sent, dtype):
    training = sending(strategy, dtype, np.zeros((4, 1)), 8.0)
    rows = np.array([[1.0], [2.0], [0.5]], "float32")
    training.step([(rows, np.array([0, 0, 3]))], [(rows, np.array([3, 1, 0]))])
    assert sent == [dtype]
    assert training.values()[0].ravel().tolist() == [-3.5, -2.0, 0.0, -1.5]


def test_settings_out_of_range_are_told():
    options = {"reduce_dtype": "fp16"}
    for make in (
        lambda: tfamp.LossScaleOptimizer("sgd", **options),
        lambda: tfamp.enable("mixed_float16", loss_scale_options=options),
    ):
        with pytest.raises(ValueError, match="Unknown `reduce_dtype` 'fp16'; expected"):
            make()
    message = re.escape("`loss_scale` 'dynamic' has no effect under policy")
    options = {"reduce_dtype": "bfloat16", "initial_scale": 8.0}
    with pytest.raises(ValueError, match=message):
        tfamp.enable("mixed_bfloat16", loss_scale_options=options)
