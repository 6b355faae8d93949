"""Rules that keep layers in float32: the default ones, and what gains nothing."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks.float32_operations import OPERATIONS


@dataclasses.dataclass(frozen=True)
class Rule:
    """One reason to keep layers in float32."""

    name: str  # what people see, such as "default: UnitNormalization"
    reason: str  # why, in one sentence
    classes: tuple[type, ...] = ()  # layer classes; a subclass matches too
    class_name: str | None = None  # name of a class in the layer's line of ancestors
    # Expression that must match the whole name or path.
    pattern: re.Pattern[str] | None = None
    # Called with the finished layer. Where it stands beside `classes`, both must hold.
    predicate: Callable[[Any], Any] | None = None
    # "all" where sublayers follow, "self" where not, "own" where not and what they
    # return is cast to float32 inside the layer.
    applies_to: str = "all"
    # Compute dtypes under which the rule applies.
    dtypes: tuple[str, ...] = ("float16", "bfloat16")

    @property
    def needs_finished_layer(self) -> bool:
        """Whether the layer's constructor must have ended before asking."""
        return self.predicate is not None

    def matches(
        self,
        layer: keras.layers.Layer,
        *,
        path: str | None = None,
        is_exact: bool = False,
    ) -> bool:
        """Returns whether the rule keeps `layer`, a finished one if it has a predicate.

        `path` is its path within a model, where known; `is_exact` says that the pattern
        is a name or path as it stands. A predicate that raises gives a RuntimeError,
        one without a truth value a TypeError.
        """
        if self.classes and not isinstance(layer, self.classes):
            return False
        if self.class_name is not None or self.pattern is not None:
            return self._matches_text(layer, path, is_exact=is_exact)
        if self.predicate is not None:
            return self._ask(layer)
        return bool(self.classes)  # a rule for layers this Keras lacks keeps none

    def is_name_of(self, layer: keras.layers.Layer, path: str | None) -> bool:
        """Returns whether the pattern, as it stands, is a layer's name or path."""
        return self.pattern is not None and self.pattern.pattern in _texts(layer, path)

    def _matches_text(
        self, layer: keras.layers.Layer, path: str | None, *, is_exact: bool
    ) -> bool:
        if self.class_name in _ancestors(type(layer)) or self.is_name_of(layer, path):
            return True
        pattern = self.pattern
        return (
            not is_exact
            and pattern is not None
            and any(map(pattern.fullmatch, _texts(layer, path)))
        )

    def _ask(self, layer: keras.layers.Layer) -> bool:
        try:
            answer = self.predicate(layer)  # type: ignore[misc]
        except Exception as error:
            raise RuntimeError(
                f"Rule {self.name} raised {type(error).__name__} on layer "
                f"{layer.name!r} of class {type(layer).__name__}: {error}. A callable "
                "in `keep_float32` is asked about every layer; let it return False "
                "where it does not apply."
            ) from error
        if answer is None or isinstance(answer, bool | np.bool_):
            return bool(answer)
        raise TypeError(
            f"Rule {self.name} returned {answer!r} for layer {layer.name!r}; expected "
            "True or False. Return whether the layer stays in float32."
        )


def _texts(layer: keras.layers.Layer, path: str | None) -> set[str]:
    found = {layer.name, path, getattr(layer, "path", None)}
    return {text for text in found if text is not None}


def _ancestors(cls: type) -> set[str]:
    return {c.__name__ for c in cls.__mro__ if issubclass(c, keras.layers.Layer)}


# A window of n terms summed in a format of spacing eps is off by up to n * eps / 2:
# 0.4 % for a 3x3 window in float16, but 12 % for 16x16.
MIN_LARGE_WINDOW = 16


def _classes(*names: str) -> tuple[type, ...]:
    """Returns the Keras layers of these names that this version of Keras has."""
    found = (getattr(keras.layers, name, None) for name in names)
    return tuple(cls for cls in found if cls is not None)


@functools.lru_cache(256)
def _adds_a_loss(cls: Any) -> bool:
    """Returns whether a user's `call` names `add_loss`, or a method that does."""
    todo: list[Any] = [getattr(cls, "call", None)]
    seen = set()
    while todo:
        method = todo.pop()
        function = inspect.unwrap(getattr(method, "python_function", method))
        code = getattr(function, "__code__", None)
        module = getattr(function, "__module__", None) or ""
        if code is None or code in seen or module.split(".")[0] == "keras":
            continue
        seen.add(code)
        if "add_loss" in code.co_names:
            return True
        named = (inspect.getattr_static(cls, name, None) for name in code.co_names)
        todo += [function for function in named if inspect.isfunction(function)]
    return False


def _default(name: str, reason: str, *classes: str, **fields: Any) -> Rule:
    return Rule(
        name=f"default: {name}", reason=reason, classes=_classes(*classes), **fields
    )


_RULES = (
    _default(
        "LayerNormalization",
        "computes in float32 inside already; kept so that what it normalizes is not "
        "rounded first",
        "LayerNormalization",
    ),
    _default(
        "Softmax",
        "probabilities near 0 vanish in half precision, and those near 1 round to 1",
        "Softmax",
    ),
    _default(
        "UnitNormalization",
        "a float16 sum of squares overflows at inputs of 256 and the result is all 0",
        "UnitNormalization",
    ),
    _default(
        "SpectralNormalization",
        "power iteration divides by norms, and writes what it rounded into the weights",
        "SpectralNormalization",
        applies_to="self",
    ),
    _default(
        "Normalization",
        "the mean of unscaled features does not fit half precision, and is frozen in "
        "the compute dtype",
        "Normalization",
    ),
    _default(
        "cosine Dot",
        "the norms overflow in float16, and a cosine of 1 comes out as 0",
        "Dot",
        predicate=lambda layer: layer.normalize,
    ),
    _default(
        "masked global pooling",
        "the masked sum over all steps is kept in the compute dtype",
        "GlobalAveragePooling1D",
    ),
    _default(
        "large average pooling",
        f"a window of {MIN_LARGE_WINDOW} or more terms is summed in the compute dtype",
        "AveragePooling1D",
        "AveragePooling2D",
        "AveragePooling3D",
        predicate=lambda layer: np.prod(layer.pool_size) >= MIN_LARGE_WINDOW,
    ),
    _default(
        "adaptive average pooling",
        "windows as large as the input are summed in the compute dtype",
        "AdaptiveAveragePooling1D",
        "AdaptiveAveragePooling2D",
        "AdaptiveAveragePooling3D",
    ),
    _default(
        "unscaled Attention",
        "scores are plain products, which overflow float16 from lengths of 256 on",
        "Attention",
        # Additive attention multiplies nothing.
        predicate=lambda layer: (
            not isinstance(layer, keras.layers.AdditiveAttention)
            and layer.score_mode == "dot"
            and not layer.use_scale
        ),
        dtypes=("float16",),
    ),
    _default(
        "bilinear UpSampling2D",
        "XLA has no gradient for resizing in half precision (keras#20931)",
        "UpSampling2D",
        predicate=lambda layer: layer.interpolation != "nearest",
    ),
    _default(
        "own loss",
        "its `call` adds a loss, which would be summed in half precision",
        "Layer",
        predicate=lambda layer: _adds_a_loss(layer.__class__),
        applies_to="own",
    ),
    _default(
        "3-D pooling without a GPU",
        "TensorFlow has no float16 kernel for it on a CPU",
        "AveragePooling3D",
        "MaxPooling3D",
        predicate=lambda layer: not tf.config.list_physical_devices("GPU"),
        dtypes=("float16",),
    ),
)

# Without the rules for layers that this version of Keras lacks.
DEFAULT_RULES: tuple[Rule, ...] = tuple(rule for rule in _RULES if rule.classes)

# What the default rules do where there is no layer to name.
DEFAULT_OPERATIONS: tuple[tuple[str, str], ...] = (
    (
        "default: heads",
        "the layer that makes a model's output feeds the loss, where half precision "
        "turns a confident answer into a gradient of 0 or NaN",
    ),
    *((f"default: {name}", why) for name, (why, _) in OPERATIONS.items()),
    (
        "default: exact inputs",
        "normalization and embedding layers that come first get their input before it "
        "is rounded, and so does what makes whole numbers of inputs, such as ids",
    ),
)

# Layers for which float32 gains nothing: they compute in it inside, or only move
# or compare values.
_GAINS_NOTHING = {
    "computes in float32 inside already": _classes(
        "BatchNormalization", "GroupNormalization", "RMSNormalization"
    ),
    "only moves, selects or compares values": _classes(
        "ReLU", "Flatten", "Reshape", "Permute", "RepeatVector", "Cropping1D",
        "Cropping2D", "Cropping3D", "ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D",
        "MaxPooling1D", "MaxPooling2D", "GlobalMaxPooling1D", "GlobalMaxPooling2D",
        "GlobalMaxPooling3D", "Identity", "Masking", "Concatenate", "Maximum",
        "Minimum", "Dropout", "SpatialDropout1D", "SpatialDropout2D",
    ),
    "averages in float32 inside already": _classes(
        "GlobalAveragePooling2D", "GlobalAveragePooling3D"
    ),
    "gathers rows, which rounds nothing that is not rounded later": _classes(
        "Embedding"
    ),
}  # fmt: skip

EXACT_INPUT_LAYERS = _classes(
    "BatchNormalization", "GroupNormalization", "RMSNormalization", "Embedding",
    "Discretization", "Hashing", "IntegerLookup", "CategoryEncoding",
)  # fmt: skip


def gains_nothing(layer: Any) -> str | None:
    """Returns why float32 gains nothing on a layer or class, or None where it may.

    A default rule names no such layer, but for LayerNormalization; a user's rule may,
    and is obeyed: `tfamp.status` and `tfamp.assignment` show the note.
    """
    cls = layer if isinstance(layer, type) else type(layer)
    for why, classes in _GAINS_NOTHING.items():
        if issubclass(cls, classes):
            return why
    return None
