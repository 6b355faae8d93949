"""`prove`: which products of a step run in which dtype, and why it is not faster."""

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfamp.graph import read_operations
from tfamp.graph.bodies import Operation
from tfamp.graph.products import flops_of, is_product, padded, unaligned_sizes
from tfamp.machine import devices as hardware
from tfamp.machine.speeds import Device
from tfamp.models import assignment
from tfamp.numerics.passes import name_layers
from tfamp.records import console
from tfamp.records.console import progress
from tfamp.records.formats import HALF
from tfamp.records.record import Record, TableRecord
from tfamp.records.units import format_bytes, format_share, join_words
from tfamp.stepping.arguments import dataset_of
from tfamp.stepping.step_traces import (
    Marks,
    computing,
    num_bytes,
    plain_name,
    product_dtype,
    trace_step,
)

Shape = tuple[int | None, ...] | None
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_VARIABLES = ("ReadVariableOp", "VarHandleOp")
# TF32 came with this compute capability (A100).
_TF32_SINCE = (8, 0)
# Causes of a smaller share explain nothing; layers beyond these are counted.
_MIN_SHARE, _MAX_LAYERS, _MAX_NAMED = 0.005, 40, 4


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
    causes: tuple[Cause, ...] = ()
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
        for layer, products in [*groups.items()][:_MAX_LAYERS]:
            flops = sum(product.step_flops for product in products)
            ways = (_directed(products, way) for way in ("forward", "backward"))
            share = format_share(flops / self.flops if self.flops else 0.0)
            rows.append((layer or "(no layer)", *ways, _format_flops(flops), share))
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
        parts += [console.table(columns, rows)] if rows else []
        if self.causes:
            text = "Why it is not faster, by the share it concerns (overlapping):"
            parts.append(text)
        for number, cause in enumerate(self.causes, start=1):
            parts.append(
                f"{number}. {cause.name}, {format_share(cause.figure)}: "
                f"{cause.message}\n   Remedy: {cause.remedy}"
            )
        return console.text_of(*parts, *(f"Note: {note}" for note in self.notes))


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
    strategy, with a `train_step` of the user's too, and nothing of it is run: weights,
    optimizers, metrics and seeds are afterwards what they were, bit by bit. A model or
    optimizer that is not built is built. It takes as long as tracing a step.

    TensorFlow fuses and moves operations after that without changing dtypes. What XLA
    makes of a step, and how long each operation takes, a profile tells: TensorBoard's
    profiler with xprof.

    Args:
        model: A Keras model, compiled unless `training` is False.
        data: What `fit` takes: a `tf.data.Dataset` of batches, a `Pipeline`, a
            `PyDataset`, a generator of batches, or arrays (x, y), with sample weights
            or without.
        training: Whether to look at the step of `fit`, or at that of `predict`.
        batch_size: Examples in a batch where `data` are arrays, as in `fit`.
        devices: The devices to judge for; None looks at this machine.

    Returns:
        The record; `print` it for a table.

    Raises:
        TypeError: `model` is no Keras model, or `data` can be read once only or is
            nothing of the above.
        ValueError: The model is not compiled or holds an optimizer of its own that is
            not built; the data are empty or single examples.

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
    with progress("Tracing the step", 2, unit="parts") as done:
        trace = trace_step(model, dataset, training=training)
        done(1)
        operations = read_operations(trace.concrete)
        done(2)
    pairs = _products_of(operations, trace.marks)
    products = [product for _, product in pairs]
    flops = sum(product.step_flops for product in products)
    half = sum(p.step_flops for p in products if p.dtype in HALF)
    proof = Proof(
        model=model.name,
        step="train" if training else "inference",
        batch_size=int(tf.nest.flatten(trace.batch)[0].shape[0]),
        half_share_of_flops=half / flops if flops else 0.0,
        flops=flops,
        operations=tuple(products),
        casts=_casts_of(operations, trace.marks),
        moved_bytes=sum(num_bytes(each) * each.count for each in operations),
        devices=computing(hardware.devices() if devices is None else devices),
        notes=tuple(_notes(model, products)),
    )
    found = [
        *_float32(proof, model),
        *_moving(proof),
        *_shapes(proof, pairs),
        *_of_devices(proof),
    ]
    kept = [cause for cause in found if cause.figure >= _MIN_SHARE]
    causes = tuple(sorted(kept, key=lambda cause: -cause.figure))
    return dataclasses.replace(proof, causes=causes)


def _products_of(
    operations: Sequence[Operation], marks: Marks
) -> list[tuple[Operation, Product]]:
    """Returns the products and convolutions of a trace, those of replicas as one."""
    found: dict[tuple[object, ...], tuple[Operation, Product]] = {}
    for operation in filter(is_product, operations):
        factors = operation.inputs[:2]
        if "Backprop" in operation.op_type and len(operation.inputs) > 2:
            # A gradient takes the shape of its result in place of one factor.
            place = 1 if "Input" in operation.op_type else 0
            factors = (operation.inputs[place], operation.inputs[2])
        product = Product(
            name=plain_name(operation.name),
            op_type=operation.op_type,
            layer=marks.layer_of(operation.name),
            direction="backward" if operation.is_backward else "forward",
            dtype=product_dtype(operation),
            shapes=factors,
            output_shape=operation.outputs[0] if operation.outputs else None,
            flops=flops_of(operation),
            count=operation.count,
            is_counted=operation.is_counted,
        )
        # Replicas have names that differ by the replica alone.
        parts = operation.name.split("/")
        name = "/".join(part for part in parts if not part.startswith("replica_"))
        key = name, product.shapes
        if key in found:
            operation, first = found[key]
            product = dataclasses.replace(first, count=first.count + product.count)
        found[key] = operation, product
    return list(found.values())


def _casts_of(operations: Sequence[Operation], marks: Marks) -> tuple[Cast, ...]:
    """Returns the casts between floating-point dtypes, most bytes first."""
    casts = [each for each in operations if _is_cast(each)]
    of_weights = {
        plain_name(each.name): bool(set(each.sources[:1]) & {*_VARIABLES})
        for each in casts
        if not each.is_backward
    }
    totals: dict[tuple[str, ...], list[int]] = collections.defaultdict(lambda: [0] * 3)
    for each in casts:
        name = plain_name(each.name)
        what = "weights" if of_weights.get(name) else "activations"
        if each.is_backward:
            # The gradient of the cast "x" is "gradient_tape/x/Cast", of one in a loop
            # ".../gradients/x_grad/Cast".
            name = name.rpartition("/")[0].removesuffix("_grad")
            tails = [
                name.rpartition(f"{t}/")[2] for t in ("gradient_tape", "gradients")
            ]
            is_of_weights = any(of_weights.get(tail) for tail in tails)
            what = f"{'weight' if is_of_weights else 'activation'} gradients"
        layer = marks.layer_of(each.name)
        total = totals[layer, what, each.dtype("SrcT"), each.dtype("DstT")]
        total[0] += each.count
        total[1] += each.count * math.prod(dim or 0 for dim in each.outputs[0] or (0,))
        total[2] += each.count * num_bytes(each)
    found = [Cast(*key, *total) for key, total in totals.items()]  # type: ignore[arg-type]
    return tuple(sorted(found, key=lambda cast: -cast.moved_bytes))


def _is_cast(operation: Operation) -> bool:
    """States whether an operation casts floats that are more than a scalar."""
    source, target = operation.dtype("SrcT"), operation.dtype("DstT")
    is_cast = operation.op_type == "Cast" and source != target
    are_floats = source in _FLOATS and target in _FLOATS
    return is_cast and are_floats and operation.outputs[0] != ()


def _notes(model: keras.Model, products: Sequence[Product]) -> Iterator[str]:
    """Yields what else a reader should know."""
    if getattr(model, "jit_compile", False) is True:
        yield (
            "XLA compiles this step and may compute in other dtypes: on CPUs in "
            "float32 what is bfloat16 here. Its program is in a profile (xprof)."
        )
    if unknown := [p for p in products if p.flops is None or not p.is_counted]:
        yield (
            f"The FLOPs of {len(unknown)} products are not known, the first is "
            f"{unknown[0].name!r}: shapes or the number of times a loop runs depend on "
            "data. Each counts at most once."
        )
    if not products:
        yield "The step has no matrix product and no convolution."


def _float32(proof: Proof, model: keras.Model) -> Iterator[Cause]:
    share = proof.share_of_flops("float32")
    wide = {p.layer: None for p in proof.operations if p.dtype == "float32"}
    rows = {row.path: row for row in assignment(model)} if wide else {}
    by_reason: dict[str, list[str]] = {}
    for layer in wide:
        row = rows.get(layer)
        if row is None:
            reason = "made by the loss, the optimizer or the train step itself"
        elif row.compute_dtype in HALF:
            reason = f"computes in {row.compute_dtype}, its own code in float32"
        elif row.rule == "not managed":
            reason = "its dtype policy says so, no rule of tfamp"
        elif row.rule == "policy":
            reason = "the policy says so"
        else:
            reason = f"{row.rule}: {row.reason}" if row.reason else row.rule
        by_reason.setdefault(reason, []).append(layer)
    why = "; ".join(f"{name_layers(ls)} ({why})" for why, ls in by_reason.items())
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
    yield Cause("float32", share, message, remedy)


def _moving(proof: Proof) -> Iterator[Cause]:
    kinds: collections.Counter[str] = collections.Counter()
    for cast in proof.casts:
        kinds[cast.what] += cast.moved_bytes
    share = kinds.total() / proof.moved_bytes if proof.moved_bytes else 0.0
    parts = [f"{format_bytes(size)} of {what}" for what, size in kinds.most_common()]
    yield Cause(
        "casts",
        share,
        f"{sum(cast.count for cast in proof.casts):,} casts move "
        f"{format_bytes(kinds.total())} a step, {format_share(share)} of all bytes if "
        f"nothing is fused: {join_words(parts) if parts else 'none'}; most in "
        f"{name_layers(list(dict.fromkeys(cast.layer for cast in proof.casts)))}.",
        "Give layers between two layers of half precision that dtype too, so that "
        "activations stay in it. Casts of weights cost less with a larger batch.",
    )


def _shapes(
    proof: Proof, pairs: Sequence[tuple[Operation, Product]]
) -> Iterator[Cause]:
    if not any(d.kind == "gpu" and hardware.fast_dtypes(d) for d in proof.devices):
        return
    sizes: dict[str, dict[str, int]] = {}
    for operation, product in pairs:
        if product.dtype in HALF and product.direction == "forward":
            if odd := unaligned_sizes(operation):
                sizes.setdefault(product.layer, {}).update(odd)
    flops = sum(p.step_flops for p in proof.operations if p.layer in sizes)
    parts = [
        f"{layer!r} " + join_words([f"{n} {size} -> {padded(size)}" for n, size in odd])
        for layer, odd in [(x, [*o.items()]) for x, o in sizes.items()][:_MAX_NAMED]
    ]
    if len(sizes) > _MAX_NAMED:
        parts.append(f"{len(sizes) - _MAX_NAMED} layers more")
    yield Cause(
        "shapes",
        flops / proof.flops if proof.flops else 0.0,
        "Sizes that are not multiples of 8 keep tensor cores from full speed: "
        f"{'; '.join(parts)}.",
        "Pad them to what stands behind the arrow: units, channels, vocabulary, batch.",
    )


def _of_devices(proof: Proof) -> Iterator[Cause]:
    for dtype in HALF:
        objection = hardware.objection(f"mixed_{dtype}", proof.devices)
        if objection:
            message, _, remedy = objection.rpartition("; ")
            remedy = remedy[:1].upper() + remedy[1:]
            share = proof.share_of_flops(dtype)
            yield Cause("device", share, f"{message}.", remedy)
    if tf.config.experimental.tensor_float_32_execution_enabled() and any(
        device.kind == "gpu" and (device.compute_capability or (0, 0)) >= _TF32_SINCE
        for device in proof.devices
    ):
        yield Cause(
            "TF32",
            sum(map(proof.share_of_flops, (*HALF, "float32"))),
            "TF32 is on: products in float32 run on tensor cores already, at half the "
            "rate of float16 and bfloat16, so half precision makes them at most twice "
            "as fast.",
            "Compare with it off, by "
            "`tf.config.experimental.enable_tensor_float_32_execution(False)`, to see "
            "what half precision gains over true float32.",
        )
