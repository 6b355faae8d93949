"""Features of a first batch that half precision does not hold, and who is given them.

Some are beyond float16; others vary little for their size, as a year does, where
bfloat16 has steps of 8. Layers that are given them compute in float32, one after the
other from the first on, until what the model gives is right.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._examples import Column
from tfamp.data.rounding import Profile, format_of
from tfamp.dtypes import layer_dtypes
from tfamp.dtypes.rules import Rule
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import exact_values, structure
from tfamp.numerics.first_runs import (
    LARGEST,
    is_in_half,
    is_own,
    recorded,
    variables_put_back,
)
from tfamp.numerics.passes import forward_error
from tfamp.stepping.eager_step import floats
from tfamp.stepping.layer_calls import in_float32, is_layer, units

RULE = "check"
# What such a feature becomes inside grows in training.
_MARGIN = 1 / 16
_MAX_ROWS = 256
# Rounding noise over the spread, from which on a layer sees it.
_NOISY = 0.05
Guilty = dict[keras.layers.Layer, str]
_Group = list[tuple[Any, str]]  # layers or operations, and why they are kept


class Features(NamedTuple):
    """Features by name: the largest value, or the rounding error over the spread."""

    beyond: dict[str, float]
    rounded: dict[str, float]


def not_held(batch: Any, dtype: str) -> Features:
    """Returns what a dtype does not hold of the features of a batch."""
    found = Features({}, {})
    try:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    except ValueError:  # only a `train_step` of the user's knows what it is
        return found
    for path, leaf in keras.tree.flatten_with_path(x):
        if not (isinstance(leaf, tf.Tensor) and leaf.shape.rank):
            continue
        if not (leaf.dtype.is_floating or leaf.dtype.is_integer):
            continue
        name, values = "/".join(map(repr, path)) or "inputs", leaf.numpy()
        if dtype == "float16" and leaf.dtype.is_floating:
            sizes = np.abs(values.astype("float32"))
            largest = np.max(sizes, where=np.isfinite(sizes), initial=0.0)
            if largest > LARGEST:
                found.beyond[name] = float(largest)
        column = Column(name, leaf.dtype.name, tuple(leaf.shape)[1:])
        profile = Profile(column, format_of(dtype))
        profile.update(values[:_MAX_ROWS])
        for place, noise in enumerate(profile.noise.tolist()):
            if noise >= _NOISY:
                found.rounded[profile.place(place)] = noise
    return found


def keep(
    model: keras.Model, x: Any, settings: PolicySettings, features: Features
) -> tuple[Guilty, Features]:
    """Keeps layers in float32 because of features; where that helps, else none.

    Returns them with the reason, and the features where it does not help.
    """
    guilty: Guilty = {}
    left = Features({}, {})
    with layer_dtypes.errors_left_alone(), variables_put_back(model, x) as put_back:

        def outputs(training: bool) -> list[np.ndarray]:
            put_back()
            given = floats(model(x, training=training))
            return [tf.cast(each, tf.float32).numpy() for each in given]

        def is_finite() -> bool:
            return all(np.isfinite(each).all() for each in outputs(False))

        def error_from(exact: list[np.ndarray]) -> float:
            # In training BatchNormalization knows what to take off from the start.
            return max(map(forward_error, outputs(True), exact), default=0.0)

        def is_near() -> bool:
            return error_from(exact) <= _NOISY

        if features.beyond:
            given_much = _given_much(model, x)
            found = _keep_until(is_finite, given_much, model, settings)
            guilty |= found or {}
            left.beyond.update(features.beyond if found is None else {})
        if features.rounded and not left.beyond:
            with in_float32(model):
                exact = outputs(True)
                is_steady = not error_from(exact)  # else it draws what is nobody's
            in_order = _from_first(model, x, _reason(settings, features.rounded))
            found = None
            if is_steady:
                found = _keep_until(is_near, in_order, model, settings)
            guilty |= found or {}
            left.rounded.update(features.rounded if found is None else {})
    return guilty, left


def _reason(settings: PolicySettings, rounded: dict[str, float]) -> str:
    worst = max(rounded, key=rounded.__getitem__)
    return (
        f"{settings.compute_dtype} rounds the feature {worst} of its model by "
        f"{rounded[worst]:.0%} of the spread; standardize it, as by "
        "`keras.layers.Normalization`, to train in half precision"
    )


def warn(model: keras.Model, dtype: str, left: Features) -> None:
    """Warns of features that keeping layers in float32 does not help."""
    of = f"of model {model.name!r} in its first batch"
    for features, form, text in (
        (
            *(left.beyond, "{} up to {:g}"),
            f"Features {of} are beyond {LARGEST:g}, where float16 ends: {{}}. Its "
            "outputs are not finite, and such steps are skipped. Scale them, as by "
            "`keras.layers.Normalization`, or use 'mixed_bfloat16'.",
        ),
        (
            *(left.rounded, "{} by {:.0%}"),
            f"{dtype} rounds features {of} by much of their spread: {{}}. Standardize "
            "them, as by `keras.layers.Normalization`, or train in float32.",
        ),
    ):
        if features:
            told = ", ".join(form.format(*each) for each in features.items())
            warnings.warn(text.format(told), UserWarning, stacklevel=3)


def _given_much(model: keras.Model, x: Any) -> Iterator[_Group]:
    """Yields what is given more than float16 has."""
    group = []
    for each, calls in recorded(model, x, units(model)).items():
        given = [tf.abs(value) for call in calls for value in call.float_inputs]
        largest = max((float(tf.reduce_max(value)) for value in given), default=0.0)
        if largest > LARGEST * _MARGIN:
            reason = f"it is given values up to {largest:g}, and float16 ends at 65504"
            group.append((each, reason))
    yield group


def _from_first(model: keras.Model, x: Any, reason: str) -> Iterator[_Group]:
    """Yields all that computes, as it is called: the first, and twice as many each."""
    calls = [(each, reason) for each in recorded(model, x, units(model))]
    start, size = 0, 1
    while start < len(calls):
        yield calls[start : start + size]
        start, size = start + size, start + size


def _keep_until(
    is_right: Callable[[], bool],
    groups: Iterable[_Group],
    model: keras.Model,
    settings: PolicySettings,
) -> Guilty | None:
    """Keeps one group after the other until a model is right; None where it is not."""
    if is_right():
        return {}
    before = layer_dtypes.Before(structure.layers_of(model))
    kept, guilty, is_cured = exact_values.kept_in(model), {}, False
    for group in groups:
        for each, reason in group:
            if not is_layer(each):
                exact_values.keep(each, settings.compute_dtype, RULE, reason)
            elif is_in_half(each):
                # What a user's layer calls is in this list itself.
                how = "own" if is_own(each) else "all"
                layer_dtypes.take(each, settings, Rule(RULE, reason, applies_to=how))
                guilty[each] = reason
        if is_cured := is_right():
            break
    if not (is_cured and settings.check == "keep"):
        before.put_back()
        exact_values.keep_only(model, kept)
    return guilty if is_cured else None
