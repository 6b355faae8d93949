"""The record of a proof: products, casts, causes, and their table."""

import dataclasses
from typing import Literal

from tfamp.results import Device, Record

HALF = ("float16", "bfloat16")
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


@dataclasses.dataclass(frozen=True)
class Proof(Record):
    """What a step computes in which dtype, and why it is not faster.

    Args:
        model: The model's name.
        step: "train" or "inference".
        batch_size: Examples in the batch, over all replicas.
        half_share_of_flops: Part of the FLOPs of matrix products and convolutions that
            run in float16 or bfloat16, in [0, 1]; 0 where there are none.
        flops: FLOPs of matrix products and convolutions in a step.
        operations: Each product and convolution.
        casts: Casts between floating-point dtypes, most bytes first. Scalars are left
            out.
        causes: Why it is not faster, the largest figure first.
        unaligned: Layers in half precision whose sizes are not multiples of 8.
        moved_bytes: Bytes that all operations read and write, if nothing is fused.
        reasons: Why a layer with products in float32 is in float32, by its path.
        devices: The devices that the step runs on.
        tf32: Whether products of float32 run as TF32 on them.
        source: What the dtypes were read from last: the traced "graph", the program
            that "XLA" compiled, or the graph after TensorFlow's "rewrite" of it.
        num_replicas: Replicas in step.
        possible_gain: What a perfect input would save of a step, None unmeasured.
        notes: What else a reader should know.
    """

    model: str
    step: Literal["train", "inference"]
    batch_size: int
    half_share_of_flops: float
    flops: int
    operations: tuple[Product, ...]
    casts: tuple[Cast, ...]
    causes: tuple[Cause, ...]
    unaligned: tuple[Unaligned, ...]
    moved_bytes: int
    reasons: dict[str, str] = dataclasses.field(hash=False)
    devices: tuple[Device, ...]
    tf32: bool = False
    source: Literal["graph", "XLA", "rewrite"] = "graph"
    num_replicas: int = 1
    possible_gain: float | None = None
    notes: tuple[str, ...] = ()

    def share_of_flops(self, dtype: str) -> float:
        """Returns the part of the FLOPs that runs in a dtype, in [0, 1]."""
        found = sum(p.step_flops for p in self.operations if p.runs_in == dtype)
        return found / self.flops if self.flops else 0.0

    def table(self) -> str:
        """Returns layers, casts and causes as text of at most 110 columns."""
        # Here, so that nothing is paid for before something is printed.
        from tfamp.numerics.rendering import render

        return render(self)

    def __str__(self) -> str:
        """Returns the table."""
        return self.table()
