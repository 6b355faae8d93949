"""Runs a model's own train step eagerly, and sees what goes through its layers.

Inside a block each layer's `call` and each operation of a Functional graph is replaced
on the instance, so it does not matter how a model is written or called.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from tfamp.keras_hooks import optimizers, structure
from tfamp.keras_hooks.optimizers import optimizers_of
from tfamp.keras_hooks.patches import like, replaced
from tfamp.loss_scale.tape import scaled_by, scaled_by_hand
from tfamp.stepping import ALONE

_LOGITS = "_keras_logits"


class Step(NamedTuple):
    """What a train step came to, with the loss scale divided out, in float32.

    `loss` is None where none was scaled; `gradients` are variable and gradient, or
    None, of everything that an optimizer would have updated.
    """

    loss: tf.Tensor | None
    gradients: tuple[tuple[Any, tf.Tensor | None], ...]

    @property
    def is_finite(self) -> bool:
        """Whether the loss and every gradient are finite."""
        values = [self.loss, *(gradient for _, gradient in self.gradients)]
        known = (value for value in values if value is not None)
        return all(bool(tf.reduce_all(tf.math.is_finite(value))) for value in known)


def run_step(model: keras.Model, batch: Any, *, loss_scale: float = 1.0) -> Step:
    """Runs `model.train_step` eagerly, inside `unchanged`; nothing is updated."""
    with ALONE, contextlib.ExitStack() as stack:
        before = tf.config.functions_run_eagerly()
        stack.enter_context(scaled_by(loss_scale))
        taken = _Taken(loss_scale)
        # Functions that a user compiled run eagerly too.
        stack.callback(tf.config.run_functions_eagerly, before)
        tf.config.run_functions_eagerly(True)
        for optimizer in optimizers_of(model):
            stack.enter_context(taken.instead_of(optimizer))
        model.train_step(batch)
    return Step(taken.loss, tuple(taken.gradients))


class _Taken:
    """Stands in for optimizers under a loss scale, and keeps what they are given."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self.loss: tf.Tensor | None = None
        self.gradients: list[tuple[Any, tf.Tensor | None]] = []
        # Whether gradients come with the scale in them.
        self._is_scaled = False

    def instead_of(self, optimizer: Any) -> Any:
        """Takes what would go to an optimizer, inside the context that it returns."""

        def apply(grads: Any, trainable_variables: Any = None) -> None:
            if trainable_variables is None:
                # Left out, they are those that the optimizer was built for.
                known = getattr(optimizer, "inner_optimizer", optimizer)
                trainable_variables = optimizers.trained_by(known)
            divisor = self._factor if self._is_scaled else 1.0
            for gradient, variable in zip(grads, trainable_variables, strict=True):
                self.gradients.append((variable, _float32(gradient, divisor)))

        def apply_gradients(grads_and_vars: Any, *args: Any, **kwargs: Any) -> None:
            pairs = list(grads_and_vars)
            apply([g for g, _ in pairs], [v for _, v in pairs])

        return replaced(
            optimizer,
            scale_loss=self._scale_loss,
            get_scaled_loss=self._scale_loss,
            get_unscaled_gradients=self._unscale,
            apply_gradients=apply_gradients,
            apply=apply,
        )

    def _scale_loss(self, loss: Any) -> Any:
        self._is_scaled = True
        value = tf.cast(tf.reduce_sum(loss), tf.float32)
        self.loss = value if self.loss is None else self.loss + value
        loss = tf.convert_to_tensor(loss)
        return scaled_by_hand(loss, self._factor, is_ours=True)

    def _unscale(self, gradients: Any) -> Any:
        self._is_scaled = False
        return [_float32(gradient, self._factor) for gradient in gradients]


def _float32(gradient: Any, divisor: Any) -> tf.Tensor | None:
    """Returns a gradient in float32, a table's rows as all of it, over a divisor."""
    if gradient is None:
        return None
    return tf.cast(tf.convert_to_tensor(gradient), tf.float32) / divisor


def loss_scale_of(model: keras.Model) -> float:
    """Returns the loss scale of a model's first optimizer that has one, else 1."""
    for optimizer in optimizers_of(model):
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            scale = getattr(optimizer, "scale", None)
            return float(optimizer.dynamic_scale if scale is None else scale)
    return 1.0


class Site(NamedTuple):
    """A layer, or an operation of a Functional graph, with its path."""

    path: str
    layer: Any

    @property
    def class_name(self) -> str:
        """The class of the layer or operation."""
        return type(self.layer).__name__


class Call(NamedTuple):
    """The `number`-th call of a layer, with arguments in its compute dtype."""

    site: Site
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Observer:
    """Sees the calls of layers; override what is of interest."""

    wants_gradients = False  # whether `on_gradient` is told anything
    keeps_logits = True  # whether losses still find the logits behind a head's output

    def on_call(self, call: Call) -> None:
        """Is told of a call before it runs."""

    def on_outputs(self, call: Call, outputs: Any) -> None:
        """Is told what a call returned."""

    def on_gradient(
        self, call: Call, of: Literal["inputs", "outputs"], at: int, gradient: tf.Tensor
    ) -> None:
        """Is told the gradient of the loss by an input or output of a call."""


def sites(model: keras.layers.Layer) -> list[Site]:
    """Returns all layers and operations of Functional graphs, the model first."""
    found: dict[int, Site] = {}
    for path, layer, _ in structure.walk(model):
        found.setdefault(id(layer), Site(path, layer))
        prefix = "" if layer is model else f"{path}/"
        for each in structure.operations_of(layer):
            found.setdefault(id(each), Site(f"{prefix}{each.name}", each))
    return list(found.values())


@contextlib.contextmanager
def tapped(
    model: keras.layers.Layer,
    observer: Observer,
    *,
    only: Callable[[Site], bool] = lambda site: True,
) -> Iterator[None]:
    """Tells an observer of every call inside the block, or of `only` some sites'."""
    with contextlib.ExitStack() as stack:
        for site in sites(model):
            if only(site):
                call = _observed(site, site.layer.call, observer)
                stack.enter_context(replaced(site.layer, call=call))
        yield


def _observed(
    site: Site, original: Callable[..., Any], observer: Observer
) -> Callable[..., Any]:
    number = 0

    @like(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal number
        # In a trace, as a trial of a layer that tfamp manages, nothing of a step runs.
        if not tf.executing_eagerly() or any(
            isinstance(leaf, keras.KerasTensor)
            for leaf in structure.flatten((args, kwargs))
        ):
            return original(*args, **kwargs)
        this, number = Call(site, number, args, kwargs), number + 1
        observer.on_call(this)
        if observer.wants_gradients:
            args, kwargs = _passing(this, "inputs", (args, kwargs), observer)
        outputs = original(*args, **kwargs)
        observer.on_outputs(this, outputs)
        if observer.wants_gradients:
            outputs = _passing(this, "outputs", outputs, observer)
        return outputs

    return call


def is_float(x: Any) -> bool:
    """States whether something is a floating-point tensor."""
    return isinstance(x, tf.Tensor) and x.dtype.is_floating


def floats(values: Any) -> list[tf.Tensor]:
    """Returns the floating-point tensors of a nested structure, in order."""
    return [leaf for leaf in structure.flatten(values) if is_float(leaf)]


def _passing(
    call: Call, of: Literal["inputs", "outputs"], values: Any, observer: Observer
) -> Any:
    """Returns the tensors, whose gradients the observer is told on their way back."""
    position = -1

    def watched(x: Any) -> Any:
        nonlocal position
        if not is_float(x):
            return x
        position += 1
        at = position

        @tf.custom_gradient
        def passed(value: tf.Tensor) -> Any:
            def back(gradient: tf.Tensor) -> tf.Tensor:
                observer.on_gradient(call, of, at, gradient)
                return gradient

            return tf.identity(value), back

        y = passed(x)
        for name in ("_keras_mask", "_tfamp_source"):
            if hasattr(x, name):
                setattr(y, name, getattr(x, name))
        if hasattr(x, _LOGITS) and observer.keeps_logits:
            setattr(y, _LOGITS, passed(getattr(x, _LOGITS)))
        return y

    return structure.map_structure(watched, values)
