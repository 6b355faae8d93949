"""The record of a proof: what a step computes in which dtype, and why."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from tfamp.machine.speeds import Device
from tfamp.records import console
from tfamp.records.record import Record, TableRecord
from tfamp.records.units import format_bytes, format_share, join_words

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


_MAX_LAYERS = 40
_MAX_CASTS = 8
_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}
_SOURCES = {
    "graph": "the traced graph",
    "XLA": "XLA's compiled program",
    "rewrite": "the graph as TensorFlow rewrote it",
}


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
            estimate by the roofline for all others. Causes may overlap.
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


@dataclasses.dataclass(frozen=True)
class Proof(TableRecord):
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
        lines = [*self._head(), *self._layers(), *self._casts()]
        if self.unaligned and "shapes" not in {cause.name for cause in self.causes}:
            lines += console.wrapped(
                "Not multiples of 8, which tensor cores of a GPU would want: "
                f"{describe_unaligned(self.unaligned)}."
            )
        if self.causes:
            lines.append(
                "Why it is not faster, by the share of a step (estimated, overlapping):"
            )
        for number, cause in enumerate(self.causes, start=1):
            start = f"{number}. {cause.name}, {format_share(cause.figure)}: "
            lines += console.wrapped(f"{start}{cause.message}", indent=3)
            lines += console.wrapped(f"   Remedy: {cause.remedy}", indent=3)
        for note in self.notes:
            lines += console.wrapped(f"Note: {note}", indent=6)
        return "\n".join(line.rstrip() for line in lines)

    def _head(self) -> list[str]:
        devices = ", ".join(dict.fromkeys(device.name for device in self.devices))
        replicas = f" on {self.num_replicas} replicas" if self.num_replicas > 1 else ""
        dtypes = {product.runs_in for product in self.operations}
        shares = sorted(((self.share_of_flops(d), d) for d in dtypes), reverse=True)
        words = ", ".join(f"{format_share(share)} {dtype}" for share, dtype in shares)
        return console.wrapped(
            f"{self.step.capitalize()} step of {self.model!r}, {self.batch_size:,} "
            f"examples{replicas}, {devices}{', TF32 on' if self.tf32 else ''}."
        ) + console.wrapped(
            f"{_format_flops(self.flops)} in matrix products and convolutions: "
            f"{words or 'none'} (from {_SOURCES[self.source]})."
        )

    def _layers(self) -> list[str]:
        groups: dict[str, list[Product]] = {}
        for product in self.operations:
            groups.setdefault(product.layer, []).append(product)
        rows = []
        for layer, products in list(groups.items())[:_MAX_LAYERS]:
            flops = sum(product.step_flops for product in products)
            row = (
                layer or "(no layer)",
                _directed(products, "forward"),
                _directed(products, "backward"),
                _format_flops(flops).removesuffix("FLOPs"),
                format_share(flops / self.flops if self.flops else 0.0),
            )
            rows.append(row)
        if len(groups) > _MAX_LAYERS:
            more = f"and {len(groups) - _MAX_LAYERS} layers more"
            rows.append((more, "", "", "", ""))
        columns = {
            "layer": {**console.FOLD, "max_width": 36},
            "forward": {**console.FOLD, "max_width": 24},
            "backward": {**console.FOLD, "max_width": 24},
            "FLOPs": console.RIGHT,
            "share": console.RIGHT,
        }
        return _table(columns, rows)

    def _casts(self) -> list[str]:
        rows: list[tuple[str, ...]] = [
            (
                cast.layer or "(no layer)",
                cast.what,
                f"{cast.source_dtype} -> {cast.target_dtype}",
                f"{cast.count:,}",
                format_bytes(cast.moved_bytes),
            )
            for cast in self.casts[:_MAX_CASTS]
        ]
        if rest := self.casts[_MAX_CASTS:]:
            number = sum(cast.count for cast in rest)
            moved = format_bytes(sum(cast.moved_bytes for cast in rest))
            rows.append((f"{len(rest)} kinds more", "", "", f"{number:,}", moved))
        wide = {**console.FOLD, "max_width": 36}
        columns = dict.fromkeys(("casts in", "of", "from -> to"), wide)
        columns |= dict.fromkeys(("number", "bytes moved"), console.RIGHT)
        return _table(columns, rows)


def _table(
    columns: dict[str, dict[str, Any]], rows: Sequence[tuple[str, ...]]
) -> list[str]:
    """Returns the lines of a table, none without rows."""
    return console.text_of(console.table(columns, rows)).splitlines() if rows else []


def _directed(products: list[Product], direction: str) -> str:
    """Returns how many products run in which dtype: "2x bfloat16"."""
    counts: collections.Counter[str] = collections.Counter()
    for product in products:
        if product.direction == direction:
            said = product.dtype
            if product.final_dtype not in ("", product.dtype):
                said = f"{_SHORT.get(said, said)}, run in {product.final_dtype}"
            counts[said] += product.count
    parts = [f"{n}x {name}" if n > 1 else name for name, n in counts.items()]
    return " + ".join(parts)


def _format_flops(flops: int) -> str:
    """Returns a number of FLOPs: "1.2 GFLOPs"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= size:
            return f"{flops / size:.1f} {prefix}FLOPs"
    return f"{flops} FLOPs"
