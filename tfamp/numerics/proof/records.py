"""The parts of a proof: products, casts, sizes, causes."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from tfamp.records.record import Record
from tfamp.records.units import join_words

# In a sentence; more are counted.
MAX_NAMED = 4
Direction = Literal["forward", "backward"]
CauseName = Literal[
    "input",
    "float32",
    "casts",
    "memory",
    "small products",
    "shapes",
    "device",
    "TF32",
    "compiler",
]
Shape = tuple[int | None, ...] | None


@dataclasses.dataclass(frozen=True)
class Product(Record):
    """A matrix product or convolution of the step.

    Args:
        name: The operation's name, without what a replica adds to it.
        op_type: Its type, such as "MatMul" or "Conv2DBackpropFilter".
        layer: Path of the layer that made it, as `tfamp.assignment` names layers;
            "" for the loss, the optimizer and a custom train step.
        direction: "forward", or "backward" for a gradient. What a gradient computes
            anew to save memory counts as "forward" again.
        dtype: The dtype of its factors in the graph, of the wider one if they differ.
        shapes: Shapes of the factors.
        output_shape: Shape of the result.
        flops: Floating-point operations of one run, two for a multiply-add; None
            where shapes are not known.
        count: How often it runs in a step, over all replicas.
        is_counted: Whether `count` is known; in a loop that data end it is 1.
        final_dtype: The dtype in what runs after that: XLA's program, or the graph as
            TensorFlow's own mixed precision rewrote it; "" where neither was read or
            has no such operation.
        is_inferred: Whether `final_dtype` is that of compiled operations without a name
            of which one must be this one; they all run in it.
    """

    name: str
    op_type: str
    layer: str
    direction: Direction
    dtype: str
    shapes: tuple[Shape, ...]
    output_shape: Shape
    flops: int | None
    count: int = 1
    is_counted: bool = True
    final_dtype: str = ""
    is_inferred: bool = False

    @property
    def runs_in(self) -> str:
        """The dtype it really runs in, as far as is known."""
        return self.final_dtype or self.dtype

    @property
    def step_flops(self) -> int:
        """Floating-point operations of all runs in a step."""
        return (self.flops or 0) * self.count


@dataclasses.dataclass(frozen=True)
class Cast(Record):
    """Casts of one kind in one layer.

    Args:
        layer: Path of the layer they are made for; "" for none.
        what: What is cast.
        source_dtype: From which dtype.
        target_dtype: To which.
        count: How many run in a step.
        elements: Numbers cast in a step.
        moved_bytes: Bytes read and written in a step.
    """

    layer: str
    what: Literal["weights", "activations", "weight gradients", "activation gradients"]
    source_dtype: str
    target_dtype: str
    count: int
    elements: int
    moved_bytes: int


@dataclasses.dataclass(frozen=True)
class Unaligned(Record):
    """A layer with sizes that are not multiples of 8.

    Args:
        layer: Path of the layer.
        sizes: Such sizes by name, such as "units" or "channels in".
        padded: What each would be padded.
        share_of_flops: Part of the step's FLOPs that the layer has.
    """

    layer: str
    sizes: dict[str, int] = dataclasses.field(hash=False)
    padded: dict[str, int] = dataclasses.field(hash=False)
    share_of_flops: float


@dataclasses.dataclass(frozen=True)
class Cause(Record):
    """A reason why half precision brings less than it could.

    Args:
        name: Which one; stable, for scripts.
        figure: Part of a step that it concerns, in [0, 1]: measured for "input", an
            estimate by `numerics.cost` for all others. Causes may overlap.
        message: What was found, with the figures of this model.
        remedy: What to do.
    """

    name: CauseName
    figure: float
    message: str
    remedy: str


def describe_unaligned(found: Sequence[Unaligned]) -> str:
    """Returns the first layers with their sizes and what they would be padded.

    Example:
        >>> describe_unaligned([Unaligned("dense", {"units": 10}, {"units": 16}, 0.5)])
        "'dense' units 10 -> 16"
    """
    parts = [
        f"{each.layer!r} "
        + join_words(
            [f"{key} {n} -> {each.padded[key]}" for key, n in each.sizes.items()]
        )
        for each in found[:MAX_NAMED]
    ]
    if len(found) > MAX_NAMED:
        parts.append(f"{len(found) - MAX_NAMED} layers more")
    return "; ".join(parts)
