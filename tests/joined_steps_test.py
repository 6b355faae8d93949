"""Short steps: how many of them one call of TensorFlow runs, chosen by timing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.keras_hooks.trainer import examples_recorded

layers = keras.layers
X = np.random.default_rng(0).normal(size=(640, 8)).astype("float32")
Y = X[:, :1]


def made(**options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False, **options)
    return model


def fitted(model, **options):
    history = model.fit(X, Y, epochs=3, verbose=0, shuffle=False, **options)
    return history.history["loss"]


def test_a_measurement_tells_how_many_steps_a_call_runs_best_and_leaves_the_model():
    model = made()
    before = model.get_weights()
    found = tfamp.measure_policies(
        model, (X, Y), policies=["float32"], jit_compile=False
    )
    assert [steps for steps, _ in found.joined] == [1, 8]  # 20 batches in an epoch
    assert found.steps_per_execution == 8
    assert "steps_per_execution=8" in found.table()
    assert model.steps_per_execution == 1
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


class Counting(keras.callbacks.Callback):
    batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1


def test_measured_steps_are_joined_unless_a_callback_acts_on_each():
    expected, counting = fitted(made()), Counting()
    with tfamp.scope("measure"):
        model = made()
        losses = fitted(model)
        assert model.steps_per_execution == 8
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
        assert int(model.optimizer.iterations) == 60
        fitted(model, callbacks=[counting])
        assert (model.steps_per_execution, counting.batches) == (1, 60)
        fitted(model, callbacks=[keras.callbacks.EarlyStopping("loss")])
    assert model.steps_per_execution == 8


@pytest.mark.parametrize("options", [{"steps_per_execution": 2}, {"run_eagerly": True}])
def test_what_compile_was_told_stays(options):
    with tfamp.scope("measure"):
        model = made(**options)
        fitted(model)
    assert model.steps_per_execution == options.get("steps_per_execution", 1)


def test_no_call_goes_beyond_the_steps_that_were_asked_for():
    endless = tf.data.Dataset.from_tensor_slices((X, Y)).batch(32).repeat()
    with tfamp.scope("measure"):
        model = made()
        for name, steps, size in (
            ("steps_per_epoch", 13, 1),
            ("validation_steps", 13, 1),
            ("steps_per_epoch", 16, 8),
        ):
            options = {"validation_steps": 8, name: steps, "verbose": 0}
            model.fit(X, Y, validation_data=endless, **options)
            assert model.steps_per_execution == size
        assert int(model.optimizer.iterations) == 13 + 20 + 16
        joined = model.test_function
        for steps in (13, 16):
            model.evaluate(endless, steps=steps, verbose=0)
            assert examples_recorded(model) == steps * 32
            assert len(model.predict(endless, steps=steps, verbose=0)) == steps * 32
        assert model.test_function is joined is not None, "traced once"
        assert model.steps_per_execution == 8
