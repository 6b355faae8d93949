"""One rule that keeps layers in float32, and how it is asked."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np


@dataclasses.dataclass(frozen=True)
class Rule:
    """One reason to keep layers in float32.

    Attributes:
        name: What people see, such as "default: UnitNormalization".
        reason: Why, in one sentence.
        classes: Layer classes; a subclass matches too.
        class_name: Name of a class in the layer's line of ancestors.
        pattern: Expression that must match the whole name or path.
        predicate: Called with the finished layer. Where it stands beside
            `classes`, both must hold.
        applies_to: "all" where sublayers follow, "self" where not, "own" where
            not and what they return is cast to float32 inside the layer.
        dtypes: Compute dtypes under which the rule applies.
    """

    name: str
    reason: str
    classes: tuple[type, ...] = ()
    class_name: str | None = None
    pattern: re.Pattern[str] | None = None
    predicate: Callable[[Any], Any] | None = None
    applies_to: str = "all"
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
        """Returns whether the rule keeps `layer`.

        Args:
            layer: The layer; a finished one where the rule has a predicate.
            path: Its path within a model, where known.
            is_exact: Whether the pattern is a name or path as it stands.

        Raises:
            TypeError: A predicate gave something that is not a truth value.
            RuntimeError: A predicate raised.
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
