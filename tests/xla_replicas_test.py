"""`jit_compile=True` on several replicas: XLA computes, the step stays what it is."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.replicas import two_replicas

layers = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_.*float16' will be slow")
X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


def made(cls=keras.Model, *, jit_compile, policy="float32", **options):
    keras.utils.set_random_seed(1)
    with two_replicas().scope(), tfamp.scope(policy):
        inputs = keras.Input((8,))
        h = layers.Dense(16, activation="gelu")(inputs)
        h = layers.BatchNormalization()(h)
        model = cls(inputs, layers.Dense(2)(h))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            keras.optimizers.Adam(0.01),
            loss,
            metrics=["accuracy"],
            jit_compile=jit_compile,
            **options,
        )
    return model


def fitted(model, x=X, **options):
    return model.fit(
        x, Y, batch_size=16, epochs=3, shuffle=False, verbose=0, **options
    ).history


@pytest.mark.parametrize(
    "policy, options",
    [
        ("float32", {}),
        ("mixed_bfloat16", {}),
        ("mixed_float16", {}),
        ("float32", {"steps_per_execution": 2}),
    ],
    ids=["float32", "bfloat16", "float16", "two steps a call"],
)
@pytest.mark.parametrize("cls", [keras.Model, OwnStep], ids=["stock", "own step"])
@pytest.mark.quick("stock-float32", "own step-float16")
def test_training_is_what_it_is_without_xla(cls, policy, options):
    models = [
        made(cls, jit_compile=jit, policy=policy, **options) for jit in (False, True)
    ]
    expected, found = (fitted(model) for model in models)
    rtol = 1e-5 if policy == "float32" else 5e-3
    assert set(found) == set(expected)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=rtol, atol=rtol)
    for one, other in zip(*(m.get_weights() for m in models), strict=True):
        np.testing.assert_allclose(one, other, rtol=10 * rtol, atol=10 * rtol)
    assert models[1].optimizer.iterations.numpy() == 12


def compiled_functions(model):
    """How many functions XLA compiles inside a training step that was traced."""
    data = tf.data.Dataset.from_tensors((X[:16], Y[:16]))
    model.make_train_function()
    distributed = model.distribute_strategy.experimental_distribute_dataset(data)
    batch = next(iter(distributed))
    function = tf.function(lambda: model.train_function([batch]), autograph=False)
    graph = function.get_concrete_function().graph.as_graph_def()
    return sum(each.attr["_XlaMustCompile"].b for each in graph.library.function)


def test_xla_compiles_what_each_replica_computes():
    model = made(jit_compile=True)
    fitted(model)
    assert compiled_functions(model) == 2
    model = made(jit_compile=False)
    fitted(model)
    assert compiled_functions(model) == 0


def test_a_bad_step_on_one_replica_is_skipped_on_both():
    x = X.copy()
    x[17:18] = np.inf  # in the second batch, for the first replica
    model = made(jit_compile=True, policy="mixed_float16")
    fitted(model, x)
    assert int(model.optimizer.skipped_steps) == 3  # once an epoch
    assert int(model.optimizer.applied_steps) == 9
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


class Twice(OwnStep):
    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


def test_a_step_with_two_updates_is_left_to_tensorflow(caplog):
    expected = fitted(made(Twice, jit_compile=False))["loss"]
    found = fitted(made(Twice, jit_compile=True))["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert "updates weights 2 times" in caplog.text


def test_evaluation_and_prediction_run_under_it_as_well():
    found = []
    for jit in (False, True):
        model = made(jit_compile=jit)
        history = fitted(model, validation_data=(X[:40], Y[:40]))
        evaluated = model.evaluate(X, Y, batch_size=16, verbose=0)
        found.append([*history["val_loss"], *history["val_accuracy"], *evaluated])
        found[-1] += model.predict(X, batch_size=16, verbose=0).ravel().tolist()
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)
