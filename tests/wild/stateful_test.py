"""A recurrent layer that keeps its state over batches, and one batch that is bad."""

import keras
import numpy as np
import pytest
from keras import layers

import tfamp
from tests.arrays import assert_close


@pytest.mark.parametrize("way", ["graph", "eager", "xla"])
@pytest.mark.parametrize("kind", [layers.LSTM, layers.GRU])
@pytest.mark.quick("LSTM-graph")
def test_a_bad_batch_leaves_the_state_as_it_was(kind, way):
    inputs = keras.Input(batch_shape=(4, 6, 3))
    recurrent = kind(5, stateful=True)
    outputs = layers.Dense(1)(layers.Dropout(0.5)(recurrent(inputs)))
    model = keras.Model(inputs, outputs)
    model.compile(
        tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
        "mse",
        run_eagerly=way == "eager",
        jit_compile=way == "xla",
    )
    x = np.random.default_rng(0).normal(size=(4, 6, 3)).astype("float32")
    y = np.ones((4, 1), "float32")

    def step(x):
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        states = keras.tree.flatten(recurrent.states)
        return [keras.ops.convert_to_numpy(state) for state in states]

    before = step(x)
    x[0, 0, 0] = np.nan
    after = step(x)
    assert model.optimizer.skipped_steps == 1
    assert np.any(before[0])
    assert_close(before, after)


class Recalibrating(keras.Sequential):
    """Lets the statistics follow the data in steps that train no weight."""

    only_looks = False

    def train_step(self, data):
        if self.only_looks:
            self(data[0], training=True)
            return {"loss": 0.0}
        return super().train_step(data)


@pytest.mark.parametrize("way", ["graph", "eager", "xla"])
@pytest.mark.quick("eager")
def test_statistics_move_in_a_step_without_an_update_after_a_bad_batch(way):
    norm = layers.BatchNormalization(momentum=0.5)
    model = Recalibrating([keras.Input((1,)), norm, layers.Dense(1)])
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    options = {"run_eagerly": way == "eager", "jit_compile": way == "xla"}
    model.compile(optimizer, "mse", **options)
    x, y = np.full((4, 1), 8.0, "float32"), np.zeros((4, 1), "float32")
    model.fit(np.full_like(x, np.nan), y, verbose=0)
    assert (optimizer.skipped_steps, norm.moving_mean.numpy()) == (1, 0)
    model.only_looks = True
    model.compile(optimizer, "mse", **options)  # the step is traced anew
    model.fit(x, y, verbose=0)
    assert norm.moving_mean.numpy() == 4
