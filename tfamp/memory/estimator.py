"""`tfamp.estimate_memory`: bytes of a step, from its traced graph or from two sizes."""

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfamp.graph.liveness import Peak, find_peak
from tfamp.graph.schedules import Schedule, read_schedule, scaled
from tfamp.keras_hooks import trainer
from tfamp.keras_hooks.structure import bytes_of, num_bytes
from tfamp.memory.batch_search import policy_in_force, try_size
from tfamp.memory.estimates import KINDS, PROCESS, MemoryEstimate, by_kind, by_layer
from tfamp.memory.specs import specs_of
from tfamp.models import apply, assignment
from tfamp.records import checks
from tfamp.stepping.arguments import build
from tfamp.stepping.snapshots import optimizers_of
from tfamp.stepping.step_traces import Marks, plain_name, trace_specs
from tfamp.stepping.unchanged import copied, seeds_put_back
from tfamp.trials import parcel
from tfamp.trials.run_records import Task

# Batch sizes of a curve, as parts of the one that was asked for.
_PARTS = (1 / 8, 1 / 2, 1, 2, 8, 32)
# What a step holds where it is measured, and how many times the size that may take:
# processes that do the same differ by some 20 MiB.
_TELLING_BYTES, _MOST_TIMES = 2**28, 8
# Steps that are trained at either size, of which the larger is four times the other.
_STEPS, _TIMES = 3, 4


def estimate_memory(
    model_or_build: keras.Model | Callable[[], keras.Model],
    batch_size: int,
    *,
    optimizer: Any = None,
    policy: str | None = None,
    training: bool = True,
    measure: bool = False,
    data: Any = None,
    sequence_length: int | None = None,
) -> MemoryEstimate:
    """Predicts the most memory that a step will hold, and nothing is run here.

    The step is traced as `fit` traces it, and each buffer lives from its making to its
    last reader, as a device's allocator gives it out. Not in it: what a process holds
    anyway, the input pipeline, and what an allocator keeps for later, which on a CPU is
    as much again. `measure=True` answers for all of that: the step is trained at two
    small sizes, each in a fresh process, some 20 seconds in all; the peak is on the
    line through both, of the process on a CPU, of TensorFlow's memory on a GPU.

    Args:
        model_or_build: A Keras model, compiled unless for inference or with
            `optimizer`, or a function that returns one.
        batch_size: Examples of a step, of all replicas.
        optimizer: Another optimizer than the model's: an object or a Keras name. A
            model without a loss gets the mean squared error.
        policy: Another policy than the model's; a copy of the model is made for it.
        training: False for a step of `predict`.
        measure: Whether to train at two sizes, in processes of their own.
        data: A batch (x, y), x alone, or whatever else `fit` takes, of which only
            shapes are read; needed where the model does not tell them.
        sequence_length: What to take for every size that the model leaves open.

    Raises:
        TypeError: `model_or_build` is no Keras model and returns none, or cannot go to
            another process.
        MemoryError: A size that is measured does not fit.
        ValueError: It is not compiled, does not tell its inputs, or leaves sizes open;
            a size is not positive, or no multiple of the replicas.

    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> model.compile("sgd", "mse")
        >>> estimate_memory(model, 64).by_kind["inputs"]  # 8 numbers and 4 targets
        3072

    Source: T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
    """
    size = checks.positive_int("batch_size", batch_size)
    if sequence_length is not None:
        checks.positive_int("sequence_length", sequence_length)
    is_model = isinstance(model_or_build, keras.Model) or not callable(model_or_build)
    build_model = None if is_model else model_or_build
    model: Any = model_or_build if is_model else model_or_build()
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model_or_build` is {model!r}, of type {type(model).__name__}; expected "
            "a `keras.Model`, or a function that returns one. Pass it first, then the "
            "batch size."
        )
    if training and not model.compiled and optimizer is None:
        raise ValueError(
            f"Model {model.name!r} is not compiled; expected one that `fit` takes. "
            "Compile it, or pass `optimizer='adam'`, or `training=False` for inference."
        )
    if not training and (measure or optimizer is not None):
        raise ValueError(
            f"`{'measure' if measure else 'optimizer'}` came with `training=False`; "
            "expected one of them, as it is of training steps. Leave one out."
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(seeds_put_back())
        stack.enter_context(model.distribute_strategy.scope())
        given = model
        if policy is not None:  # a copy that computes under it
            instead = "apply the policy to the model yourself, by `tfamp.apply`"
            given = copied(model, instead=instead)
            apply(given, policy)
        if training and (optimizer is not None or given is not model):
            chosen = model.optimizer if optimizer is None else optimizer
            if not isinstance(chosen, str):
                # Without state, and without a loss scale of its own.
                chosen = type(chosen).from_config(chosen.get_config())
            arguments = {"loss": "mse", **trainer.compile_arguments(model)}
            arguments |= {"optimizer": chosen, "run_eagerly": False}
            stack.enter_context(trainer.compiled_as(given, **arguments))

        def specs(number: int, training: bool = training) -> Any:
            return specs_of(given, data, number, sequence_length, training=training)

        if training:
            zeros = None if given.built else _zeros(specs(1, training=False))
            build(given, zeros)
        found = _estimate(given, specs, size, training=training)
        if sequence_length is not None:
            length = f"Sizes that the model leaves open are taken as {sequence_length}."
            found = dataclasses.replace(found, notes=(length, *found.notes))
        if not measure:
            return found
        if build_model is None or optimizer is not None:
            build_model = _rebuilding(given)
        return _measured(found, build_model, _zeros(specs(1)), policy)


def _estimate(
    model: keras.Model, specs: Callable[[int], Any], size: int, *, training: bool
) -> MemoryEstimate:
    """Returns the estimate of a built model; `specs` gives those of some examples."""
    replicas = model.distribute_strategy.num_replicas_in_sync
    if size % replicas:
        raise ValueError(
            f"`batch_size` is {size} on {replicas} replicas; expected a multiple of "
            "their number, as each gets as many. Round it."
        )

    def trace(number: int) -> tuple[Schedule, Marks]:
        traced = trace_specs(model, specs(number // replicas), training=training)
        return read_schedule(traced.concrete), traced.marks

    (schedule, marks), (double, _) = trace(size), trace(2 * size)

    def peak_at(number: int) -> Peak:
        other = scaled(schedule, double, (size, 2 * size), number)
        return find_peak(other or trace(number)[0])

    peak = find_peak(schedule)
    # What is there before a step.
    parameters = [*model.variables, *model.metrics_variables]
    known = {id(variable) for variable in parameters}
    optimizers = optimizers_of(model) if training else []
    slots = [v for o in optimizers for v in o.variables if id(v) not in known]
    inputs = sum(map(num_bytes, tf.nest.flatten(specs(size // replicas)))) * replicas
    standing = {"parameters": bytes_of(parameters), "optimizer slots": bytes_of(slots)}
    kinds = {**standing, "inputs": inputs, **by_kind(peak, model, marks)}
    held = sum(standing.values())
    sizes = {max(1, round(size * part / replicas)) * replicas for part in _PARTS}
    curve = {n: held + inputs * n // size + peak_at(n).num_bytes for n in sizes}
    curve[size] = held + inputs + peak.num_bytes
    notes = []
    if getattr(model, "jit_compile", False) is True:
        notes.append(
            "XLA compiles this step, and fuses what is counted here; `measure=True` "
            "tells what it takes."
        )
    if schedule.unknown:
        notes.append(
            f"{len(schedule.unknown)} operations do not tell the size of what they "
            f"give, the first is {plain_name(schedule.unknown[0])!r}; it counts 0."
        )
    return MemoryEstimate(
        model=model.name,
        policy=assignment(model).policy,
        batch_size=size,
        training=training,
        source="graph",
        peak_bytes=curve[size],
        by_kind={kind: kinds[kind] for kind in KINDS if kinds.get(kind)},
        by_layer=by_layer(peak, model, marks, standing["optimizer slots"]),
        at=plain_name(peak.at),
        curve=tuple(sorted(curve.items())),
        notes=tuple(notes),
    )


def _measured(
    estimate: MemoryEstimate,
    build_model: Callable[[], keras.Model],
    batch: Any,
    policy: str | None,
) -> MemoryEstimate:
    """Returns an estimate whose peak is on the line through two measured sizes."""
    for module in ("cloudpickle", "psutil"):
        checks.require(module, extra="report", purpose="`measure=True`")
    asked = estimate.batch_size
    each = (estimate.bytes_at(2 * asked) - estimate.bytes_at(asked)) / asked
    wanted = _TELLING_BYTES / each if each > 0 else math.inf
    size = min(max(2, math.ceil(wanted)), _MOST_TIMES * asked)
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    small = max(1, round(size / _TIMES / replicas)) * replicas
    large = max(round(size / replicas) * replicas, 2 * small)
    peaks = []
    with tempfile.TemporaryDirectory(prefix="tfamp-memory-") as name:
        folder = Path(name)
        policy = policy or policy_in_force(folder)
        parcel.pack(folder, build_model, tf.data.Dataset.from_tensors(batch), None)
        for size in (small, large):
            # The rows of a batch are repeated, so that the data set no limit.
            task = Task(policy, steps=_STEPS, batch_size=size, data_batch_size=large)
            trial, _ = try_size(folder, task)
            if trial.peak_bytes is None:
                raise MemoryError(
                    f"A batch of {size} was to be measured, and its process ended by "
                    f"{trial.outcome!r}; expected it to fit. Pass a smaller "
                    "`batch_size`, or a policy of half precision."
                )
            peaks.append(trial.peak_bytes)
    slope = max(0.0, (peaks[1] - peaks[0]) / (large - small))

    def at(number: int) -> int:
        return max(0, round(peaks[0] + slope * (number - small)))

    rest = at(asked) - estimate.peak_bytes
    words = f"Measured at batches of {small:,} and {large:,}."
    if rest < 0:
        words += (
            " It holds less than the traced graph, whose kinds and layers these are."
        )
    sizes = {small, large, *(number for number, _ in estimate.curve)}
    return dataclasses.replace(
        estimate,
        source="measured",
        peak_bytes=at(asked),
        by_kind=estimate.by_kind | ({PROCESS: rest} if rest > 0 else {}),
        curve=tuple((number, at(number)) for number in sorted(sizes)),
        notes=(*estimate.notes, words),
    )


def _rebuilding(model: keras.Model) -> Callable[[], keras.Model]:
    """Returns what gives a compiled model in another process, as Keras pickles it."""
    pickle = checks.require("cloudpickle", extra="report", purpose="`measure=True`")
    try:
        pickle.loads(pickle.dumps(model))  # or it would fail where nobody sees why
    except Exception as error:  # of whatever objects the model holds
        raise TypeError(
            f"`model_or_build` is {model.name!r}, which cannot be taken to the process "
            f"that is measured ({checks.first_line(error)}); expected a model whose "
            "classes are registered (`keras.saving.register_keras_serializable`), or a "
            "function that returns it. Pass that function."
        ) from error
    return lambda: model


def _zeros(specs: Any) -> Any:
    return tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), specs)
