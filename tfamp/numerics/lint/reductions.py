"""The rule on long sums in half precision."""

import math
from collections.abc import Iterator

from tfamp.numerics.lint.graph import Graph, Node
from tfamp.numerics.lint.rule import Found, rule
from tfamp.numerics.lint.subject import Subject
from tfamp.records import formats
from tfamp.records.formats import HALF

# TensorFlow adds bfloat16 in float32, but for running sums; float16 as it is.
_SUMS = ("Sum", "Mean", "Prod", "EuclideanNorm")
_RUNNING = ("Cumsum", "Cumprod")
_POOLS = ("AvgPool", "AvgPool3D")


@rule("long-reduction", needs=("graph",))
def long_reduction(subject: Subject) -> Iterator[Found]:
    """Sums of more terms than the format has steps between 1 and 2."""
    graph: Graph = subject.graph  # type: ignore[assignment]
    seen = set()
    for node in graph.of_type(*_SUMS, *_RUNNING, *_POOLS):
        dtype = node.dtype()
        limit = _most_terms(node.op, dtype)
        if limit is None or (node.layer, node.op) in seen:
            continue
        count = _num_terms(node)
        if count is None or count <= limit:
            continue
        seen.add((node.layer, node.op))
        stops = _stops_at(dtype)
        yield Found(
            "warning",
            f"{node.op} adds {count:,} terms in {dtype}, where a sum of ones stops at "
            f"{stops:,} and "
            + (
                f"one of {formats.FORMATS[dtype].max / count:.3g} each ends in inf."
                if dtype == "float16"
                else "all that follows is lost."
            ),
            "Cast to float32 before the sum and back after it, give the layer "
            "`dtype='float32'`, or build the model under `tfamp.enable`, which does so "
            "for Keras's layers and running sums.",
            node.layer or None,
            count,
            {"dtype": dtype, "operation": node.name, "limit": limit},
        )


def _stops_at(dtype: str) -> int:
    """Returns where a running sum of ones ends: 1 is half the spacing there."""
    return int(2 / formats.FORMATS[dtype].epsilon)


def _most_terms(op: str, dtype: str) -> int | None:
    """Returns how many terms are added well enough, None for any number.

    Measured on a CPU: a window of 256 equal numbers is exact in float16, one of 1024
    is off by 12 %; a sum of 2048 ones over a middle axis is exact, one of 4096 is
    2048. GPUs add in float32, but the sum itself still overflows.
    """
    if dtype not in HALF:
        return None
    if op in _RUNNING:
        return _stops_at(dtype)
    if dtype == "bfloat16":
        return None
    return _stops_at(dtype) // 4 if op in _POOLS else _stops_at(dtype)


def _num_terms(node: Node) -> int | None:
    """Returns how many numbers go into one result, None where it is not known."""
    if node.op in _POOLS:
        return math.prod(node.definition.attr["ksize"].list.i)
    shape, axes = node.shape(0), node.value(1)
    if shape is None or axes is None:
        return None
    sizes = [shape[int(axis)] for axis in axes.ravel()]
    known = [size for size in sizes if size is not None]
    # A batch of unknown size has at least one example.
    return math.prod(known)
