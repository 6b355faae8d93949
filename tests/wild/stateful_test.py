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


class Centre(layers.Layer):
    """Takes off a running mean, and counts the steps that it saw."""

    def build(self, shape):
        how = {"initializer": "zeros", "trainable": False}
        self.mean = self.add_weight(shape=(shape[-1],), name="mean", **how)
        self.seen = self.add_weight(shape=(), name="seen", **how)

    def call(self, x, training=False):
        if training:
            mean = keras.ops.mean(x, axis=0)
            self.mean.assign(self.mean * 0.999 + mean * 0.001)
            self.seen.assign(self.seen + 1)
        return x - self.mean


class CastByHand(Centre):
    """Computes the mean in float32, of what it reads in half precision."""

    def call(self, x, training=False):
        old, mean = (keras.ops.cast(each, "float32") for each in (self.mean, x))
        if training:
            self.mean.assign(old * 0.999 + keras.ops.mean(mean, axis=0) * 0.001)
            self.seen.assign_add(1)
        return x - self.mean


class Around(layers.Layer):
    """Holds a layer beside a running mean."""

    def __init__(self, **options):
        super().__init__(**options)
        self.centre, self.dense = Centre(), layers.Dense(4)

    def call(self, x, training=False):
        return self.dense(self.centre(x, training=training))


@pytest.mark.quick(
    "mixed_float16-Around", "mixed_bfloat16-CastByHand", "*_float16-Centre"
)
@pytest.mark.parametrize("layer", [Centre, CastByHand, Around])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_running_state_that_a_layer_assigns_is_computed_in_float32(layer, policy):
    steps, x = 300, np.full((8 * 300, 4), 3.0, "float32")
    with tfamp.scope(policy):
        own = layer()
        model = keras.Sequential([own, layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-4), "mse")
        model.fit(x, np.ones((len(x), 1)), batch_size=8, verbose=0)
    centre = getattr(own, "centre", own)
    assert float(centre.seen) == steps
    np.testing.assert_allclose(centre.mean, 3 * (1 - 0.999**steps), rtol=1e-4)
    rows = {row.class_name: row for row in tfamp.assignment(model)}
    kept = rows[type(centre).__name__]
    assert (kept.rule, kept.compute_dtype) == ("default: running state", "float32")
    if layer is Around:
        assert rows["Around"].compute_dtype == policy.removeprefix("mixed_")


class GivesItsState(Centre):
    """Gives the weight that it keeps, as it is."""

    def call(self, x, training=False):
        return super().call(x, training=training), self.mean


def test_a_layer_in_float32_may_give_a_weight():
    with tfamp.scope("mixed_float16"):
        layer = GivesItsState()
        for _ in range(2):
            out, mean = layer(np.full((8, 4), 3.0, "float32"), training=True)
    assert out.dtype == "float16"
    assert mean is layer.mean
