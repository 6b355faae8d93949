"""Mixed precision, accumulation, remat and EMA on two replicas, all together."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.replicas import two_replicas

BATCH = 32
STEPS = 2
# Sums of a batch in other orders, in a format with so many digits.
TOLERANCE = {"mixed_float16": 4e-3}


def build(policy, *, accumulation_steps):
    keras.utils.set_random_seed(1)
    with warnings.catch_warnings(), tfamp.scope(policy):
        layers = [keras.layers.Dense(32, activation="tanh") for _ in range(2)]
        model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(1)])
        inner = keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.5)
        optimizer = tfamp.LossScaleOptimizer(
            inner, 2.0**8, dynamic=False, accumulation_steps=accumulation_steps
        )
        model.compile(optimizer, "mse")
    return model


def trained(policy, *, micro_batches, with_trades):
    """Returns weights, averages and losses after a few updates of the same batches."""
    strategy = two_replicas() if with_trades else contextlib.nullcontext()
    with strategy.scope() if with_trades else strategy:
        model = build(policy, accumulation_steps=micro_batches)
    if with_trades:
        tfamp.remat(model)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * STEPS, 16)).astype(np.float32)
    y = x[:, :1] - x[:, 1:2]
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH // micro_batches)
    history = model.fit(data, epochs=2, verbose=0).history["loss"]
    inner = model.optimizer.inner_optimizer
    # At the end of `fit` Keras puts the averages into the weights.
    return (
        [np.array(w) for w in model.get_weights()],
        history,
        int(inner.iterations.numpy()),
    )


@pytest.mark.filterwarnings("ignore:'mixed_:UserWarning")
@pytest.mark.parametrize("policy", TOLERANCE)
def test_all_trades_together_equal_the_large_batch(policy):
    plain = trained(policy, micro_batches=1, with_trades=False)
    traded = trained(policy, micro_batches=2, with_trades=True)
    assert plain[2] == traded[2] == 2 * STEPS
    for a, b in zip(plain[0], traded[0], strict=True):
        scale = np.abs(a).max() + 1e-3
        np.testing.assert_allclose(a / scale, b / scale, atol=TOLERANCE[policy])
    np.testing.assert_allclose(plain[1], traded[1], rtol=TOLERANCE[policy])
