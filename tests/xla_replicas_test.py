"""`jit_compile=True` on several replicas: XLA computes, the step stays what it is."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import TrueStep
from tests.replicas import two_replicas

layers = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_.*float16' will be slow")
X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")


class Twice(TrueStep):
    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


def made(cls=keras.Model, *, jit_compile, policy="float32", **options):
    keras.utils.set_random_seed(1)
    with two_replicas().scope(), tfamp.scope(policy):
        inputs = keras.Input((8,))
        h = layers.Dense(16, activation="gelu")(inputs)
        h = layers.BatchNormalization()(h)
        model = cls(inputs, layers.Dense(2)(h))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        adam, metrics = keras.optimizers.Adam(0.01), ["accuracy"]
        model.compile(adam, loss, metrics=metrics, jit_compile=jit_compile, **options)
    return model


def fitted(model, x=X, **options):
    return model.fit(
        x, Y, batch_size=16, epochs=2, shuffle=False, verbose=0, **options
    ).history


def compiled_functions(model):
    """How many functions XLA compiles inside a training step that was traced."""
    data = tf.data.Dataset.from_tensors((X[:16], Y[:16]))
    distributed = model.distribute_strategy.experimental_distribute_dataset(data)
    batch = next(iter(distributed))
    function = tf.function(lambda: model.train_function([batch]), autograph=False)
    graph = function.get_concrete_function().graph.as_graph_def()
    return sum(each.attr["_XlaMustCompile"].b for each in graph.library.function)


WAYS = {
    "stock": (keras.Model, "float32", {}),
    "bfloat16": (keras.Model, "mixed_bfloat16", {}),
    "two steps a call": (keras.Model, "float32", {"steps_per_execution": 2}),
    "own step": (TrueStep, "mixed_float16", {}),
    "two updates a step": (Twice, "float32", {}),
}


@pytest.mark.parametrize("cls, policy, options", WAYS.values(), ids=WAYS)
@pytest.mark.quick("own step")
def test_training_is_what_it_is_without_xla(cls, policy, options, caplog):
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
    # What XLA cannot be given is left to TensorFlow, and told.
    assert ("updates weights 2 times" in caplog.text) == (cls is Twice)


def test_xla_compiles_what_each_replica_computes_and_a_bad_step_is_skipped_on_both():
    x = X.copy()
    x[17:18] = np.inf  # in the second batch, for the first replica
    model = made(jit_compile=True, policy="mixed_float16")
    fitted(model, x)
    assert compiled_functions(model) == 2
    assert int(model.optimizer.skipped_steps) == 2  # once an epoch
    assert int(model.optimizer.applied_steps) == 2
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
