"""`fit` traces Keras's own training step once, where stock Keras traces it twice."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.arrays import assert_close

X = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")
METRICS = {
    "none": None,
    "names": ["accuracy", "sparse_top_k_categorical_accuracy"],
    "weighted": ["accuracy"],
}


class Adam(keras.optimizers.Adam):
    """Counts how often the step that it is part of is traced."""

    traces = 0

    def apply(self, *args, **kwargs):
        Adam.traces += not tf.executing_eagerly()
        return super().apply(*args, **kwargs)


class OwnStep(keras.Model):
    """Trains a part of its weights, by a step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables[-2:]
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        return {"loss": loss}


def model_of(kind=keras.Model, metrics="names", **options):
    inputs = keras.Input((6,))
    h = keras.layers.Dense(8, activation="relu")(inputs)
    h = keras.layers.BatchNormalization()(h)
    model = kind(inputs, keras.layers.Dense(3)(keras.layers.Dropout(0.3)(h)))
    kind_of_metrics = "weighted_metrics" if metrics == "weighted" else "metrics"
    options[kind_of_metrics] = METRICS[metrics]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(Adam(), loss, **{"jit_compile": False, **options})
    return model


def traces_of(work):
    """Returns how often a step is traced as `work` is done."""
    before = Adam.traces
    work()
    return Adam.traces - before


@pytest.mark.parametrize(
    "policy, metrics",
    [("float32", "none"), ("mixed_bfloat16", "weighted"), ("mixed_float16", "names")],
)
@pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
def test_a_step_is_traced_once_and_stock_traces_it_twice(policy, metrics):
    stock = model_of(metrics=metrics)
    assert traces_of(lambda: stock.fit(X, Y, batch_size=8, verbose=0)) == 2
    with tfamp.scope(policy):
        ours = model_of(metrics=metrics)
        assert traces_of(lambda: ours.fit(X, Y, batch_size=8, verbose=0)) == 1
    names = [metric.name for metric in ours.metrics]
    assert names == [metric.name for metric in stock.metrics]


def test_it_learns_what_stock_learns_to_the_bit():
    results = []
    for policy in (None, "float32"):
        if policy:
            tfamp.enable(policy)
        keras.utils.set_random_seed(3)
        model = model_of()
        history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        tfamp.disable()
        state = [v.numpy() for v in (*model.weights, *model.optimizer.variables)]
        results.append((state, history.history))
    (stock, stock_logs), (ours, our_logs) = results
    assert stock_logs == our_logs
    assert_close(stock, ours)


def test_a_step_of_ones_own_builds_the_optimizer_for_what_it_trains():
    with tfamp.scope("mixed_bfloat16"):
        model = model_of(OwnStep, metrics="none")
        model.fit(X, Y, batch_size=8, verbose=0)
    assert len(model.optimizer._trainable_variables) == 2
