"""Traces the step that `fit` or `predict` runs, and leaves the model as it was."""

import contextlib
import random
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from tfamp.graph.compiled import CompiledProduct, read_hlo, read_optimized
from tfamp.keras_hooks import trainer
from tfamp.machine import cpus
from tfamp.records import checks
from tfamp.stepping.arguments import build, check_model, first_batch
from tfamp.stepping.layer_marks import Marks
from tfamp.stepping.unchanged import unchanged

# TensorFlow's own mixed precision, by the names of its options.
_REWRITES = (
    "auto_mixed_precision",
    "auto_mixed_precision_mkl",
    "auto_mixed_precision_onednn_bfloat16",
)


class Trace(NamedTuple):
    """A traced step.

    Attributes:
        source: What was read last: the "graph", the program of "XLA", or the graph
            after TensorFlow's "rewrite".
        note: Why that is not what really runs, "" where it is.
    """

    concrete: Any
    marks: Marks
    batch: Any
    source: Literal["graph", "XLA", "rewrite"]
    final: tuple[CompiledProduct, ...]
    note: str


class TracedSpecs(NamedTuple):
    """A step that was traced for shapes, and the layer of each operation."""

    concrete: Any
    marks: Marks


def trace_step(
    model: Any, dataset: tf.data.Dataset, *, training: bool, jit_compile: bool
) -> Trace:
    """Traces one step on the first batch.

    Weights, optimizers, metrics and seeds are afterwards what they were. Nothing is
    run, unless TensorFlow's own mixed precision is on, which shows in a run only.
    """
    if training or not isinstance(model, keras.Model):
        check_model(model)
    batch = first_batch(dataset)
    _build(model, batch)
    strategy = model.distribute_strategy
    step = model.train_step if training else model.predict_step
    num_replicas = strategy.num_replicas_in_sync
    if num_replicas > 1:
        whole = tf.data.Dataset.from_tensors(batch).unbatch().batch(_size(batch))
        argument = next(iter(strategy.experimental_distribute_dataset(whole)))
    else:
        argument = tf.nest.map_structure(tf.type_spec_from_value, batch)

    marks = Marks(model)
    with unchanged(model) if model.compiled else contextlib.nullcontext():
        with marks.placed():
            concrete = _traced(model, argument, marks, training=training)
            if not jit_compile and not _rewrite_is_on():
                return Trace(concrete, marks, batch, "graph", (), "")
            if num_replicas > 1:
                what = "XLA's program" if jit_compile else "TensorFlow's rewrite"
                note = f"{what} of a step on {num_replicas} replicas cannot be read"
                return Trace(concrete, marks, batch, "graph", (), note)
            if jit_compile:
                program, note = _compile(step, batch)
                source: Literal["graph", "XLA", "rewrite"] = "XLA"
            else:
                program, note = _rewrite(concrete, batch, marks)
                source = "rewrite"
    return Trace(concrete, marks, batch, "graph" if note else source, program, note)


def trace_specs(model: keras.Model, specs: Any, *, training: bool) -> TracedSpecs:
    """Traces one step for a batch of given shapes, and makes no such batch.

    On several replicas each gets a batch of these shapes.
    """
    marks = Marks(model)
    before = random.getstate()
    with marks.placed():
        concrete = _traced(model, specs, marks, training=training)
    random.setstate(before)
    return TracedSpecs(concrete, marks)


def _traced(model: keras.Model, argument: Any, marks: Marks, *, training: bool) -> Any:
    """Returns a step as a function that is traced and marked."""
    step = model.train_step if training else model.predict_step
    strategy = model.distribute_strategy

    @tf.autograph.experimental.do_not_convert
    def one_step(data: Any) -> Any:
        with tf.name_scope(marks.scope):
            return strategy.run(step, args=(data,))

    return tf.function(one_step).get_concrete_function(argument)


def _build(model: keras.Model, batch: Any) -> None:
    if model.compiled:
        build(model, batch)
        trainer.build_metrics(model, batch)
    elif not model.built:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with model.distribute_strategy.scope():
            model(x, training=False)


def _compile(step: Any, batch: Any) -> tuple[tuple[CompiledProduct, ...], str]:
    """Returns the products of the program that XLA makes, or why there are none."""
    function = tf.function(step, jit_compile=True)
    try:
        program = function.experimental_get_compiler_ir(batch)
        return read_hlo(program(stage="optimized_hlo")), ""
    except (tf.errors.OpError, ValueError, TypeError, NotImplementedError) as error:
        return (), f"XLA cannot compile this step ({checks.first_line(error)})"


def _rewrite(
    concrete: Any, batch: Any, marks: Marks
) -> tuple[tuple[CompiledProduct, ...], str]:
    """Returns the products of the graph that runs, or why they cannot be told."""
    cpus.avoid_broken_amx()
    try:
        return read_optimized(lambda: concrete(batch), named=marks.scope), ""
    except (tf.errors.OpError, ValueError, TypeError) as error:
        return (), f"TensorFlow's rewrite cannot be read ({checks.first_line(error)})"


def _rewrite_is_on() -> bool:
    options = tf.config.optimizer.get_experimental_options()
    return any(options.get(name) for name in _REWRITES)


def _size(batch: Any) -> int:
    return int(tf.nest.flatten(batch)[0].shape[0])
