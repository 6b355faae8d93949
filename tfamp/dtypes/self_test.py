"""Asks a Keras that nobody has tested whether the hooks do there what they promise.

A hook that Keras no longer passes through fails without an error: softmax is rounded
again, a head is in half precision. A model of five layers shows whether it does.
"""

import itertools
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from tfamp.dtypes.in_force import IN_FORCE
from tfamp.dtypes.settings import PolicySettings, make_settings
from tfamp.keras_hooks.layers import Kind, policy_of
from tfamp.keras_hooks.patches import HookError
from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.records import versions
from tfamp.records.checks import first_line

_POLICY = "mixed_float16"
_INPUTS = np.linspace(-6.0, 6.0, 32, dtype="float32").reshape(2, 16)
# Operations of TensorFlow that `keras.ops.softmax` and its like end in.
_SOFTMAXES = ("Softmax", "LogSoftmax", "Sigmoid")
_FEATURES = _INPUTS[:, :4] * 0.1


class SelfTest:
    """The test and whether it is due in this process, on a `version` of Keras."""

    def __init__(self, version: str | None = None) -> None:
        self._version = keras.__version__ if version is None else version
        self._lock = threading.RLock()
        self.is_due = self._version not in versions.TESTED_KERAS and not os.environ.get(
            versions.UNTESTED_KERAS
        )

    def run_if_started(self, settings: PolicySettings) -> None:
        """Runs the test where it is due, once TensorFlow has started.

        To start it here would fix devices, memory limits and clusters, which users set
        after `enable`; the first call of a layer starts it anyway.
        """
        if self.is_due and settings.is_half and context.context()._initialized:
            self.run()

    def run(self) -> None:
        """Runs the test where it is due; raises HookError where a promise is not kept.

        It runs in a thread of its own, which has its own automatic names, seeds,
        policy, strategy and graph in Keras and TensorFlow, and draws no random number.
        """
        with self._lock:
            if not self.is_due:
                return
            # The test calls layers, which asks for it again.
            self.is_due = False
            found: list[str] = []
            errors: list[BaseException] = []
            thread = threading.Thread(target=self._look, args=(found, errors))
            thread.start()
            thread.join()
            if not found and not errors:
                return
            self.is_due = True
        if found:
            point = found[0]
        else:
            line = first_line(errors[0]).rstrip(".")
            point = f"a small model raises {type(errors[0]).__name__}: {line}"
        tested = versions.TESTED_KERAS
        raise HookError(
            f"Found Keras {self._version}, on which {point}. tfamp was tested with "
            f"Keras {', '.join(tested)}: `pip install keras=={tested[-1]}`. To go on "
            f"with this version all the same, set {versions.UNTESTED_KERAS}=1 in the "
            "environment."
        ) from (errors[0] if errors else None)

    def _look(self, found: list[str], errors: list[BaseException]) -> None:
        try:
            settings = make_settings(_POLICY)
            with IN_FORCE.block(settings=settings, loaded=None), tf.device("CPU:0"):
                found += itertools.islice(_broken(), 1)
        except BaseException as error:
            errors.append(error)


def _broken() -> Iterator[str]:
    """Yields what is not as promised, in words."""
    yield from _broken_layers()
    model = _model()
    yield from _broken_model(model)
    yield from _broken_step(model)


def _broken_layers() -> Iterator[str]:
    dense = keras.layers.Dense(4, kernel_initializer="zeros", name="tfamp_dense")
    policy = policy_of(dense)
    if (
        policy is None
        or policy.kind is Kind.EXPLICIT
        or dense.compute_dtype != "float16"
    ):
        yield "a layer made without a dtype is not managed"
    if "tfamp_inherited" not in str(dense.get_config().get("dtype")):
        yield "a layer's configuration does not tell that its dtype was inherited"
    norm = keras.layers.LayerNormalization(name="tfamp_norm")
    normed = norm(_INPUTS * 1e5)  # beyond float16
    if norm.compute_dtype != "float32" or not np.isfinite(normed).all():
        yield "LayerNormalization does not compute in float32"
    if normed.dtype != "float16":
        yield "the output of LayerNormalization is not cast to float16"
    half = tf.cast(_INPUTS, "float16")
    for name in ("softmax", "log_softmax", "sigmoid"):
        operation = getattr(keras.ops, name)
        ways = {
            f"`keras.ops.{name}` in a layer": _Calls(operation),
            f"the activation {name!r}": keras.layers.Activation(name, name="tfamp_act"),
        }
        exact = tf.cast(getattr(tf.nn, name)(tf.cast(half, "float32")), "float16")
        for way, layer in ways.items():
            if not np.array_equal(layer(half), exact) or _is_half(layer, half):
                yield f"{way} is not computed in float32"


def _is_half(layer: keras.layers.Layer, x: tf.Tensor) -> bool:
    """Whether a layer's softmax or sigmoid takes half precision in a graph.

    Its numbers do not tell on every processor: some compute these in float32 inside.
    """
    graph = tf.function(layer, autograph=False).get_concrete_function(x).graph
    return any(
        operation.type in _SOFTMAXES and operation.inputs[0].dtype == x.dtype
        for operation in graph.get_operations()
    )


class _Calls(keras.layers.Layer):
    """A layer whose call is one operation."""

    def __init__(self, operation: Callable[[Any], Any]) -> None:
        super().__init__(name="tfamp_operation")
        self._operation = operation

    def call(self, x: Any) -> Any:
        """Returns what the operation gives."""
        return self._operation(x)


def _model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,), name="tfamp_input"),
            layers.Dense(4, kernel_initializer="ones", name="tfamp_dense"),
            layers.BatchNormalization(name="tfamp_norm"),
            layers.Dense(
                3,
                kernel_initializer="ones",
                activation="softmax",
                name="tfamp_head",
            ),
        ],
        name="tfamp_self_test",
    )


def _broken_model(model: keras.Model) -> Iterator[str]:
    copied = pickle.loads(pickle.dumps(model))
    head = policy_of(copied.layers[-1])
    if head is None or head.kind is not Kind.HEAD:
        yield "a saved model does not hold what its layers compute in"
    for each in (model, copied):
        if each(_FEATURES).dtype != "float32":
            yield "the output of a model is not float32"


def _broken_step(model: keras.Model) -> Iterator[str]:
    sgd = keras.optimizers.SGD(0.1, name="tfamp_sgd")
    model.compile(sgd, "sparse_categorical_crossentropy", run_eagerly=True)
    if not isinstance(model.optimizer, LossScaleOptimizer):
        yield "`compile` does not give the optimizer a loss scale"
        return
    labels = np.array([0, 1])
    start = model.get_weights()
    model.train_on_batch(_FEATURES, labels)
    before = model.get_weights()
    if all(map(np.array_equal, start, before)):
        yield "a training step changes no weight"
    model.train_on_batch(_FEATURES * np.nan, labels)
    if not all(map(np.array_equal, before, model.get_weights())):
        yield "a training step with a bad batch changes the model"
