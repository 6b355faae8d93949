"""`prove`: which products of a step run in which dtype, and why it is not faster."""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfamp.graph import read_operations
from tfamp.graph.bodies import Operation, is_backward
from tfamp.graph.products import flops_of, is_product
from tfamp.machine import devices as hardware
from tfamp.machine.speeds import Device
from tfamp.models import assignment
from tfamp.numerics.passes import grouped, name_layers, why_float32
from tfamp.records import console
from tfamp.records.findings import Finding
from tfamp.records.formats import HALF
from tfamp.records.record import Record, TableRecord
from tfamp.records.units import format_bytes, format_share
from tfamp.stepping.arguments import dataset_of
from tfamp.stepping.step_traces import (
    Marks,
    num_bytes,
    plain_name,
    product_dtype,
    trace_step,
)

Shape = tuple[int | None, ...] | None
_FLOATS = {"float64", "float32", "float16", "bfloat16"}
# Causes and layers of a smaller share explain nothing.
_MIN_SHARE = 0.005


@dataclasses.dataclass(frozen=True)
class Product(Record):
    """A matrix product or convolution of the step.

    `layer` is the path of the layer that made it, "" for the loss, the optimizer and a
    custom train step. `dtype` is that of its factors, of the wider one if they differ,
    `shapes` are theirs. `flops` are those of one run, two for a multiply-add, None
    where they depend on data. `count` is how often it runs in a step, on all replicas.
    """

    name: str
    op_type: str
    layer: str
    direction: Literal["forward", "backward"]
    dtype: str
    shapes: tuple[Shape, ...]
    output_shape: Shape
    flops: int | None
    count: int

    @property
    def step_flops(self) -> int:
        """Floating-point operations of all runs in a step."""
        return (self.flops or 0) * self.count


@dataclasses.dataclass(frozen=True)
class Cast(Record):
    """Casts from one dtype to another in one layer ("" for none), all of a step."""

    layer: str
    source_dtype: str
    target_dtype: str
    count: int
    elements: int
    moved_bytes: int


@dataclasses.dataclass(frozen=True)
class Proof(TableRecord):
    """What a step computes in which dtype, and why it is not faster.

    `flops` and `half_share_of_flops` are of matrix products and convolutions, which
    `operations` holds; `casts` between floating-point dtypes come with most bytes
    first, without scalars. `moved_bytes` is what all operations read and write if
    nothing is fused. `causes` ("float32", "casts", "device") say why half precision
    brings no more, the largest figure first: the part of the step's FLOPs that it
    concerns, of casts the part of the bytes; they may overlap.
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
    causes: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    def share_of_flops(self, dtype: str) -> float:
        """Returns the part of the FLOPs that runs in a dtype, in [0, 1]."""
        found = sum(p.step_flops for p in self.operations if p.dtype == dtype)
        return found / self.flops if self.flops else 0.0

    def table(self) -> str:
        """Returns layers and causes as text of at most 110 columns."""
        dtypes = {product.dtype for product in self.operations}
        shares = sorted(((self.share_of_flops(d), d) for d in dtypes), reverse=True)
        words = ", ".join(f"{format_share(share)} {dtype}" for share, dtype in shares)
        devices = ", ".join(dict.fromkeys(device.name for device in self.devices))
        parts: list[Any] = [
            f"{self.step.capitalize()} step of {self.model!r}, {self.batch_size:,} "
            f"examples, {devices}. {_format_flops(self.flops)} in matrix products and "
            f"convolutions: {words or 'none'}."
        ]
        groups: dict[str, list[Product]] = {}
        for product in self.operations:
            groups.setdefault(product.layer, []).append(product)
        rows = []
        for layer, products in groups.items():
            flops = sum(product.step_flops for product in products)
            if flops > _MIN_SHARE * self.flops:
                counts = collections.Counter(p.dtype for p in products)
                ran = " + ".join(f"{n}x {dtype}" for dtype, n in counts.items())
                share = format_share(flops / self.flops)
                rows.append((layer or "(no layer)", ran, _format_flops(flops), share))
        columns: Any = dict.fromkeys(("layer", "products"), console.FOLD)
        columns |= dict.fromkeys(("FLOPs", "share"), console.RIGHT)
        parts += [console.table(columns, rows)] if rows else []
        if self.causes:
            parts.append(
                "Why it is not faster, by the share it concerns (overlapping):"
            )
        for number, cause in enumerate(self.causes, start=1):
            parts.append(
                f"{number}. {cause.rule}, {format_share(cause.figure or 0)}: "
                f"{cause.message}\n   Remedy: {cause.remedy}"
            )
        return console.text_of(*parts, *(f"Note: {note}" for note in self.notes))


def _format_flops(flops: int) -> str:
    """Returns a number of FLOPs: "1.2 GFLOPs"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= size:
            return f"{flops / size:.1f} {prefix}FLOPs"
    return f"{flops} FLOPs"


def prove(
    model: keras.Model,
    data: Any,
    *,
    training: bool = True,
    batch_size: int = 32,
    devices: Sequence[Device] | None = None,
) -> Proof:
    """Returns which products really run in which dtype, and why it is not faster.

    The step that `fit` runs is traced on the first batch, under any policy and any
    strategy, and nothing of it is run: the model is afterwards what it was.

    Args:
        model: A Keras model, compiled unless `training` is False.
        data: What `fit` takes; of arrays the first `batch_size` examples.
        training: Whether to look at the step of `fit`, or at that of `predict`.
        batch_size: Examples in a batch of arrays.
        devices: The devices to judge for; None looks at this machine.

    Raises:
        TypeError: `model` is no Keras model, or `data` are nothing that `fit` takes.
        ValueError: The model is not compiled, or the data are empty.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
        >>> model.compile("sgd", "mse")
        >>> proof = prove(model, (tf.zeros((32, 4)), tf.zeros((32, 8))))
        >>> proof.flops  # forward and the weights' gradient, 2 * 32 * 4 * 8 each
        4096
        >>> proof.half_share_of_flops
        0.0
    """
    # Of single inputs the step of `predict` needs no targets.
    dataset = dataset_of(data, batch_size, needs_targets=training)
    trace = trace_step(model, dataset, training=training)
    operations = read_operations(trace.concrete)
    products = _products_of(operations, trace.marks)
    flops = sum(product.step_flops for product in products)
    half = sum(p.step_flops for p in products if p.dtype in HALF)
    notes = []
    if getattr(model, "jit_compile", False) is True:
        notes.append(
            "XLA compiles this step and may compute in other dtypes: see a profile."
        )
    if unknown := [product for product in products if product.flops is None]:
        notes.append(
            f"The FLOPs of {len(unknown)} products are not known, the first is "
            f"{unknown[0].name!r}: they depend on data, and count as none."
        )
    if not products:
        notes.append("The step has no matrix product and no convolution.")
    proof = Proof(
        model=model.name,
        step="train" if training else "inference",
        batch_size=int(tf.nest.flatten(trace.batch)[0].shape[0]),
        half_share_of_flops=half / flops if flops else 0.0,
        flops=flops,
        operations=products,
        casts=_casts_of(operations, trace.marks),
        moved_bytes=sum(num_bytes(each) * each.count for each in operations),
        devices=hardware.computing_of(
            hardware.devices() if devices is None else devices
        ),
        notes=tuple(notes),
    )
    found = [_float32(proof, model), _moving(proof)]
    for dtype in HALF:
        if objection := hardware.objection(f"mixed_{dtype}", proof.devices):
            text, _, remedy = objection.rpartition("; ")
            remedy, share = remedy[:1].upper() + remedy[1:], proof.share_of_flops(dtype)
            found.append(Finding("device", "note", f"{text}.", remedy, figure=share))
    by_figure = sorted(found, key=lambda cause: -(cause.figure or 0))
    causes = tuple(each for each in by_figure if (each.figure or 0) >= _MIN_SHARE)
    return dataclasses.replace(proof, causes=causes)


def _products_of(operations: Sequence[Operation], marks: Marks) -> tuple[Product, ...]:
    """Returns the products and convolutions of a trace, those of replicas as one."""
    found: dict[tuple[object, ...], Product] = {}
    for operation in filter(is_product, operations):
        factors = operation.inputs[:2]
        if "Backprop" in operation.op_type and len(operation.inputs) > 2:
            # A gradient takes the shape of its result in place of one factor.
            place = 1 if "Input" in operation.op_type else 0
            factors = (operation.inputs[place], operation.inputs[2])
        # Replicas have names that differ by the replica alone.
        parts = operation.name.split("/")
        name = "/".join(part for part in parts if not part.startswith("replica_"))
        same = found.get((name, factors))
        found[name, factors] = Product(
            name=plain_name(operation.name),
            op_type=operation.op_type,
            layer=marks.layer_of(operation.name),
            direction="backward" if is_backward(operation.name) else "forward",
            dtype=product_dtype(operation),
            shapes=factors,
            output_shape=operation.outputs[0] if operation.outputs else None,
            flops=flops_of(operation) if operation.is_counted else None,
            count=operation.count + (same.count if same is not None else 0),
        )
    return tuple(found.values())


def _casts_of(operations: Sequence[Operation], marks: Marks) -> tuple[Cast, ...]:
    """Returns the casts of more than a scalar between floats, most bytes first."""
    totals: dict[tuple[str, ...], list[int]] = collections.defaultdict(lambda: [0] * 3)
    for each in operations:
        source, target = each.dtype("SrcT"), each.dtype("DstT")
        is_cast = each.op_type == "Cast" and source != target
        if is_cast and {source, target} <= _FLOATS and each.outputs[0] != ():
            elements = math.prod(dim or 0 for dim in each.outputs[0] or (0,))
            total = totals[marks.layer_of(each.name), source, target]
            for i, one in enumerate((1, elements, num_bytes(each))):
                total[i] += each.count * one
    found = [Cast(*key, *total) for key, total in totals.items()]  # type: ignore[arg-type]
    return tuple(sorted(found, key=lambda cast: -cast.moved_bytes))


def _float32(proof: Proof, model: keras.Model) -> Finding:
    share = proof.share_of_flops("float32")
    rows = {row.path: row for row in assignment(model)} if share else {}

    def reason(layer: str) -> str:
        row = rows.get(layer)
        if row is None:
            return "made by the loss, the optimizer or the train step itself"
        if row.compute_dtype in HALF:
            return f"computes in {row.compute_dtype}, its own code in float32"
        return why_float32(row)

    layers = [p.layer for p in proof.operations if p.dtype == "float32"]
    why = grouped((layer, reason(layer)) for layer in layers)
    message = f"{format_share(share)} of the FLOPs run in float32: {why}."
    remedy = (
        "If they may lose precision, name other layers in `keep_float32` of "
        "`tfamp.enable` or `tfamp.apply`, and compare the accuracy."
    )
    if share == 1.0:
        best = hardware.recommend(proof.devices)
        message = f"Every matrix product and convolution runs in float32: {why}."
        remedy = f"Leave it: {best.reason}"
        if best.policy != "float32":
            remedy = (
                f"Call `tfamp.apply(model, {best.policy!r})`, or `tfamp.enable` before "
                f"the model is built: {best.reason}"
            )
    return Finding("float32", "note", message, remedy, figure=share)


def _moving(proof: Proof) -> Finding:
    moved = sum(cast.moved_bytes for cast in proof.casts)
    share = moved / proof.moved_bytes if proof.moved_bytes else 0.0
    layers = name_layers(list(dict.fromkeys(cast.layer for cast in proof.casts)))
    return Finding(
        "casts",
        "note",
        f"{sum(cast.count for cast in proof.casts):,} casts move {format_bytes(moved)} "
        f"a step, {format_share(share)} of all bytes if nothing is fused; most in "
        f"{layers}.",
        "Give layers between two layers of half precision that dtype too, so that "
        "activations stay in it. Casts of weights cost less with a larger batch.",
        figure=share,
    )
