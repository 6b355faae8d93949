"""Checks the arguments of `Pipeline.bucket` and makes its stage."""

from collections.abc import Sequence
from typing import Any

from tfamp.data.bucketing.padding import Padding
from tfamp.data.bucketing.plan import (
    DEFAULT_MAX_SHAPES,
    LENGTH_MULTIPLE,
    check_budget,
)
from tfamp.data.bucketing.stage import Bucket
from tfamp.records import checks


def make_bucket(
    batch_size: int | None = None,
    *,
    boundaries: str | Sequence[int] = "auto",
    length: Any = None,
    pad_to_multiple: int = LENGTH_MULTIPLE,
    max_shapes: int = DEFAULT_MAX_SHAPES,
    drop_remainder: bool = False,
    padding_values: Any = None,
    token_budget: int | None = None,
    mask: str | None = None,
    weight_padding: bool = False,
    too_long: str = "error",
) -> Bucket:
    """Returns the stage of `Pipeline.bucket`, which explains the arguments.

    Raises:
        TypeError: An argument of another type.
        ValueError: Both sizes or none, boundaries that do not ascend or are no
            multiples, or a budget below the last of them.
    """
    if (batch_size is None) == (token_budget is None):
        raise ValueError(
            f"`batch_size` is {batch_size!r} and `token_budget` is {token_budget!r}; "
            "expected one of them. Pass `batch_size=64`, or `token_budget=64 * 512` "
            "for batches of equal cost."
        )
    if batch_size is not None:
        batch_size = checks.positive_int("batch_size", batch_size)
    if token_budget is not None:
        token_budget = checks.positive_int("token_budget", token_budget)
    multiple = checks.positive_int("pad_to_multiple", pad_to_multiple)
    max_shapes = checks.positive_int("max_shapes", max_shapes)
    given = _given_boundaries(boundaries, multiple)
    if given is not None and token_budget is not None:
        check_budget(token_budget, given)
    too_long = checks.choice("too_long", too_long, ("error", "truncate", "drop"))
    if given is None and too_long != "error":
        raise ValueError(
            f"`too_long` is {too_long!r} with boundaries chosen from the lengths, and "
            "none is above those; expected boundaries of your own. Pass "
            "`boundaries=[64, 128, 256]`, or leave `too_long` out."
        )
    if length is not None and not callable(length):
        raise TypeError(
            f"`length` is {length!r}; expected a function of an element's parts. Pass "
            "one such as `lambda x, y: tf.shape(x)[0]`."
        )
    padding = Padding(length, padding_values, mask, bool(weight_padding))
    return Bucket(
        batch_size,
        token_budget,
        given,
        multiple,
        max_shapes,
        bool(drop_remainder),
        padding,
        too_long,
    )


def _given_boundaries(boundaries: Any, multiple: int) -> tuple[int, ...] | None:
    """Returns boundaries that the caller gave, None to choose them."""
    if isinstance(boundaries, str):
        checks.choice("boundaries", boundaries, ("auto",))
        return None
    given = tuple(checks.positive_int("boundaries", one) for one in boundaries)
    if not given or any(a >= b for a, b in zip(given, given[1:], strict=False)):
        raise ValueError(
            f"`boundaries` are {given}; expected at least one length, ascending. Sort "
            "them, each once."
        )
    odd = [one for one in given if one % multiple]
    if odd:
        up = tuple(sorted({-(-one // multiple) * multiple for one in given}))
        raise ValueError(
            f"`boundaries` has {odd[0]}, which is no multiple of {multiple}; expected "
            f"such multiples, which tensor cores want. Pass {up}, or "
            "`pad_to_multiple=1`."
        )
    return given
