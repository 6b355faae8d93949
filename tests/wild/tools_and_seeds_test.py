"""A tool in the middle of a program: model, policy and random numbers stay as found.

A program seeds everything, trains, asks a tool about its model, and goes on. What it
draws afterwards is what it draws where the line with the tool is left out.
"""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

X = np.random.default_rng(0).normal(size=(512, 12)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")
ONES = np.ones((1, 64))
SEED = 0  # what most programs take, and tools that seed by themselves too


@keras.saving.register_keras_serializable("tools_and_seeds")
class Jitter(keras.layers.Layer):
    """Noise from every generator that a layer may reach for; counts its calls."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.own = {"num_calls": tf.Variable(0)}  # Keras knows nothing of it
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x, training=False):
        self.own["num_calls"].assign_add(1)
        if not training:
            return x
        x = x + 0.01 * self.generator.normal(tf.shape(x), dtype=x.dtype)
        x = x + 0.01 * keras.random.normal(keras.ops.shape(x), dtype=x.dtype)
        x = x + 0.01 * tf.random.normal(tf.shape(x), dtype=x.dtype)
        return x * (1 + 0.01 * random.random()) * (1 + 0.01 * float(np.random.rand()))


def build(own_seed=None):
    if own_seed is not None:
        keras.utils.set_random_seed(own_seed)
    hidden = keras.layers.Dense(8, activation="relu")
    norm, drop = keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)
    head = keras.layers.Dense(1, activation="sigmoid")
    layers = [keras.Input((12,)), Jitter(), hidden, norm, drop, head]
    model = keras.Sequential(layers)
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return model


def drawn():
    """Returns the next number of each generator of the program."""
    kernel = keras.layers.Dense(2)
    kernel.build((None, 3))
    return {
        "python": random.random(),
        "numpy": float(np.random.rand()),
        "tensorflow": float(tf.random.uniform([])),
        "tensorflow's generator": float(tf.random.get_global_generator().uniform([])),
        "keras": float(keras.random.uniform([])),
        "weights": float(np.asarray(kernel.kernel)[0, 0]),
        "shuffle": int(next(iter(tf.data.Dataset.range(1000).shuffle(1000)))),
        "dropout": float(keras.layers.Dropout(0.5)(ONES, training=True)[0, 3]),
    }


def state_of(model):
    parts = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    (jitter,) = [layer for layer in model.layers if isinstance(layer, Jitter)]
    parts += [jitter.own["num_calls"], jitter.generator.state]
    return [np.array(part) for part in parts]


def dtypes_of(model):
    names = [layer.dtype_policy.name for layer in model.layers]
    return (
        names,
        type(model.optimizer),
        model.jit_compile,
        keras.config.dtype_policy().name,
    )


def program(tool):
    """Trains, asks the tool, and returns what the program draws and has afterwards."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(SEED)
    tf.random.set_global_generator(tf.random.Generator.from_seed(SEED))
    model = build()
    model.fit(X[:64], Y[:64], verbose=0)
    # Generators stand somewhere in the middle, as those of a program do.
    drawn()
    dtypes = dtypes_of(model)
    tool(model)
    after = drawn()
    assert dtypes_of(model) == dtypes
    return after, state_of(model)


# Made before anything is seeded: a shuffle draws its seed where it is made.
BATCHES = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(512).batch(32)


def measured(subject):
    how = {"policies": ["float32", "mixed_bfloat16"], "jit_compile": False}
    return tfamp.measure_policies(subject, (X, Y), budget_seconds=2.0, **how)


def tuned(subject, **how):
    how |= {"policy": "mixed_bfloat16", "max_evaluations": 2}
    return tfamp.tune(subject, (X, Y), **how)


QUICK = {
    "lint": lambda model: tfamp.lint(model, data=(X, Y)),
    "check": lambda model: tfamp.check(model, (X, Y), policy="mixed_float16"),
    "check in float32": lambda model: tfamp.check(model, (X, Y), policy="float32"),
    "ranges": lambda model: tfamp.ranges(model, BATCHES),
    "sensitivity": lambda model: tfamp.sensitivity(model, (X, Y), num_batches=1),
    "prove": lambda model: tfamp.prove(model, (X, Y)),
    "triage": lambda model: tfamp.triage(model, (X[:32], Y[:32])),
    "lr_find": lambda model: tfamp.training.lr_find(model, BATCHES, num_steps=20),
    "estimate_memory": lambda model: tfamp.estimate_memory(model, 32, data=(X, Y)),
    "bottleneck": lambda model: tfamp.data.bottleneck(model, BATCHES, seconds=0.3),
    "freeze": tfamp.freeze,
    "latency_check": lambda model: tfamp.latency_check(model, X[:1], seconds=0.2),
    "measure_policies": measured,
    "measure_policies of a function that seeds": lambda model: measured(
        lambda: build(SEED)
    ),
    "tune": lambda model: tuned(model, tolerance=0.1),
    "tune of a function": lambda model: tuned(build, tolerance=0.9, num_steps=1),
}


@pytest.fixture(scope="module")
def without():
    # Numbers of a program without any tool.
    return program(lambda model: None)


@pytest.fixture(autouse=True)
def generators_of_the_suite():
    held = random.getstate(), np.random.get_state()
    yield
    random.setstate(held[0])
    np.random.set_state(held[1])


@pytest.mark.quick("lint", "check", "ranges")
@pytest.mark.filterwarnings("ignore:.*retracing.*")
@pytest.mark.parametrize("name", QUICK)
def test_a_program_draws_the_same_with_a_tool_and_without(name, without):
    draws, state = program(QUICK[name])
    assert draws == without[0]
    assert len(state) == len(without[1])
    for before, after in zip(without[1], state, strict=True):
        np.testing.assert_array_equal(before, after)
