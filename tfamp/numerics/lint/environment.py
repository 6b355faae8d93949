"""Rules on the data that a model gets."""

import math
from collections.abc import Iterator

import keras
import numpy as np

from tfamp.data.health.profile import NOISY, rounding_for
from tfamp.numerics.lint.graph import PASSING, Graph, Node
from tfamp.numerics.lint.subject import Found, Subject, rule
from tfamp.records import formats
from tfamp.records.formats import HALF

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@rule("unnormalised-input", needs=("data",))
def unnormalised_input(subject: Subject) -> Iterator[Found]:
    """Inputs that lose what varies in them as they are cast, or whose squares do."""
    graph = subject.graph
    for index, leaf in graph.leaves.items():
        told = set()
        for cast in _casts(graph, leaf):
            dtype = cast.dtype("DstT")
            if dtype in told or _becomes_ids(graph, cast):
                continue
            readers = [subject.layer_at(r.layer) for r in graph.readers_past(cast)]
            norms = [isinstance(r, keras.layers.Normalization) for r in readers]
            if norms and all(norms):
                continue  # "shifted-normalization" says it
            told.add(dtype)
            yield from _judge(subject, index, cast, dtype)


def _casts(graph: Graph, leaf: Node) -> list[Node]:
    """Returns the casts of an input to half precision."""
    return [
        reader
        for reader in graph.readers_past(leaf)
        if reader.op == "Cast" and reader.dtype("DstT") in HALF
    ]


def _becomes_ids(graph: Graph, cast: Node) -> bool:
    """States whether numbers that were cast become integers again."""
    return any(
        reader.op == "Cast" and reader.dtype("DstT") in _INTEGERS
        for reader in graph.readers_past(cast)
    )


def _judge(subject: Subject, index: int, cast: Node, dtype: str) -> Iterator[Found]:
    values = subject.leaves[index].astype(np.float64)
    if not np.isfinite(values).all() or not values.size:
        return  # what is not finite is wrong in float32 too: `tfamp.data.check` says it
    limit = formats.FORMATS[dtype].max
    largest = float(np.abs(values).max())
    rounded = rounding_for(dtype)(np.clip(values, -limit, limit))
    std = values.std(axis=0)
    noise = np.sqrt(np.mean((rounded - values) ** 2, axis=0))
    share = np.divide(noise, std, out=np.zeros_like(std), where=std > 0)
    worst = int(np.argmax(share))
    size = float(np.sqrt(np.mean(values**2, axis=0)).max())
    details: dict[str, int | float | str | None] = {"dtype": dtype, "input": index}
    if largest > limit:
        figure = largest
        text = (
            f"reaches {largest:.4g} and is cast to {dtype}, which ends at {limit:.4g}: "
            "it becomes inf."
        )
    elif share[worst] > NOISY:
        figure = float(share[worst])
        details["feature"] = worst
        text = (
            f"lies at {values.mean(axis=0)[worst]:.4g} +- {std[worst]:.3g} and is cast "
            f"to {dtype}: rounding takes {share[worst]:.0%} of what varies in it."
        )
    elif size > math.sqrt(limit):
        figure = size
        text = (
            f"is of size {size:.4g} (root mean square) and is cast to {dtype}: squares "
            f"of such numbers pass {limit:.4g}, and so do products over a few hundred "
            "of them."
        )
    else:
        return
    yield Found(
        "error" if largest > limit else "warning",
        f"Input {index} {text}",
        "Standardize the input before the model, or by a layer in float32: "
        "`tfamp.data.fit_statistics(...).as_layer()`.",
        cast.layer or None,
        figure,
        details,
    )


@rule("float-ids", needs=("data",))
def float_ids(subject: Subject) -> Iterator[Found]:
    """Ids in a float input that half precision rounds to other ids."""
    graph = subject.graph
    for index, leaf in graph.leaves.items():
        for cast in _casts(graph, leaf):
            if not _becomes_ids(graph, cast):
                continue
            dtype = cast.dtype("DstT")
            exact = rounding_for(dtype).max_integer
            values = subject.leaves[index]
            finite = np.where(np.isfinite(values), values, 0.5)
            # Of the features that hold integers only.
            integers = (finite == np.round(finite)).all(axis=0)
            largest = int(np.abs(finite[:, integers]).max(initial=0))
            table, rows = _table(subject, graph, cast)
            if largest <= exact and (rows is None or rows - 1 <= exact):
                continue
            beyond = largest > exact
            reach = largest if beyond or rows is None else rows - 1
            yield Found(
                "error" if beyond else "warning",
                f"Input {index} holds ids up to {reach:,} as floats"
                + ("" if beyond else " (by the size of the table)")
                + f" and is cast to {dtype} before they are looked up: beyond "
                f"{exact:,} neighbours become one, such as {exact:,} and "
                f"{exact + 1:,}.",
                "Feed ids as integers, in an input of their own "
                "(`keras.Input(..., dtype='int32')`).",
                table or cast.layer or None,
                reach,
                {"dtype": dtype, "input": index, "limit": exact},
            )
            break


def _table(subject: Subject, graph: Graph, cast: Node) -> tuple[str, int | None]:
    """Returns path and rows of the largest table that ids are looked up in."""
    found: tuple[str, int | None] = ("", None)
    for reader in graph.readers_past(cast, PASSING | {"Cast"}):
        layer = subject.layer_at(reader.layer)
        if not isinstance(layer, keras.layers.Embedding):
            continue
        if layer.input_dim > (found[1] or 0):
            found = reader.layer, layer.input_dim
    return found
