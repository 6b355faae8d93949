"""Rules on the loss scale, without which float16's gradients vanish."""

import ast
import contextlib
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.dtypes import resolution
from tfamp.keras_hooks.patches import replaced
from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.numerics.lint.subject import CannotTellError, Found, Subject, rule
from tfamp.stepping.step_traces import trace_step

_SCALING = ("scale_loss", "get_scaled_loss")
_APPLYING = ("apply", "apply_gradients")
_FLOAT16_SMALLEST = 2.0**-24
# What Keras's loss scale begins with.
_USUAL_SCALE = 2.0**15
_LIBRARIES = ("keras", "tfamp", "tensorflow")


@rule("unscaled-float16", needs=("optimizer",))
def unscaled_float16(subject: Subject) -> Iterator[Found]:
    """Layers in float16 that are trained without a loss scale."""
    layers = subject.in_dtype("float16")
    if not layers or not subject.model.trainable_variables:
        return
    for optimizer in subject.optimizers:
        is_wrapped = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if is_wrapped or _would_be_wrapped(subject, optimizer):
            continue
        yield Found(
            "error",
            f"{len(layers)} layers compute in float16, but the optimizer "
            f"{optimizer.name!r} scales no loss: gradients below "
            f"{_FLOAT16_SMALLEST / 2:.1e} are 0. Keras's `compile` adds a loss scale "
            "only to a model whose own policy is named 'mixed_float16'.",
            f"Pass `tfamp.LossScaleOptimizer(keras.optimizers."
            f"{type(optimizer).__name__}(...))`, or build the model under "
            "`tfamp.enable('mixed_float16')`.",
            layers[0].path,
            len(layers),
            {
                "policy": layers[0].layer.dtype_policy.name,
                "optimizer": optimizer.name,
            },
        )


def _would_be_wrapped(subject: Subject, optimizer: Any) -> bool:
    """States whether an optimizer would get a loss scale before a model is trained."""
    model = subject.model
    settings = resolution.settings_of(model)
    if settings is None:
        return not subject.is_compiled and model.dtype_policy.name == "mixed_float16"
    # That of `compile` as it is compiled, others as the training begins.
    is_open = not subject.is_compiled or optimizer is not model.optimizer
    return settings.loss_scale is not None and is_open


@rule("unscaled-train-step", needs=("optimizer",))
def unscaled_train_step(subject: Subject) -> Iterator[Found]:
    """A `train_step` that forgets the loss scale of Keras's own wrapper.

    `tfamp.LossScaleOptimizer` needs none: its gradients are scaled in the tape.
    """
    model, dividing = subject.model, _dividing(subject)
    step = vars(model).get("train_step", inspect.unwrap(type(model).train_step))
    is_managed = resolution.settings_of(model) is not None
    is_mixed = model.dtype_policy.name == "mixed_float16"
    # What `compile` would wrap.
    is_open = is_mixed and not (subject.is_compiled or is_managed)
    if _is_of_a_library(step) or not (dividing or is_open):
        return  # "unscaled-float16" says it of an optimizer without a scale
    called = _scales_while_traced(subject)
    evidence = "the trace never calls"
    if called is None:
        if len(dividing) < len(subject.optimizers) and subject.is_compiled:
            raise CannotTellError(
                "not every optimizer scales the loss, and the step cannot be traced to "
                "see which one it uses"
            )
        called = _names_it(step, type(model))
        evidence = "the code never names"
    if called:
        return
    scale = float(dividing[0].initial_scale) if dividing else _USUAL_SCALE
    yield Found(
        "error",
        f"Of `{step.__qualname__}` {evidence} `scale_loss`: the optimizer divides "
        "gradients by a loss scale that the loss was never multiplied by, so updates "
        f"are {scale:,.0f} times too small.",
        "Put `loss = self.optimizer.scale_loss(loss)` before the gradients are "
        "computed and report the unscaled loss, or build the model under "
        "`tfamp.enable('mixed_float16')`, where the tape scales.",
        model.name,
        scale,
    )


def _dividing(subject: Subject) -> list[Any]:
    """Returns the optimizers that divide gradients by a loss scale."""
    return [
        each
        for each in subject.optimizers
        if isinstance(each, keras.optimizers.LossScaleOptimizer)
        and not isinstance(each, LossScaleOptimizer)
    ]


def _is_of_a_library(owner: Any) -> bool:
    module = getattr(owner, "__module__", "") or ""
    return module.split(".")[0] in (*_LIBRARIES, "builtins")


def _scales_while_traced(subject: Subject) -> bool | None:
    """States whether the traced step scales its loss, None if it cannot be traced.

    It does if each optimizer that divides by a scale, and is used, is asked for it.
    """
    model = subject.model
    if not (subject.is_compiled and model.compiled and subject.batch is not None):
        return None
    if model.run_eagerly:
        return None
    dataset = tf.data.Dataset.from_tensors(subject.batch)
    scaled, applied = set[int](), set[int]()
    try:
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            # The optimizer warns of the same thing.
            warnings.simplefilter("ignore")
            for optimizer in _dividing(subject):
                for names, called in ((_SCALING, scaled), (_APPLYING, applied)):
                    methods = {
                        name: _noting(optimizer, name, called)
                        for name in names
                        if hasattr(optimizer, name)
                    }
                    stack.enter_context(replaced(optimizer, **methods))
            trace_step(model, dataset, training=True)
    except Exception:  # the user's own code, which may do anything
        return None
    return applied <= scaled


def _noting(optimizer: Any, name: str, called: set[int]) -> Callable[..., Any]:
    """Returns a method of an optimizer that notes the optimizer when it is called."""
    original = getattr(optimizer, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        called.add(id(optimizer))
        return original(*args, **kwargs)

    return method


def _names_it(step: Any, cls: type) -> bool:
    """States whether the code of a step, or of its class, scales a loss."""
    sources = []
    for owner in (step, *cls.__mro__):
        if not _is_of_a_library(owner):
            with contextlib.suppress(OSError, TypeError):
                sources.append(inspect.getsource(owner))
    if not sources:
        raise CannotTellError(
            f"the source of `{step.__qualname__}` cannot be read, and no `data` were "
            "passed to trace it with"
        )
    return any(_scales(source) for source in sources)


def _scales(source: str) -> bool:
    """States whether source code asks for a scaled loss, or calls the step of Keras."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:  # part of a larger expression
        return any(name in source for name in _SCALING)
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    if any(node.attr in _SCALING for node in attributes):
        return True
    calls = [n.value for n in attributes if n.attr == "train_step"]
    return any(
        isinstance(c, ast.Call) and ast.unparse(c.func) == "super" for c in calls
    )
