"""Short steps: how many of them one call of TensorFlow runs, chosen by timing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

layers = keras.layers
X = np.random.default_rng(0).normal(size=(640, 8)).astype("float32")
Y = X[:, :1]


def made(**options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False, **options)
    return model


def test_a_measurement_tells_how_many_steps_a_call_runs_best():
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


def fitted(model, **options):
    history = model.fit(X, Y, epochs=3, verbose=0, shuffle=False, **options)
    return history.history["loss"]


def test_measured_steps_are_joined_and_train_to_the_same_numbers():
    expected = fitted(made())
    with tfamp.scope("measure"):
        model = made()
        losses = fitted(model)
    assert model.steps_per_execution == 8
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert int(model.optimizer.iterations) == 60


class Counting(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)


def test_a_callback_that_acts_on_batches_sees_each_of_them(caplog):
    counting = Counting()
    with tfamp.scope("measure"):
        model = made()
        fitted(model)
        fitted(model, callbacks=[counting])
        assert model.steps_per_execution == 1
        assert counting.batches == 3 * [*range(20)]
        fitted(model, callbacks=[keras.callbacks.EarlyStopping("loss")])
    assert model.steps_per_execution == 8


@pytest.mark.parametrize("options", [{"steps_per_execution": 2}, {"run_eagerly": True}])
def test_what_compile_was_told_stays(options):
    with tfamp.scope("measure"):
        model = made(**options)
        fitted(model)
    assert model.steps_per_execution == options.get("steps_per_execution", 1)


@pytest.mark.parametrize("name", ["steps_per_epoch", "validation_steps"])
def test_no_call_goes_beyond_the_steps_that_were_asked_for(name):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(32).repeat()
    steps = {"steps_per_epoch": 800, "validation_steps": 800}  # for 8, 32 and 100
    with tfamp.scope("measure"):
        model = made()
        model.fit(data, validation_data=data, verbose=0, **(steps | {name: 13}))
        assert model.steps_per_execution == 1
        before = int(model.optimizer.iterations)
        assert before == (13 if name == "steps_per_epoch" else 800)
        model.fit(data, validation_data=data, verbose=0, **steps)
    assert model.steps_per_execution > 1
    assert int(model.optimizer.iterations) == before + 800
