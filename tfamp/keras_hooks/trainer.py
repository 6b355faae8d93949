"""Hooks on `compile`, `fit` and other runs of a model, and what a trainer keeps.

Relies on: `Trainer.compile` being what every model's `compile` ends in, and
`_compile_config` being what is saved; `TensorFlowTrainer.make_train_function` making
the training and the test function out of a step by `_make_function`, and
`make_predict_function` asking the model for its `predict_step` in a trace; `fit`,
`train_on_batch`, `evaluate` and `predict` being methods of that class, and `fit`
calling what its decorator wraps by way of a closure, and `evaluate`; `train_function`,
`test_function` and `predict_function` being rebuilt where they are None;
`_symbolic_build` building model, losses, metrics and optimizer from one batch;
`_loss_tracker` being the mean of the losses.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import around_training, backend, workers, xla_replicas
from tfamp.keras_hooks.backend import SharedTrainer, TensorFlowTrainer
from tfamp.keras_hooks.layers import CALLS, policy_of
from tfamp.keras_hooks.optimizers import optimizers_of
from tfamp.keras_hooks.patches import (
    Function,
    InnerPatch,
    Patch,
    like,
    replaced,
    wrapper,
)
from tfamp.keras_hooks.structure import graph_of

Around = Callable[[keras.Model, Callable[..., Any]], Callable[..., Any]]


def run_patches(
    around_step: Around,
    around_function: Around,
    around_run: Callable[
        [keras.Model, str, dict[str, Any]], contextlib.AbstractContextManager[Any]
    ],
) -> list[Patch]:
    """Returns the patches on a model's training, evaluation and prediction.

    `around_step` takes a model and its `train_step`, and returns what is traced;
    `around_function` takes a model and its training function, and gives what is called.
    `around_run` takes a model, "fit", "train_on_batch", "evaluate" or "predict", and
    the arguments by name, which it may change; it gives a context around the call.
    """

    @wrapper
    def wrap_make(original: Function, self: keras.Model, step: Function) -> Any:
        is_training, own = step == self.train_step, {}
        is_stock = type(self).test_step is TensorFlowTrainer.test_step
        if not is_stock and step == self.test_step:
            step = _evaluating(self, step)
        if xla_replicas.parts_compiled(self):
            optimizers = optimizers_of(self) if is_training else []
            step = xla_replicas.compiled(self, step, optimizers)
            own["_jit_compile"] = False
        with replaced(self, **own):
            function = original(self, around_step(self, step) if is_training else step)
        if is_training:
            function = workers.one_by_one(self, _built_ahead(self, function))
            return around_training.surrounded(self, around_function(self, function))
        return workers.one_by_one(self, function)

    @wrapper
    def wrap_make_predict(
        original: Function, self: Any, *args: Any, **kwargs: Any
    ) -> Any:
        is_stock = type(self).predict_step is TensorFlowTrainer.predict_step
        return original(self if is_stock else _Predicting(self), *args, **kwargs)

    def wrap_run(original: Function) -> Function:
        name, signature = original.__name__, inspect.signature(original)

        @like(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            model, own = bound.args[0], {}
            if name == "predict" and xla_replicas.parts_compiled(model):
                # TensorFlow 2.19 compiles one function for all replicas, and fails.
                own["_jit_compile"] = False
            with around_run(model, name, bound.arguments), replaced(model, **own):
                return original(*bound.args, **bound.kwargs)

        return run

    return [
        Patch(TensorFlowTrainer, "_make_function", wrap_make),
        Patch(TensorFlowTrainer, "make_predict_function", wrap_make_predict),
        # It is looked up ahead of callbacks that are made inside the call.
        InnerPatch(TensorFlowTrainer, "fit", wrap_run),
        Patch(TensorFlowTrainer, "train_on_batch", wrap_run),
        Patch(TensorFlowTrainer, "evaluate", wrap_run),
        Patch(TensorFlowTrainer, "predict", wrap_run),
    ]


def compile_patches(
    before_compile: Callable[[keras.Model, dict[str, Any]], None],
) -> list[Patch]:
    """Returns the patch on `compile`.

    `before_compile` gets the model and all arguments by name, which it may change.
    """

    def wrap(original: Function) -> Function:
        signature = inspect.signature(original)

        @like(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            before_compile(bound.args[0], bound.arguments)
            return original(*bound.args, **bound.kwargs)

        return compile

    return [Patch(SharedTrainer, "compile", wrap)]


def build_from(model: keras.Model, data: Any) -> None:
    """Builds a model, its losses and its optimizer outside the graph being traced.

    Of `data`, a batch as `train_step` gets it, only shapes and dtypes count. The inputs
    of a Sequential model, and so of a SavedModel, get the names that the first step
    would have given. Metrics follow what they are first given, which a step of the
    user's own decides, so there it makes them.
    """
    is_own = type(model).train_step is not TensorFlowTrainer.train_step
    left = ("_compile_metrics", "_compile_loss", "optimizer") if is_own else ()
    with tf.init_scope():
        if isinstance(model, keras.Sequential) and not model.built:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            if hasattr(x, "shape"):
                model.build(x.shape)
        with contextlib.ExitStack() as stack:
            if model.built:  # else what is made now has to have a number
                stack.enter_context(backend.numbers_of_tensors_kept())
            stack.enter_context(replaced(model, **dict.fromkeys(left)))
            model._symbolic_build(data_batch=data)


def call_ahead(model: keras.Model, data: Any, look: Callable[..., Any]) -> None:
    """Hands a model to `look`, with the arguments of its first step's call.

    Only a model with a `call` of its own, which no graph tells of.
    """
    if type(model).call is not keras.Model.call and graph_of(model) is None:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        look(model, (x,), {"training": True} if model._call_has_training_arg else {})


def build_metrics(model: keras.Model, data: Any) -> None:
    """Makes the metrics and losses that `compile` was told of, where data is at hand.

    A first trace would make them, and TensorFlow traces a function that makes variables
    a second time. Methods of the user's own may need others, and are left alone.
    """
    kind, names = type(model), ("compute_metrics", "compute_loss")
    is_stock = all(getattr(kind, n) is getattr(SharedTrainer, n) for n in names)
    if model.built and is_stock:
        # The first step says what is wrong.
        with contextlib.suppress(Exception), model.distribute_strategy.scope():
            build_from(model, data)


def _evaluating(model: keras.Model, step: Function) -> Function:
    """Returns a step whose own code is given the dtypes that a `train_step` is."""

    @functools.wraps(step)
    def evaluate(data: Any) -> Any:
        with replaced(CALLS, is_evaluating=policy_of(model) is not None):
            return step(data)

    return evaluate


class _Predicting:
    """A model whose `predict_step` is given the dtypes that a `train_step` is."""

    def __init__(self, model: keras.Model) -> None:
        vars(self)["_model"] = model

    def __getattr__(self, name: str) -> Any:
        value = getattr(vars(self)["_model"], name)
        return _evaluating(self._model, value) if name == "predict_step" else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)


def _built_ahead(model: keras.Model, function: Function) -> Function:
    """Returns a training function that builds optimizer and metrics before its trace.

    Stock Keras makes them inside of it, and so traces the step a second time. A step of
    the user's own may train other variables, and is left to build what it uses.
    """
    is_own = type(model).train_step is not TensorFlowTrainer.train_step
    if is_own or model.run_eagerly or policy_of(model) is None or not graph_of(model):
        return function
    is_first = True

    @functools.wraps(function)
    def call(iterator: Any) -> Any:
        nonlocal is_first
        spec = getattr(iterator, "element_spec", None)
        is_spread = isinstance(iterator, tf.distribute.DistributedIterator)
        if is_first and spec is not None and not is_spread:
            build_metrics(model, spec)
        is_first = False
        return function(iterator)

    return call


def examples_recorded(model: keras.Model) -> float | None:
    """Returns the examples whose loss was added since the metrics were reset.

    Those of all workers, which count alike; None where the model's own code keeps
    losses, and nobody can tell.
    """
    tracker, strategy = getattr(model, "_loss_tracker", None), model.distribute_strategy
    if tracker is None:
        return None
    parts = strategy.experimental_local_results(tracker.count.value)
    return sum(map(float, parts)) * strategy.num_replicas_in_sync / len(parts)


def drop_traced_functions(
    model: keras.layers.Layer, *, but_training: bool = False
) -> None:
    """Makes `model` trace anew at its next fit, evaluate and predict, in its dtypes.

    `but_training` leaves the function of a `fit` that runs.
    """
    if isinstance(model, SharedTrainer):
        model.test_function = model.predict_function = None
        if not but_training:
            model.train_function = None


def is_compiled(model: keras.layers.Layer) -> bool:
    """Returns whether `compile` has been called on `model`."""
    return isinstance(model, SharedTrainer) and bool(model.compiled)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns what a model's `compile` was called with; nothing if it was not."""
    config = getattr(model, "_compile_config", None)
    return dict(config.config) if model.compiled and config is not None else {}


@contextlib.contextmanager
def compiled_as(model: keras.Model, **arguments: Any) -> Iterator[None]:
    """Compiles a model for as long as it lasts; afterwards it is as it was."""
    before = dict(vars(model))
    try:
        model.compile(**arguments)
        yield
    finally:
        # Past `__setattr__`, which would track what comes back as if it were new.
        vars(model).clear()
        vars(model).update(before)


def set_jit_compile(model: keras.Model, is_compiled: bool) -> None:
    """Has a compiled model run under XLA or not, in what it saves too."""
    model.jit_compile = is_compiled
    config = getattr(model, "_compile_config", None)
    if config is not None and "jit_compile" in config.config:
        config.config["jit_compile"] = is_compiled
    drop_traced_functions(model)


def replace_optimizer(model: keras.Model, optimizer: Any) -> None:
    """Gives a compiled `model` another optimizer, in what it saves too."""
    model.optimizer = optimizer
    config = getattr(model, "_compile_config", None)
    if config is not None:
        fresh = type(config)(optimizer=optimizer)
        config.config["optimizer"] = fresh.config["optimizer"]


def forget_training(model: keras.Model) -> None:
    """Takes from `model` what `compile` gave it, and freezes its weights."""
    model.trainable, model.compiled = False, False
    model.optimizer = model._compile_config = None
