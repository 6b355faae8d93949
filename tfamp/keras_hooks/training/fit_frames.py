"""Hooks around training and other runs: the traced step, its function, `fit` itself.

Relies on: `TensorFlowTrainer.make_train_function` making the training function out of
`train_step` by `_make_function`; `fit` and `train_on_batch` of that class running it;
`evaluate` and `predict` being methods of that class too; `_symbolic_build` building
model, losses and optimizer from one batch.
"""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks.backend import TensorFlowTrainer
from tfamp.keras_hooks.patches import Patch, like


def patches(
    around_step: Callable[[keras.Model, Callable[..., Any]], Callable[..., Any]],
    around_function: Callable[[keras.Model, Callable[..., Any]], Callable[..., Any]],
    after_making: Callable[[keras.Model], None],
    around_fit: Callable[[keras.Model, Any], contextlib.AbstractContextManager[Any]],
    around_batch: Callable[[keras.Model], contextlib.AbstractContextManager[Any]],
    around_run: Callable[
        [keras.Model, str, dict[str, Any]], contextlib.AbstractContextManager[Any]
    ],
) -> list[Patch]:
    """Returns the patches on a model's training, evaluation and prediction.

    Args:
        around_step: Takes a model and its `train_step`, returns what is traced.
        around_function: Takes a model and its training function, returns what is
            called.
        after_making: Takes a model whose training function was made just now.
        around_fit: Takes a model and the argument `callbacks` of `fit`; gives a
            context in which it runs, whose value are the callbacks to use.
        around_batch: Takes a model; gives a context for `train_on_batch`.
        around_run: Takes a model, "fit", "evaluate" or "predict", and the arguments
            by name; gives a context around all of it.
    """

    def wrap_make(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def _make_function(self: keras.Model, step_function: Callable[..., Any]) -> Any:
            if step_function != self.train_step:
                return original(self, step_function)
            function = original(self, around_step(self, step_function))
            return around_function(self, function)

        return _make_function

    def wrap_train(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def make_train_function(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
            before = self.train_function
            made = original(self, *args, **kwargs)
            if self.train_function is not before:
                after_making(self)
            return made

        return make_train_function

    def wrap_fit(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @like(original)
        def fit(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(self, *args, **kwargs)
            with (
                around_run(self, "fit", bound.arguments),
                around_fit(self, bound.arguments.get("callbacks")) as callbacks,
            ):
                bound.arguments["callbacks"] = callbacks
                return original(*bound.args, **bound.kwargs)

        return fit

    def wrap_run(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @like(original)
        def run(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(self, *args, **kwargs)
            with around_run(self, original.__name__, bound.arguments):
                return original(*bound.args, **bound.kwargs)

        return run

    def wrap_batch(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def train_on_batch(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
            with around_batch(self):
                return original(self, *args, **kwargs)

        return train_on_batch

    return [
        Patch(TensorFlowTrainer, "_make_function", wrap_make),
        Patch(TensorFlowTrainer, "make_train_function", wrap_train),
        Patch(TensorFlowTrainer, "fit", wrap_fit),
        Patch(TensorFlowTrainer, "evaluate", wrap_run),
        Patch(TensorFlowTrainer, "predict", wrap_run),
        Patch(TensorFlowTrainer, "train_on_batch", wrap_batch),
    ]


def build_from(model: keras.Model, data: Any) -> None:
    """Builds a model, its losses and its optimizer outside the graph being traced.

    Args:
        model: A compiled model.
        data: A batch as `train_step` gets it; only shapes and dtypes count.
    """
    with tf.init_scope():
        model._symbolic_build(data_batch=data)


def batch_size_of(data: Any) -> tf.Tensor | None:
    """Returns the number of examples in a batch, None where it has none."""
    for leaf in tf.nest.flatten(data):
        if tf.is_tensor(leaf) and leaf.shape.rank != 0:
            shape = leaf.dense_shape if hasattr(leaf, "dense_shape") else tf.shape(leaf)
            return tf.cast(shape[0], tf.float32)
    return None
