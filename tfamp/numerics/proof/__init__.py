"""`prove`: which products of a step run in which dtype, and why it is not faster."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.graph import read_operations
from tfamp.machine import devices as hardware
from tfamp.machine.speeds import Device
from tfamp.models import assignment
from tfamp.numerics.proof.causes import find_causes
from tfamp.numerics.proof.products import casts_of, products_of
from tfamp.numerics.proof.result import Product, Proof
from tfamp.records.console import progress
from tfamp.records.formats import HALF
from tfamp.stepping.arguments import dataset_of
from tfamp.stepping.step_traces import computing, num_bytes, trace_step

# TF32 came with this compute capability (A100).
_TF32_SINCE = (8, 0)
# TensorFlow's own mixed precision, by the names of its options.
_REWRITES = (
    "auto_mixed_precision",
    "auto_mixed_precision_mkl",
    "auto_mixed_precision_onednn_bfloat16",
)


def prove(
    model: keras.Model,
    data: Any,
    *,
    training: bool = True,
    batch_size: int = 32,
    devices: Sequence[Device] | None = None,
    tf32: bool | None = None,
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
    with progress("Tracing the step", 2, unit="parts") as done:
        trace = trace_step(model, dataset, training=training)
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
    pairs = products_of(operations, trace.marks)
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
        casts=casts_of(operations, trace.marks),
        moved_bytes=sum(num_bytes(each) * each.count for each in operations),
        devices=tuple(used),
        tf32=tf32,
        num_replicas=model.distribute_strategy.num_replicas_in_sync,
        notes=tuple(_notes(model, products)),
    )
    causes = find_causes(proof, pairs, _reasons(model, products))
    return dataclasses.replace(proof, causes=causes)


def _reasons(model: keras.Model, products: Sequence[Product]) -> dict[str, str]:
    """Returns why layers with products in float32 are in float32."""
    layers = {product.layer for product in products if product.dtype == "float32"}
    rows = {row.path: row for row in assignment(model)} if layers else {}
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


def _notes(model: keras.Model, products: Sequence[Product]) -> Iterator[str]:
    """Yields what else a reader should know."""
    if getattr(model, "jit_compile", False) is True:
        yield (
            "XLA compiles this step and may compute in other dtypes: on CPUs in "
            "float32 what is bfloat16 here. Its program is in a profile (xprof)."
        )
    options = tf.config.optimizer.get_experimental_options()
    if any(options.get(name) for name in _REWRITES):
        yield (
            "TensorFlow's own mixed precision is on, and changes dtypes after this "
            "trace; turn it off to train in those that you see."
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
