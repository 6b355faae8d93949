"""Takes a layer into float32 whose own `call` cannot run in half precision.

A `call` that combines its inputs with float32 noise, constants or tensors cast by hand
raises an error in half precision and runs in float32. Such a layer is tried in float32
between its sublayers, which stay as they are, and then with them.
"""

import contextlib
import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
from absl import logging

from tfamp._care import CALLS, Care, Kind, care_of
from tfamp._checks import first_line
from tfamp.keras_hooks import structure
from tfamp.managed import keeping, own_operations
from tfamp.managed.lease import HALF, Lease
from tfamp.rules import Rule

_NAMES_HALF = re.compile(r"\b(half|float16|bfloat16|DT_HALF|DT_BFLOAT16)\b")
# Keras adds the arguments of the call to an error, and their dtypes.
_ARGUMENTS = "Arguments received by"
_TRIED = "_tfamp_tried_in_float32"
_LIBRARIES = re.compile(r"[\\/](keras|tensorflow|tfamp)[\\/]")
_RULE = "default: cannot run in half precision"
_OWN_LOSS = "default: own loss"


def remedy(
    layer: keras.layers.Layer,
    before: Care,
    error: Exception,
    again: Callable[[], Any],
) -> Any:
    """Returns what a layer's call gives in float32, after it failed in half precision.

    Args:
        layer: The layer whose call raised.
        before: What was known of it ahead of the call.
        error: What it raised.
        again: Calls the layer once more.

    Raises:
        Exception: `error`, where it has another cause or float32 does not help.
    """
    care = care_of(layer)
    if care is not None and care.rule == _RULE != before.rule:
        return again()  # it was found as the layer was built, on inputs cast before
    if care is not None and care.rule == _OWN_LOSS and _names_half(error):
        return _without_own_loss(layer, care.lease, error, again)
    if care is None or not _may_help(layer, care, error):
        raise error
    for reach in ("own", "all"):
        with contextlib.suppress(Exception), own_operations.tried(layer):
            own_operations.take(layer, care.lease, _rule(layer, error, reach))
            outputs = again()
            _say(layer, error)
            return outputs
    _mark(layer, error)
    raise error


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Lets errors of calls in the block be what they are."""
    before, CALLS.may_keep = CALLS.may_keep, False
    try:
        yield
    finally:
        CALLS.may_keep = before


def _may_help(layer: keras.layers.Layer, care: Care, error: Exception) -> bool:
    return (
        care.kind in (Kind.FOLLOWS, Kind.OUTPUT_CAST)
        and care.lease.has_defaults
        and layer.compute_dtype in HALF
        and CALLS.may_keep
        and not getattr(error, _TRIED, False)
        and structure.graph_of(layer) is None
        and _names_half(error)
    )


def _names_half(error: Exception) -> bool:
    return any(
        _NAMES_HALF.search(str(each).split(_ARGUMENTS)[0])
        for each in _with_causes(error)
    )


def _without_own_loss(
    layer: keras.layers.Layer, lease: Lease, error: Exception, again: Callable[[], Any]
) -> Any:
    """Returns what a call gives in half precision, after a default rule broke it."""
    with own_operations.tried(layer):
        lease.taken_back.add(layer)
        keeping.begin_again(layer, lease)
        outputs = again()
    logging.warning(
        "Layer %r computes in %s, and so does the loss that it adds: in float32 its "
        "`call` raises %s. Cast to `self.compute_dtype` there.",
        layer.name,
        lease.compute_dtype,
        f"{type(error).__name__}: {first_line(error)}",
    )
    return outputs


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and those that it was raised for."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__ or each.__context__


def _rule(layer: keras.layers.Layer, error: Exception, reach: str) -> Rule:
    reason = (
        f"its `call` raises {type(error).__name__} in {layer.compute_dtype} at "
        f"{_place(layer, error)}"
    )
    return Rule(_RULE, reason, reach=reach)


def _say(layer: keras.layers.Layer, error: Exception) -> None:
    care = care_of(layer)
    inside = structure.children(layer)
    stay = bool(inside) and care is not None and care.reach == "own"
    logging.warning(
        "Layer %r computes in float32%s: %s. Cast to `self.compute_dtype` there to run "
        "it in half precision.",
        layer.name,
        ", between sublayers that stay as they are" if stay else "",
        care.reason if care is not None else first_line(error),
    )


def _mark(layer: keras.layers.Layer, error: Exception) -> None:
    """Keeps layers around from being tried too, and names what tfamp did before."""
    with contextlib.suppress(AttributeError):
        setattr(error, _TRIED, True)
    kept = [
        path
        for path, part, _ in structure.walk(layer)
        if (care := care_of(part)) is not None and care.is_kept
    ]
    if not kept:
        return
    text = f"tfamp keeps these layers in float32: {', '.join(kept)}."
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        logging.error("%s", text)


def _place(layer: keras.layers.Layer, error: BaseException) -> str:
    """Returns the line of the user's code that raised, as far as it is known."""
    file = inspect.unwrap(type(layer).call).__code__.co_filename
    found = None
    for each in _with_causes(error):
        frames = [
            frame
            for frame in traceback.extract_tb(each.__traceback__)
            if frame.filename == file or not _LIBRARIES.search(frame.filename)
        ]
        own = [frame for frame in frames if frame.name != "error_handler"]
        inside = [frame for frame in own if frame.filename == file] or own
        found = inside[-1] if inside else found
    if found is None:
        return f"`{type(layer).__name__}.call`"
    line = (found.line or linecache.getline(found.filename, found.lineno or 0)).strip()
    return f"`{line}` ({Path(found.filename).name}:{found.lineno})"
