"""`prove`: which products of a step run in which dtype, and why it is not faster."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.graph import read_operations
from tfamp.graph.bodies import Operation
from tfamp.graph.products import is_product, padded, unaligned_sizes
from tfamp.machine import devices as hardware
from tfamp.machine.speeds import Device
from tfamp.models import assignment
from tfamp.numerics.proof.causes import TracedStep, find_causes
from tfamp.numerics.proof.products import casts_of, is_cast, products_of
from tfamp.numerics.proof.result import Product, Proof, Unaligned
from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.stepping.arguments import dataset_of
from tfamp.stepping.input_waits import bottleneck
from tfamp.stepping.step_traces import (
    HALF,
    Roofline,
    Trace,
    computing,
    num_bytes,
    trace_step,
)

# TF32 came with this compute capability (A100).
_TF32_SINCE = (8, 0)
# Of a step; a smaller gain of the input is noise.
_MIN_INPUT = 0.005


def prove(
    model: keras.Model,
    data: Any,
    *,
    training: bool = True,
    jit_compile: bool | None = None,
    seconds: float | None = None,
    batch_size: int = 32,
    devices: Sequence[Device] | None = None,
    tf32: bool | None = None,
) -> Proof:
    """Returns which products really run in which dtype, and why it is not faster.

    The step that `fit` runs is traced on the first batch, under any policy and any
    strategy, with a `train_step` of the user's too, and nothing of it is run: weights,
    optimizers, metrics and seeds are afterwards what they were, bit by bit. A model or
    optimizer that is not built is built. It takes as long as tracing a step, and with
    XLA as compiling one.

    TensorFlow fuses and moves operations after that without changing dtypes; with XLA
    the dtypes are read from the compiled program, which may differ: on CPUs it
    computes bfloat16 in float32.

    Args:
        model: A Keras model, compiled unless `training` is False.
        data: What `fit` takes: a `tf.data.Dataset` of batches, a `Pipeline`, a
            `PyDataset`, a generator of batches, or arrays (x, y), with sample weights
            or without.
        training: Whether to look at the step of `fit`, or at that of `predict`.
        jit_compile: Whether to compile the step with XLA and read the program; None
            does as the model was compiled to (`jit_compile`).
        seconds: Measure for about so long how much the input holds up training, by
            `tfamp.data.bottleneck`, which runs steps and puts the model back; None
            measures nothing.
        batch_size: Examples in a batch where `data` are arrays, as in `fit`.
        devices: The devices to judge for; None looks at this machine.
        tf32: Whether float32 runs as TF32 on them where they can; None asks
            TensorFlow.

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
    dataset = dataset_of(data, batch_size)
    if seconds is not None:
        seconds = checks.positive("seconds", seconds)
    if seconds is not None and not training:
        raise ValueError(
            f"`seconds` is {seconds!r} with `training=False`; expected None, since the "
            "input is measured with train steps. Leave one of them out."
        )
    if jit_compile is None:
        jit_compile = bool(getattr(model, "jit_compile", False))
    with progress("Tracing the step", 2, unit="parts") as done:
        trace = trace_step(model, dataset, training=training, jit_compile=jit_compile)
        done(1)
        operations = read_operations(trace.concrete)
        done(2)
    used = computing(hardware.devices() if devices is None else devices)
    if tf32 is None:
        tf32 = bool(tf.config.experimental.tensor_float_32_execution_enabled())
    tf32 = tf32 and any(
        device.kind == "gpu" and (device.compute_capability or (0, 0)) >= _TF32_SINCE
        for device in used
    )
    gain, advice = None, ""
    if seconds is not None:
        measured = bottleneck(model, dataset, seconds=seconds)
        gain, advice = measured.possible_gain, measured.advice
    pairs = products_of(operations, trace.marks, trace.final)
    products = [product for _, product in pairs]
    flops = sum(product.step_flops for product in products)
    half = sum(p.step_flops for p in products if p.runs_in in HALF)
    proof = Proof(
        model=model.name,
        step="train" if training else "inference",
        batch_size=int(tf.nest.flatten(trace.batch)[0].shape[0]),
        half_share_of_flops=half / flops if flops else 0.0,
        flops=flops,
        operations=tuple(products),
        casts=casts_of(operations, trace.marks),
        causes=(),
        unaligned=_unaligned(pairs, flops),
        moved_bytes=sum(num_bytes(each) * each.count for each in operations),
        reasons=_reasons(model, products),
        devices=tuple(used),
        tf32=tf32,
        source=trace.source,
        num_replicas=model.distribute_strategy.num_replicas_in_sync,
        possible_gain=gain,
        notes=tuple(_notes(model, trace, products, gain)),
    )
    step = _traced_step(proof, trace, operations, pairs, input_advice=advice)
    return dataclasses.replace(proof, causes=find_causes(step))


def _traced_step(
    proof: Proof,
    trace: Trace,
    operations: Sequence[Operation],
    pairs: Sequence[tuple[Operation, Product]],
    *,
    input_advice: str,
) -> TracedStep:
    """Returns what the causes are found in."""
    roofline = Roofline(proof.devices, proof.tf32)
    casts = [each for each in operations if is_cast(each)]
    rest = [each for each in operations if not is_product(each) and not is_cast(each)]
    outer = [each for each in rest if not trace.marks.layer_of(each.name)]
    cast_cost, other_cost, outer_cost = (
        sum(roofline.cost(each) * each.count for each in kind)
        for kind in (casts, rest, outer)
    )
    return TracedStep(
        proof,
        # The operation is that of one replica.
        costs=[
            roofline.cost(operation, product.runs_in) * product.count
            for operation, product in pairs
        ],
        is_small=[
            (product.flops or 0)
            < roofline.flops_per_byte(product.runs_in) * num_bytes(operation)
            for operation, product in pairs
        ],
        cast_cost=cast_cost,
        other_cost=other_cost,
        outer_cost=outer_cost,
        input_advice=input_advice,
    )


def _unaligned(
    products: Sequence[tuple[Operation, Product]], flops: int
) -> tuple[Unaligned, ...]:
    """Returns layers in half precision with sizes that tensor cores dislike."""
    sizes: dict[str, dict[str, int]] = {}
    totals: collections.Counter[str] = collections.Counter()
    for operation, product in products:
        totals[product.layer] += product.step_flops
        if product.dtype in HALF and product.direction == "forward":
            if odd := unaligned_sizes(operation):
                sizes.setdefault(product.layer, {}).update(odd)
    found = [
        Unaligned(
            layer,
            odd,
            {name: padded(size) for name, size in odd.items()},
            totals[layer] / flops if flops else 0.0,
        )
        for layer, odd in sizes.items()
    ]
    return tuple(sorted(found, key=lambda each: -each.share_of_flops))


def _reasons(model: keras.Model, products: Sequence[Product]) -> dict[str, str]:
    """Returns why layers with products in float32 are in float32."""
    layers = {product.layer for product in products if product.dtype == "float32"}
    if not layers:
        return {}
    rows = {row.path: row for row in assignment(model)}
    reasons = {}
    for layer in sorted(layers):
        row = rows.get(layer)
        if row is None:
            reasons[layer] = "made by the loss, the optimizer or the train step itself"
        elif row.compute_dtype in HALF:
            reasons[layer] = (
                f"the layer computes in {row.compute_dtype}, its own code in float32"
            )
        elif row.rule == "not managed":
            reasons[layer] = "its dtype policy says so, no rule of tfamp"
        elif row.rule == "policy":
            reasons[layer] = "the policy says so"
        else:
            reasons[layer] = f"{row.rule}: {row.reason}" if row.reason else row.rule
    return reasons


def _notes(
    model: keras.Model,
    trace: Trace,
    products: Sequence[Product],
    possible_gain: float | None,
) -> Iterator[str]:
    """Yields what else a reader should know."""
    if trace.note:
        yield f"{trace.note}; dtypes are those of the graph."
    if trace.source != "graph" and (
        missing := [p for p in products if not p.final_dtype]
    ):
        yield (
            f"{len(missing)} of {len(products)} products have no counterpart in what "
            f"was read last, the first is {missing[0].name!r}; their dtypes are those "
            "of the graph."
        )
    if inferred := [p for p in products if p.is_inferred]:
        yield (
            f"The final dtypes of {len(inferred)} of {len(products)} products are "
            f"inferred, the first is {inferred[0].name!r}: the compiled program does "
            "not say which of its operations they became, and all of those run in the "
            "dtype shown."
        )
    if trace.source == "rewrite":
        yield (
            "TensorFlow's own mixed precision is on: dtypes are those after it; the "
            "casts that it adds are not counted."
        )
    if unknown := [p for p in products if p.flops is None or not p.is_counted]:
        yield (
            f"The FLOPs of {len(unknown)} products are not known, the first is "
            f"{unknown[0].name!r}: shapes or the number of times a loop runs depend on "
            "data. Each counts at most once."
        )
    if not products:
        yield "The step has no matrix product and no convolution."
    if getattr(model, "run_eagerly", False):
        yield (
            "`run_eagerly=True`: operations start one by one from Python, which costs "
            "more than any dtype saves."
        )
    if possible_gain is not None and possible_gain < _MIN_INPUT:
        yield "The input holds up less than 0.5 % of a step (measured)."
