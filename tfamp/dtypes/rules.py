"""Rules that keep layers in float32: the default ones, and those of `keep_float32`."""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks.float32_operations import OPERATIONS
from tfamp.keras_hooks.trials import (
    ANGLES,
    CONSTANT,
    EXACT,
    OWN_LOSS,
    PYTHON,
    STATE,
    prepares,
)
from tfamp.records.formats import HALF

KeepFloat32 = str | Sequence[Any]
# A window of n terms summed in a format of spacing eps is off by up to n * eps / 2:
# 0.4 % for a 3x3 window in float16, but 12 % for 16x16.
MIN_LARGE_WINDOW = 16
_NAME = re.compile(r"[\w./-]+")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One reason to keep layers in float32."""

    name: str  # what people see, such as "default: UnitNormalization"
    reason: str  # why, in one sentence
    classes: tuple[type, ...] = ()  # layer classes; a subclass matches too
    # The name of a class or an ancestor, or what must match the whole name or path.
    pattern: re.Pattern[str] | None = None
    # Asked when the layer's constructor has ended; beside `classes`, both must hold.
    predicate: Callable[[Any], Any] | None = None
    # "all" where sublayers follow, "own" where they do not, and what they return is
    # cast to float32 inside the layer.
    applies_to: str = "all"
    dtypes: tuple[str, ...] = HALF  # compute dtypes under which the rule applies

    def matches(self, layer: Any, *, path: str | None = None) -> bool:
        """Returns whether the rule keeps `layer`, a finished one if it has a predicate.

        `path` is its path within a model, where known. A predicate that raises gives a
        RuntimeError.
        """
        if self.classes and not isinstance(layer, self.classes):
            return False
        if self.pattern is not None:
            texts = {layer.name, path, getattr(layer, "path", None)} - {None}
            text = self.pattern.pattern
            if text in texts or text in {cls.__name__ for cls in type(layer).__mro__}:
                return True
            # In what reads like a name dots stand for themselves.
            is_name = _NAME.fullmatch(text) is not None
            return not is_name and any(map(self.pattern.fullmatch, texts))
        if self.predicate is None:
            return bool(self.classes)
        try:
            return bool(self.predicate(layer))
        except Exception as error:
            raise RuntimeError(
                f"Rule {self.name} raised {type(error).__name__} on layer "
                f"{layer.name!r} of class {type(layer).__name__}: {error}. A callable "
                "in `keep_float32` is asked about every layer; let it return False "
                "where it does not apply."
            ) from error


def _classes(names: str) -> tuple[type, ...]:
    """Returns the layers of these names that this version of Keras has."""
    places = keras.layers, keras.utils
    found = (getattr(p, name, None) for name in names.split() for p in places)
    return tuple(cls for cls in found if cls is not None)


def _is_unscaled(layer: Any) -> bool:
    # Additive attention multiplies nothing.
    is_additive = isinstance(layer, keras.layers.AdditiveAttention)
    return not is_additive and layer.score_mode == "dot" and not layer.use_scale


# Why layers stay in float32, by the name of a rule: that of their class, if no other.
_REASONS = {
    "LayerNormalization": "computes in float32 inside already; kept so that what it "
    "normalizes is not rounded first",
    "Softmax": "probabilities near 0 vanish in half precision, and those near 1 round "
    "to 1",
    "UnitNormalization": "a float16 sum of squares overflows at inputs of 256 and the "
    "result is all 0",
    "SpectralNormalization": "power iteration divides by norms, and writes what it "
    "rounded into the weights",
    "Normalization": "the mean of unscaled features does not fit half precision, and "
    "is frozen in the compute dtype",
    "preprocessing": "ids, bins, boxes and the places of pixels are others where these "
    "are rounded",
    "FeatureSpace": "what it prepares are raw features, which half precision rounds, "
    "and which may be beyond float16",
    "cosine Dot": "the norms overflow in float16, and a cosine of 1 comes out as 0",
    "masked global pooling": "the masked sum over all steps is kept in the compute "
    "dtype",
    "large average pooling": f"a window of {MIN_LARGE_WINDOW} or more terms is summed "
    "in the compute dtype",
    "adaptive average pooling": "windows as large as the input are summed in the "
    "compute dtype",
    "unscaled Attention": "scores are plain products, which overflow float16 from "
    "lengths of 256 on",
    "bilinear UpSampling2D": "XLA has no gradient for resizing in half precision "
    "(keras#20931)",
    "3-D pooling without a GPU": "TensorFlow has no float16 kernel for it on a CPU",
    "dilated transposed convolution without a GPU": "TensorFlow has no float16 kernel "
    "for it on a CPU",
}
_CLASSES = {
    "cosine Dot": "Dot",
    "masked global pooling": "GlobalAveragePooling1D",
    "large average pooling": "AveragePooling1D AveragePooling2D AveragePooling3D",
    "adaptive average pooling": "AdaptiveAveragePooling1D AdaptiveAveragePooling2D "
    "AdaptiveAveragePooling3D",
    "unscaled Attention": "Attention",
    "bilinear UpSampling2D": "UpSampling2D",
    "3-D pooling without a GPU": "AveragePooling3D MaxPooling3D",
    "dilated transposed convolution without a GPU": "Conv1DTranspose Conv2DTranspose "
    "Conv3DTranspose",
}
_PREDICATES: dict[str, Callable[[Any], Any]] = {
    "preprocessing": prepares,
    "cosine Dot": lambda layer: layer.normalize,
    "large average pooling": lambda x: np.prod(x.pool_size) >= MIN_LARGE_WINDOW,
    "unscaled Attention": _is_unscaled,
    "bilinear UpSampling2D": lambda layer: layer.interpolation != "nearest",
    "3-D pooling without a GPU": lambda _: not tf.config.list_physical_devices("GPU"),
    "dilated transposed convolution without a GPU": lambda layer: (
        np.max(layer.dilation_rate) > 1 and not tf.config.list_physical_devices("GPU")
    ),
}
_DTYPES = {
    "unscaled Attention": ("float16",),
    "3-D pooling without a GPU": ("float16",),
    "dilated transposed convolution without a GPU": ("float16",),
}
# Without the rules for layers that this version of Keras lacks.
DEFAULT_RULES: tuple[Rule, ...] = tuple(
    Rule(
        f"default: {name}",
        reason,
        _classes(_CLASSES.get(name, name)),
        predicate=_PREDICATES.get(name),
        applies_to="own" if name == "SpectralNormalization" else "all",
        dtypes=_DTYPES.get(name, HALF),
    )
    for name, reason in _REASONS.items()
    if name in _PREDICATES or _classes(_CLASSES.get(name, name))
)
# Those of what is found as a layer's own `call` is tried.
FOUND_RULES = {
    name: Rule(name, reason, applies_to="own")
    for name, reason in {
        EXACT: "its `call` makes whole numbers of what it is given, or compares it, "
        "and would get others of what was rounded",
        STATE: "its `call` assigns to a weight what it computes, where half precision "
        "would round the small steps of an average or a count away",
        OWN_LOSS: "its `call` adds a loss, which would be summed in half precision",
        CONSTANT: "its `call` holds a number that half precision makes 0, 1 or "
        "infinity of, as float16 does of 1e-9 and -1e9, and bfloat16 of 0.999",
        PYTHON: "its `call` hands numbers to a Python function, which says what dtype "
        "it returns, and is written for float32",
        ANGLES: "its `call` takes sines, and half precision rounds an angle of 100 by "
        "up to 0.03 in float16 and 0.25 in bfloat16",
    }.items()
}
HEADS = "default: heads"
# What the default rules do where there is no layer to name.
DEFAULT_OPERATIONS: tuple[tuple[str, str], ...] = (
    (
        HEADS,
        "the layer that makes a model's output feeds the loss, where half precision "
        "turns a confident answer into a gradient of 0 or NaN",
    ),
    *((f"default: {name}", why) for name, (why, _) in OPERATIONS.items()),
    (
        EXACT,
        "normalization and embedding layers that come first get their input before it "
        "is rounded, and so does what makes whole numbers of inputs, such as ids",
    ),
    *((name, FOUND_RULES[name].reason) for name in FOUND_RULES if name != EXACT),
)
# Layers that take inputs as they were before they were rounded; the second kind only
# moves or compares them, and hands on what it was given.
EXACT_INPUTS = _classes(
    "BatchNormalization GroupNormalization RMSNormalization Embedding"
)
MOVES = _classes(
    "Flatten Reshape Permute RepeatVector Cropping1D Cropping2D Cropping3D Concatenate "
    "Masking"
)


def parse(keep_float32: KeepFloat32) -> tuple[tuple[Rule, ...], bool]:
    """Returns the rules of a `keep_float32` argument, and whether default ones hold.

    What it names comes on top of the default rules: naming one layer never takes the
    others' safety away. "none" in a sequence leaves them out; "default" changes
    nothing.

    Raises:
        TypeError: An entry is no layer, class, text or callable.
        ValueError: A pattern does not compile.

    Example:
        >>> rules, has_defaults = parse(["Dense", "encoder/.*"])
        >>> [rule.name for rule in rules], has_defaults
        (["keep_float32: 'Dense'", "keep_float32: 'encoder/.*'"], True)
    """
    is_one = isinstance(keep_float32, str | keras.layers.Layer)
    if is_one or callable(keep_float32):
        keep_float32 = [keep_float32]
    try:
        entries = list(keep_float32)
    except TypeError:
        raise TypeError(_wrong_entry(keep_float32)) from None
    words = {e for e in entries if isinstance(e, str)} & {"none", "default"}
    named = [e for e in entries if not (isinstance(e, str) and e in words)]
    return tuple(map(_rule_of_user, named)), "none" not in words


def _wrong_entry(entry: Any) -> str:
    return (
        f"Cannot use {entry!r} in `keep_float32`; expected a layer class, a class "
        "name, a layer, a pattern for names or paths, or a callable taking a layer. "
        "Wrap single values in a list."
    )


def _rule_of_user(entry: Any) -> Rule:
    fields: dict[str, Any]
    if isinstance(entry, str):
        try:
            label, fields = repr(entry), {"pattern": re.compile(entry)}
        except re.error as error:
            raise ValueError(
                f"Cannot read pattern {entry!r} in `keep_float32`: {error}. Expected a "
                "regular expression that matches a layer's whole name or path; escape "
                "special characters with a backslash, or pass the layer itself."
            ) from error
    elif isinstance(entry, type) and issubclass(entry, keras.layers.Layer):
        label, fields = entry.__name__, {"classes": (entry,)}
    elif isinstance(entry, keras.layers.Layer):
        label = f"layer {entry.name!r}"
        fields = {"predicate": functools.partial(operator.is_, entry)}
    elif callable(entry) and not isinstance(entry, type):
        label = f"{getattr(entry, '__name__', type(entry).__name__)}()"
        fields = {"predicate": entry}
    else:
        raise TypeError(_wrong_entry(entry))
    return Rule(f"keep_float32: {label}", "named in `keep_float32`", **fields)
