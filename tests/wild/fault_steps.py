"""Training steps that are not finite, with their causes. `FAILURES` at the end."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfamp
from tests.wild import fault_cases
from tests.wild.fault_cases import FUNCTIONS, SHAPES, STYLES, group, head
from tests.wild.own_layers import Own


@dataclasses.dataclass(frozen=True)
class Failure:
    """A training step that is not finite, or is, and why: what `triage` has to say.

    `make` returns (compiled model, batch) with the policy in force; "float32" is stock.
    """

    name: str
    cause: str
    make: Callable[[np.random.Generator], tuple[Any, Any]]
    policy: str = "float32"
    layer: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def build(self, seed):
        """Returns a compiled model in its policy, and the failing batch."""
        keras.utils.set_random_seed(seed)
        rng = np.random.default_rng([seed, 11])
        with contextlib.ExitStack() as stack:
            if self.policy != "float32":
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message=".*will be slow or gain")
                stack.enter_context(tfamp.scope(self.policy, **self.options))
            return self.make(rng)


def _with(
    middle=list,
    damage=lambda x, y: (x, y),
    *,
    style="functional",
    kind="dense",
    classes=0,
):
    """Returns a maker of a healthy chain with layers in it, and a batch, damaged."""

    def make(rng):
        end = head(kind, 1)
        if classes:
            end = head(kind, classes, activation="softmax")
        middle_ = [*middle(), layers.LayerNormalization(name="settle")]
        parts = (group(kind, 0, 16), middle_, [*group(kind, 1, 16), *end])
        model = fault_cases.assemble(style, SHAPES[kind], *parts)
        loss = "sparse_categorical_crossentropy" if classes else "mse"
        model.compile(keras.optimizers.Adam(1e-3), loss)
        x = rng.normal(size=(16, *SHAPES[kind])).astype("float32")
        y = rng.normal(size=(16, 1)).astype("float32")
        return model, damage(x, rng.integers(0, classes, 16) if classes else y)

    return make


def _set(name, value):
    """Returns what damages a row of the inputs, the targets or the weights."""

    def damage(x, y):
        arrays = {"x": x, "y": y, "weight": np.ones(len(x), "float32")}
        arrays[name][3] = value
        return tuple(arrays.values()) if name == "weight" else (x, y)

    return damage


def _raw(name, function):
    return lambda: [Own(function, name=name)]


def _spoilt_weight(rng):
    """A weight is NaN; on CPUs in graph mode the ReLU makes 0 of it."""
    hidden = layers.Dense(16, activation="relu", name="hidden")
    model, batch = _with(lambda: [hidden])(rng)
    kernel, bias = hidden.get_weights()
    kernel[1, 2] = np.nan
    hidden.set_weights([kernel, bias])
    return model, batch


def _exploded(optimizer):
    """Returns a maker of a model that was trained until a step was not finite."""

    def make(rng):
        hidden = [layers.Dense(8, "relu", name=f"dense_{i}") for i in range(4)]
        end = layers.Dense(1, name="head")
        model = keras.Sequential([keras.Input((8,)), *hidden, end])
        model.compile(optimizer=optimizer(), loss="mse")
        x, y = (rng.normal(size=(16, n)).astype("float32") for n in (8, 1))
        for _ in range(100):
            weights = [variable.numpy() for variable in model.variables]
            if not step(model, (x, y)):
                for variable, value in zip(model.variables, weights, strict=True):
                    variable.assign(value)
                return model, (x, y)
        raise RuntimeError("The weights stayed finite for 100 steps; raise the rate.")

    return make


def _spoilt_slot(rng):
    """The optimizer's state of one kernel holds a NaN."""
    model, batch = _with()(rng)
    step(model, batch)
    for slot in model.optimizer.variables:
        if "dense_1a_kernel" in slot.path and "momentum" in slot.path:
            spoilt = slot.numpy()
            spoilt[0, 0] = np.nan
            slot.assign(spoilt)
    return model, batch


def step(model, given):
    """Takes one training step, eagerly; returns whether everything stayed finite.

    A step whose gradients are not finite writes nothing, as under a loss scale.
    """
    x, y, *weight = given
    scale = getattr(model.optimizer, "scale_loss", lambda loss: loss)
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        own = weight[0] if weight else None
        loss = model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=own)
        scaled = scale(loss)
    variables = model.trainable_variables
    gradients = tape.gradient(scaled, [v.value for v in variables])
    arrays = [tf.cast(tf.convert_to_tensor(g), "float32") for g in gradients]
    if not all(np.isfinite(v).all() for v in (loss, *arrays)):
        return False
    model.optimizer.apply(gradients, variables)
    return all(np.isfinite(v.numpy()).all() for v in variables)


def _deviation(x):
    """A root of a variance that rounding makes negative or zero."""
    h = 300.0 + x
    mean = ops.mean(h, axis=-1, keepdims=True)
    return x / ops.sqrt(ops.mean(ops.square(h), -1, keepdims=True) - ops.square(mean))


def _nothing(x):
    above = ops.relu(x - 100.0)
    return x + above / ops.sum(above, axis=-1, keepdims=True)


F16, BF16 = "mixed_float16", "mixed_bfloat16"
SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
_BATCHES = {
    "NaN in the inputs": ("x", np.nan, "functional"),
    "infinity in the inputs": ("x", np.inf, "sequential"),
    "NaN in the targets": ("y", np.nan, "nested"),
    "a huge target": ("y", 1e30, "subclassed"),
    "NaN in the weights": ("weight", np.nan, "functional"),
    "an infinite weight": ("weight", np.inf, "subclassed"),
}
# Layer -> what it computes, and the style; each gives NaN in float32 too.
_MODELS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "root": (lambda x: ops.sqrt(ops.relu(x)), "functional"),
    "logarithm": (lambda x: ops.log(ops.relu(x)), "sequential"),
    "share": (_nothing, "nested"),
    "entropy": (lambda x: x * ops.log(x), "subclassed"),
    "growth": (lambda x: ops.log1p(ops.exp(200.0 * ops.abs(x))), "sequential"),
}
_PRECISION: dict[str, tuple[Callable[[Any], Any], str, str, str]] = {
    "cube": (FUNCTIONS["cube"][0], "functional", "dense", F16),
    "attend": (lambda x: fault_cases.attend(x, 200.0), "subclassed", "sequence", F16),
    "soft": (FUNCTIONS["soft"][0], "nested", "dense", F16),
    "masked": (fault_cases.masked, "sequential", "sequence", F16),
    "inverse": (FUNCTIONS["inverse"][0], "functional", "dense", F16),
    "deviation": (_deviation, "functional", "dense", BF16),
}


def _path(name, style):
    return f"inner/{name}" if style == "nested" else name


def _failures():
    for name, (*own, style) in _BATCHES.items():
        for policy in ("float32", BF16):
            make = _with(damage=_set(*own), style=style)
            yield Failure(f"{name}, {policy}", "data", make, policy)
    labels = _with(damage=_set("y", 99), classes=4)
    yield Failure("a label out of range", "data", labels)
    for name, (function, style) in _MODELS.items():
        make = _with(_raw(name, function), style=style)
        yield Failure(name, "model", make, layer=_path(name, style))
    yield Failure("a NaN weight", "model", _spoilt_weight, layer="hidden")
    for name, optimizer, policy in (
        ("SGD explodes", lambda: SGD(100.0), "float32"),
        ("Adam explodes", lambda: ADAM(1e6), "float32"),
        ("SGD explodes, bfloat16", lambda: SGD(100.0), BF16),
    ):
        yield Failure(name, "learning rate", _exploded(optimizer), policy)
    yield Failure("NaN in a slot", "optimizer", _spoilt_slot, layer="dense_1a")
    for style in STYLES:
        how = {"options": {"loss_scale": 2.0**24}}
        make = _with(style=style)
        yield Failure(f"a large scale, {style}", "loss scale", make, F16, **how)
    for name, (function, style, kind, policy) in _PRECISION.items():
        make = _with(_raw(name, function), style=style, kind=kind)
        yield Failure(name, "precision", make, policy, _path(name, style))
    for policy, style in {
        "float32": "nested",
        BF16: "subclassed",
        F16: STYLES[1],
    }.items():
        yield Failure(f"healthy, {policy}", "none", _with(style=style), policy)


FAILURES = tuple(_failures())
