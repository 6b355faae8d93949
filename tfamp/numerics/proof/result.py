"""The record of a proof: what a step computes in which dtype, and why."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from tfamp.machine.speeds import Device
from tfamp.records import console
from tfamp.records.record import Record, TableRecord
from tfamp.records.units import format_bytes, format_share

Shape = tuple[int | None, ...] | None

_MAX_LAYERS = 40
_MAX_CASTS = 8


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
        dtype: The dtype of its factors, of the wider one if they differ.
        shapes: Shapes of the factors.
        output_shape: Shape of the result.
        flops: Floating-point operations of one run, two for a multiply-add; None
            where shapes are not known.
        count: How often it runs in a step, over all replicas.
        is_counted: Whether `count` is known; in a loop that data end it is 1.
    """

    name: str
    op_type: str
    layer: str
    direction: Literal["forward", "backward"]
    dtype: str
    shapes: tuple[Shape, ...]
    output_shape: Shape
    flops: int | None
    count: int = 1
    is_counted: bool = True

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
class Cause(Record):
    """A reason why half precision brings less than it could.

    Args:
        name: Which one; stable, for scripts.
        figure: Part of the step's FLOPs that it concerns, in [0, 1]; of casts the part
            of the bytes that the step moves if nothing is fused. Causes may overlap.
        message: What was found, with the figures of this model.
        remedy: What to do.
    """

    name: Literal["float32", "casts", "shapes", "device", "TF32"]
    figure: float
    message: str
    remedy: str


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
        moved_bytes: Bytes that all operations read and write, if nothing is fused.
        devices: The devices that the step runs on.
        tf32: Whether products of float32 run as TF32 on them.
        num_replicas: Replicas in step.
        causes: Why it is not faster, the largest figure first.
        notes: What else a reader should know.
    """

    model: str
    step: Literal["train", "inference"]
    batch_size: int
    half_share_of_flops: float
    flops: int
    operations: tuple[Product, ...]
    casts: tuple[Cast, ...]
    moved_bytes: int
    devices: tuple[Device, ...]
    tf32: bool = False
    num_replicas: int = 1
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()

    def share_of_flops(self, dtype: str) -> float:
        """Returns the part of the FLOPs that runs in a dtype, in [0, 1]."""
        found = sum(p.step_flops for p in self.operations if p.dtype == dtype)
        return found / self.flops if self.flops else 0.0

    def table(self) -> str:
        """Returns layers, casts and causes as text of at most 110 columns."""
        lines = [*self._head(), *self._layers(), *self._casts()]
        if self.causes:
            lines.append(
                "Why it is not faster, by the share it concerns (overlapping):"
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
        dtypes = {product.dtype for product in self.operations}
        shares = sorted(((self.share_of_flops(d), d) for d in dtypes), reverse=True)
        words = ", ".join(f"{format_share(share)} {dtype}" for share, dtype in shares)
        return console.wrapped(
            f"{self.step.capitalize()} step of {self.model!r}, {self.batch_size:,} "
            f"examples{replicas}, {devices}{', TF32 on' if self.tf32 else ''}."
        ) + console.wrapped(
            f"{_format_flops(self.flops)} in matrix products and convolutions: "
            f"{words or 'none'}."
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
        wide = {name: {**console.FOLD, "max_width": 24} for name in _DIRECTIONS}
        layer_column = {"layer": {**console.FOLD, "max_width": 36}}
        figures = dict.fromkeys(("FLOPs", "share"), console.RIGHT)
        return _table({**layer_column, **wide, **figures}, rows)

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


_DIRECTIONS = ("forward", "backward")


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
            counts[product.dtype] += product.count
    parts = [f"{n}x {name}" if n > 1 else name for name, n in counts.items()]
    return " + ".join(parts)


def _format_flops(flops: int) -> str:
    """Returns a number of FLOPs: "1.2 GFLOPs"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= size:
            return f"{flops / size:.1f} {prefix}FLOPs"
    return f"{flops} FLOPs"
