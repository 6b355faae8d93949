"""Training steps whose weights or optimizer state had gone wrong before."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from benchmarks.faults.failure_making import WIDTH, batch, failure, network


def _exploded(optimizer: Callable[[], Any], depth: int = 4) -> Callable[..., Any]:
    """Returns a maker of a model that trained until a step was not finite."""

    def make(rng: np.random.Generator) -> Any:
        model = keras.Sequential(
            [keras.Input((WIDTH,))]
            + [
                layers.Dense(WIDTH, activation="relu", name=f"dense_{i}")
                for i in range(depth)
            ]
            + [layers.Dense(1, name="head")]
        )
        model.compile(optimizer=optimizer(), loss="mse")
        x, y = batch(rng)
        for _ in range(100):
            weights = [variable.numpy() for variable in model.variables]
            if not step(model, (x, y)):
                for variable, value in zip(model.variables, weights, strict=True):
                    variable.assign(value)
                return model, (x, y)
        raise RuntimeError(
            "The weights stayed finite for 100 steps; expected them to explode. Raise "
            "the learning rate of the case."
        )

    return make


def step(model: keras.Model, given: Any) -> bool:
    """Takes one training step, eagerly; returns whether everything stayed finite.

    A step whose gradients are not finite writes nothing, as under a loss scale.
    """
    x, y, *weight = given
    optimizer = model.optimizer
    scale = getattr(optimizer, "scale_loss", lambda loss: loss)
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        loss = model.compute_loss(
            x=x, y=y, y_pred=predicted, sample_weight=weight[0] if weight else None
        )
        scaled = scale(loss)
    variables = model.trainable_variables
    gradients = tape.gradient(scaled, [v.value for v in variables])
    arrays = [
        np.asarray(tf.cast(tf.convert_to_tensor(g), "float32"))
        for g in gradients
        if g is not None
    ]
    if not all(np.isfinite(v).all() for v in [np.asarray(loss), *arrays]):
        return False
    optimizer.apply(gradients, variables)
    return all(np.isfinite(v.numpy()).all() for v in variables)


LEARNING_RATE = (
    failure(
        "learning_rate_sgd",
        "learning rate",
        _exploded(lambda: keras.optimizers.SGD(100.0)),
    ),
    failure(
        "learning_rate_momentum",
        "learning rate",
        _exploded(lambda: keras.optimizers.SGD(30.0, momentum=0.9), depth=8),
    ),
    failure(
        "learning_rate_adam",
        "learning rate",
        _exploded(lambda: keras.optimizers.Adam(1e6)),
    ),
    failure(
        "learning_rate_bfloat16",
        "learning rate",
        _exploded(lambda: keras.optimizers.SGD(100.0)),
        policy="mixed_bfloat16",
    ),
)


def _zero_epsilon(optimizer: Callable[[], Any]) -> Callable[..., Any]:
    """Returns a maker: a gradient that is exactly 0 is divided by a slot of 0."""

    def make(rng: np.random.Generator) -> Any:
        x, y = batch(rng)
        x[:, 0] = 0.0
        return network(optimizer=optimizer()), (x, y)

    return make


def _spoilt_slot(
    optimizer: Callable[[], Any], value: float, layer: str, **options: Any
) -> Callable[..., Any]:
    """Returns a maker: the optimizer's state of one kernel holds one bad number."""

    def make(rng: np.random.Generator) -> Any:
        model = network(optimizer=optimizer(), **options)
        given = batch(rng)
        step(model, given)
        for slot in model.optimizer.variables:
            if f"{layer}_kernel" in slot.path and "momentum" in slot.path:
                spoilt = slot.numpy()
                spoilt[0, 0] = value
                slot.assign(spoilt)
        return model, given

    return make


OPTIMIZER = (
    failure(
        "adam_without_epsilon",
        "optimizer",
        _zero_epsilon(lambda: keras.optimizers.Adam(1e-3, epsilon=0.0)),
        layers=["dense_0a"],
    ),
    failure(
        "rmsprop_without_epsilon",
        "optimizer",
        _zero_epsilon(lambda: keras.optimizers.RMSprop(1e-3, epsilon=0.0)),
        policy="mixed_bfloat16",
        layers=["dense_0a"],
    ),
    failure(
        "nan_in_slot",
        "optimizer",
        _spoilt_slot(lambda: keras.optimizers.Adam(1e-3), np.nan, "dense_1a"),
        layers=["dense_1a"],
    ),
    failure(
        "infinity_in_slot",
        "optimizer",
        _spoilt_slot(
            lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
            np.inf,
            "dense_2b",
            style="sequential",
            depth=15,
        ),
        layers=["dense_2b"],
    ),
)
FAILURES = (*LEARNING_RATE, *OPTIMIZER)
