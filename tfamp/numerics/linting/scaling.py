"""Rules on the loss scale, without which float16's gradients vanish."""

import ast
import inspect
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.managed import resolving
from tfamp.numerics.linting.rule import CannotTellError, Found, rule
from tfamp.numerics.linting.subject import Subject
from tfamp.numerics.tracing import trace_step

_SCALING = ("scale_loss", "get_scaled_loss")
_FLOAT16_SMALLEST = 2.0**-24
_LIBRARIES = ("keras", "tfamp", "tensorflow")


@rule("unscaled-float16", needs=("optimizer",))
def unscaled_float16(subject: Subject) -> Iterator[Found]:
    """Layers in float16 that are trained without a loss scale."""
    layers = subject.in_dtype("float16")
    if not layers or not subject.model.trainable_variables:
        return
    for optimizer in subject.optimizers:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            continue
        if not subject.is_compiled and _would_be_wrapped(subject.model):
            continue
        policy = layers[0].layer.dtype_policy.name
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
            {"policy": policy, "optimizer": optimizer.name},
        )


def _would_be_wrapped(model: keras.Model) -> bool:
    """States whether `compile` would give this model's optimizer a loss scale."""
    lease = resolving.care_lease(model)
    if lease is not None:
        return lease.loss_scale is not None
    return bool(model.dtype_policy.name == "mixed_float16")


@rule("unscaled-train-step", needs=("optimizer",))
def unscaled_train_step(subject: Subject) -> Iterator[Found]:
    """A `train_step` of the user's that forgets the loss scale."""
    model = subject.model
    step = _own_train_step(model)
    if step is None or not subject.in_dtype("float16") or not _is_scaled(subject):
        return  # "unscaled-float16" says it of an optimizer without a scale
    called = _calls_while_traced(subject)
    if called is None:
        called = _names_it(step, type(model))
        evidence = "nothing in its class names"
    else:
        evidence = "its trace never calls"
    if called:
        return
    scale = _present_scale(subject.optimizers)
    yield Found(
        "error",
        f"`{step.__qualname__}` trains float16 layers and {evidence} `scale_loss`: "
        "gradients are divided by a loss scale that the loss was never multiplied "
        f"by, so updates are {scale:,.0f} times too small.",
        "Put `loss = self.optimizer.scale_loss(loss)` before the gradients are "
        "computed; report the unscaled loss.",
        model.name,
        scale,
    )


def _is_scaled(subject: Subject) -> bool:
    """States whether an optimizer divides gradients by a loss scale, or would."""
    optimizers = subject.optimizers
    scaled = (keras.optimizers.LossScaleOptimizer,)
    if any(isinstance(optimizer, scaled) for optimizer in optimizers):
        return True
    return not subject.is_compiled and _would_be_wrapped(subject.model)


def _own_train_step(model: keras.Model) -> Any:
    """Returns the function of a `train_step` that is not Keras's, else None."""
    step = inspect.unwrap(type(model).train_step)
    if "train_step" in vars(model):
        step = vars(model)["train_step"]
    module = getattr(step, "__module__", "") or ""
    return None if module.split(".")[0] in _LIBRARIES else step


def _present_scale(optimizers: tuple[Any, ...]) -> float:
    for optimizer in optimizers:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return float(optimizer.initial_scale)
    return 2.0**15


def _calls_while_traced(subject: Subject) -> bool | None:
    """States whether the traced step scales its loss, None if it cannot be traced."""
    model = subject.model
    if not (subject.is_compiled and model.compiled and subject.batch is not None):
        return None
    if model.run_eagerly:
        return None
    calls: list[str] = []
    dataset = tf.data.Dataset.from_tensors(subject.batch)
    held = []
    try:
        for optimizer in subject.optimizers:
            for name in _SCALING:
                if hasattr(optimizer, name):
                    held.append((optimizer, name, name in vars(optimizer)))
                    _tell(optimizer, name, calls)
        with warnings.catch_warnings():
            # The optimizer warns of the same thing.
            warnings.simplefilter("ignore")
            trace_step(model, dataset, inference=False, compiled=False)
    except Exception:  # the user's own code, which may do anything
        return None
    finally:
        for optimizer, name, was_there in held:
            if not was_there:
                vars(optimizer).pop(name, None)
    return bool(calls)


def _tell(optimizer: Any, name: str, calls: list[str]) -> None:
    """Makes a method of an optimizer note its calls, past Keras's tracking."""
    original = getattr(optimizer, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    vars(optimizer)[name] = noted


def _names_it(step: Any, cls: type) -> bool:
    """States whether the code of a step, or of its class, scales a loss.

    Raises:
        CannotTellError: The source is not there to be read.
    """
    sources = []
    for owner in (step, *cls.__mro__):
        module = getattr(owner, "__module__", "") or ""
        if module.split(".")[0] in (*_LIBRARIES, "builtins"):
            continue
        try:
            sources.append(inspect.getsource(owner))
        except (OSError, TypeError):
            continue
    if not sources:
        raise CannotTellError(
            f"the source of `{step.__qualname__}` cannot be read, and no `data` were "
            "passed to trace it with"
        )
    return any(_scales(source) for source in sources)


def _scales(source: str) -> bool:
    """States whether source code calls for a scaled loss, or Keras's own step."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:  # part of a larger expression
        return any(name in source for name in _SCALING)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _SCALING:
            return True
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "train_step"
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and node.value.func.id == "super"
        ):
            return True
    return False
