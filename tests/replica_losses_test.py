"""Uneven batches train two replicas as one device; stock Keras beside it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.arrays import assert_close
from tests.loops import TrueStep
from tests.replicas import on_both, two_replicas

layers = keras.layers
BATCH = 16
# The last batch of 91 leaves the replicas 6 and 5 examples, that of 81 one and none,
# and 1 has no whole batch at all: an error of shapes in stock Keras.
COUNTS = (91, 81, 1)
LAST = 80  # the first row of the last batch
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
# Weights of about 1 after six updates, each of gradients that are rounded a few times.
HALF_TOLERANCES = {"mixed_float16": 16 * 2.0**-11, "mixed_bfloat16": 16 * 2.0**-8}

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_.*' will be slow")


@pytest.fixture(scope="module")
def strategy():
    return two_replicas()


def data():
    """Returns rows of which those of the last batch are far from the others.

    So an update that counts one of them half is off by about 1.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 4)).astype("float32")
    y = x.sum(-1, keepdims=True)
    y[LAST:] += 16.0
    return x, y


def linear(cls=keras.Model, **options):
    inputs = keras.Input((4,))
    dense = layers.Dense(1, kernel_initializer="zeros", **options)
    return cls(inputs, dense(inputs))


def plain():
    return keras.optimizers.SGD(0.0625, momentum=0.5)


def guarded(**options):
    return lambda: tfamp.LossScaleOptimizer(plain(), **options)


def fitted(
    strategy, make, optimizer=plain, *, rows=slice(64, 81), compiled=None, **fit
):
    """Returns a model after one epoch, on one device where `strategy` is None.

    It runs eagerly, which takes a fraction of the time, unless `compiled` says so.
    """
    keras.utils.set_random_seed(0)
    x, y = data()
    with (strategy or tf.distribute.get_strategy()).scope():
        model = make()
        compiled = {"loss": "mse", "run_eagerly": True, **(compiled or {})}
        model.compile(optimizer(), **compiled)
    fit = {"x": x[rows], "y": y[rows], "batch_size": BATCH, **fit}
    fit = {k: v[rows] if k == "sample_weight" else v for k, v in fit.items()}
    model.fit(**fit, shuffle=False, verbose=0)
    return model


def check_same(strategy, make, **options):
    """Fails where two replicas end in other weights or logs than one device."""
    one = fitted(None, make, **options)
    two = fitted(strategy, make, guarded(), **options)
    check_equal(two, one)


def check_equal(two, one, tolerance=TOLERANCE):
    assert_close(two, one, **tolerance)
    for name, expected in one.history.history.items():
        np.testing.assert_allclose(two.history.history[name], expected, **tolerance)


@pytest.mark.quick("81")
@pytest.mark.parametrize("count", COUNTS)
def test_uneven_batches_train_as_on_one_device(strategy, count):
    compiled = {"metrics": ["mae"], "run_eagerly": False, "steps_per_execution": 2}
    check_same(strategy, linear, rows=slice(count), compiled=compiled)


class Own(TrueStep):
    """Logs no loss, which each replica has of its own examples."""

    def train_step(self, data):
        super().train_step(data)
        return {"step": tf.constant(1.0)}


def test_own_training_steps_train_as_on_one_device(strategy):
    check_same(strategy, lambda: linear(Own))


def masked():
    inputs = keras.Input((3, 4))
    x = layers.Masking()(inputs)
    return keras.Model(inputs, layers.Dense(1, kernel_initializer="zeros")(x))


@pytest.mark.quick("mean")
@pytest.mark.parametrize("reduction", ["mean", "mean_with_sample_weight"])
def test_what_a_mask_leaves_is_a_mean_over_all_replicas(strategy, reduction):
    x = np.repeat(data()[0][:, None], 3, axis=1)
    x[64:70, 1:] = 0.0  # all in the part of the first replica
    y = np.repeat(data()[1][:, None], 3, axis=1)
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    rows = slice(64, 81)
    options = {"x": x[rows], "y": y[rows], "compiled": {"loss": loss}}
    if reduction != "mean":
        options["sample_weight"] = np.linspace(0.5, 2.0, 3 * 96).reshape(96, 3)
    check_same(strategy, masked, **options)


@pytest.mark.quick("mixed_float16")
@pytest.mark.parametrize("policy", HALF_TOLERANCES)
def test_under_every_policy(strategy, policy):
    one = fitted(None, linear)
    with tfamp.scope(policy):
        two = fitted(strategy, linear)
    atol = HALF_TOLERANCES.get(policy, 1e-6)
    check_equal(two, one, {"rtol": atol, "atol": atol})


def normalized():
    inputs = keras.Input((4,))
    normal = layers.BatchNormalization(momentum=0.5)
    return keras.Model(inputs, layers.Dense(1)(normal(inputs)))


@pytest.mark.quick("ours")
@pytest.mark.parametrize("optimizer", [plain, guarded()], ids=["managed", "ours"])
def test_a_replica_without_examples_changes_no_statistics(strategy, optimizer):
    with tfamp.scope("float32"):
        model = fitted(strategy, normalized, optimizer)
    assert getattr(model.optimizer, "skipped_steps", 0) == 0
    for variable in model.variables:
        assert np.isfinite(on_both(strategy, variable)).all()
