"""`tfamp.estimate_memory`: bytes of a step, from its traced graph or from two sizes."""

import bisect
import collections
import contextlib
import dataclasses
import itertools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from rich import box

from tfamp.graph.bodies import is_backward
from tfamp.graph.schedules import Peak, Schedule, find_peak, read_schedule, scaled
from tfamp.keras_hooks import structure, trainer
from tfamp.keras_hooks.optimizers import optimizers_of
from tfamp.keras_hooks.structure import bytes_of, num_bytes
from tfamp.memory.batch_search import policy_in_force, try_size
from tfamp.models import apply, assignment
from tfamp.records import checks, console
from tfamp.records.record import TableRecord
from tfamp.records.units import format_bytes
from tfamp.stepping.arguments import build, dataset_of
from tfamp.stepping.step_traces import Marks, plain_name, trace_specs
from tfamp.stepping.unchanged import copied, seeds_put_back
from tfamp.trials import parcel
from tfamp.trials.run_records import Task

# What a process holds besides, where it was measured.
PROCESS = "process"
# Of bytes, in the order of a table.
KINDS = (
    *("parameters", "optimizer slots", "inputs", "activations", "gradients", "casts"),
    *("workspace", PROCESS),
)
# What belongs to no layer: the loss, the optimizer, the train step itself.
_OUTSIDE = "(outside layers)"
_MAX_LAYERS = 8
# Batches are not looked for beyond it.
_LARGEST = 2**40


@dataclasses.dataclass(frozen=True)
class MemoryEstimate(TableRecord):
    """What one step will hold in memory when it holds most, by `KINDS` and layers."""

    model: str
    policy: str
    batch_size: int  # examples of a step, of all replicas
    training: bool  # or a step of `predict`
    source: str  # "graph" where it was traced, "measured" where it was trained
    peak_bytes: int  # what is there before the step, and what the step makes
    by_kind: dict[str, int] = dataclasses.field(hash=False)
    by_layer: dict[str, int] = dataclasses.field(hash=False)  # the largest first
    at: str  # the operation that runs at the peak
    curve: tuple[tuple[int, int], ...]  # batch size, peak bytes; smaller sizes first
    notes: tuple[str, ...] = ()

    @property
    def step_bytes(self) -> int:
        """Bytes above what model and optimizer hold between two steps."""
        standing = ("parameters", "optimizer slots", PROCESS)
        return self.peak_bytes - sum(self.by_kind.get(kind, 0) for kind in standing)

    def bytes_at(self, batch_size: int) -> int:
        """Returns the peak with another batch size, between those of the curve."""
        size = checks.positive_int("batch_size", batch_size)
        pairs = list(itertools.pairwise(self.curve))
        pair = next((pair for pair in pairs if size <= pair[1][0]), pairs[-1])
        (low, small), (high, large) = pair
        return round(small + (large - small) / (high - low) * (size - low))

    def largest_batch(self, limit_bytes: int, *, multiple_of: int = 1) -> int:
        """Returns the largest batch size whose step fits into a limit.

        The limit is of a GPU, or of a whole process where it was measured.

        Raises:
            ValueError: Not even the smallest fits, or the memory does not depend on
                the batch.
        """
        limit = checks.positive_int("limit_bytes", limit_bytes)
        step = checks.positive_int("multiple_of", multiple_of)
        sizes = range(step, step * (_LARGEST + 1), step)
        count = bisect.bisect_right(sizes, limit, key=self.bytes_at)
        if not count:
            raise ValueError(
                f"`limit_bytes` is {format_bytes(limit)}, and a batch of {step} takes "
                f"{format_bytes(self.bytes_at(step))}, of which model and optimizer "
                f"hold {format_bytes(self.peak_bytes - self.step_bytes)}; expected a "
                "limit that this fits into. Use `tfamp.remat`, a policy of less "
                "precision, an optimizer with fewer slots, or a smaller model."
            )
        if count == _LARGEST:
            raise ValueError(
                f"Every batch fits into {format_bytes(limit)}; expected a step whose "
                "memory grows with the batch. Pass `data=` with a batch of yours."
            )
        return sizes[count - 1]

    def table(self) -> str:
        """Returns the bytes by kind, and those of the largest layers, as text."""
        title = (
            f"Memory of a {'training step' if self.training else 'step of predict'} of "
            f"{self.model!r}, {self.policy}, batch {self.batch_size:,}"
        )
        kinds = {kind: self.by_kind[kind] for kind in KINDS if kind in self.by_kind}
        kinds |= {"peak": self.peak_bytes, "of which the step makes": self.step_bytes}
        sizes = list(self.by_layer.items())
        layers = dict(sizes[:_MAX_LAYERS])
        if rest := sizes[_MAX_LAYERS:]:
            layers[f"{len(rest)} others"] = sum(size for _, size in rest)
        look: dict[str, Any] = {"box": box.SIMPLE, "show_edge": False}
        heads = ("", "bytes"), ("largest layers", "at the peak")
        tables = [
            console.table(
                {left: console.FOLD, right: console.RIGHT},
                [(name, format_bytes(size)) for name, size in each.items()],
                **look,
            )
            for (left, right), each in zip(heads, (kinds, layers), strict=True)
        ]
        told = [f"Peak at {self.at}.", *(f"Note: {note}" for note in self.notes)]
        lines = ["\n".join(console.wrapped(each)) for each in told]
        return console.text_of(title, *tables, *lines)


def by_kind(peak: Peak, model: keras.Model, marks: Marks) -> dict[str, int]:
    """Returns the bytes of what a step made and holds at its peak, by kind."""
    shapes = {num_bytes(variable) for variable in model.trainable_variables}
    sizes = shapes | {size // 2 for size in shapes}
    found: collections.Counter[str] = collections.Counter()
    for held in peak.held:
        is_like_a_weight, kind = held.num_bytes in sizes, "activations"
        if held.op == "Cast" and held.source == "ReadVariableOp":
            kind = "casts"
        elif is_like_a_weight and is_backward(held.name):
            kind = "gradients"
        elif is_backward(held.name):
            kind = "workspace"
        elif is_like_a_weight and not marks.layer_of(held.name):
            kind = "workspace"  # the optimizer computes with numbers of these sizes
        found[kind] += held.num_bytes
    return found


def by_layer(
    peak: Peak, model: keras.Model, marks: Marks, slots: int
) -> dict[str, int]:
    """Returns the bytes of each layer: weights, slots, and what the step holds."""
    found: collections.Counter[str] = collections.Counter()
    for held in peak.held:
        found[marks.layer_of(held.name) or _OUTSIDE] += held.num_bytes
    trainable = sum(map(num_bytes, model.trainable_variables)) or 1
    counted: set[int] = set()
    for path, layer, _ in structure.walk(model):
        own = [w for w in structure.own_weights(layer) if id(w) not in counted]
        counted |= {id(w) for w in own}
        # Slots have the shapes of what is trained.
        share = sum(num_bytes(w) for w in own if getattr(w, "trainable", False))
        found[path] += bytes_of(own) + slots * share // trainable
    return {path: size for path, size in found.most_common() if size}


# Batch sizes of a curve, as parts of the one that was asked for.
_PARTS = (1 / 8, 1 / 2, 1, 2, 8, 32)
# What a step holds where it is measured, and how many times the size that may take:
# processes that do the same differ by some 20 MiB.
_TELLING_BYTES, _MOST_TIMES = 2**28, 8
# From this size on glibc gives every block back to the system; of smaller ones it keeps
# more than is in use. Where a step is smaller its blocks are, too, and so is this.
_BLOCKS_APART = 2**25
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
    is_model = isinstance(model_or_build, keras.Model) or not callable(model_or_build)
    build_model = None if is_model else model_or_build
    model: Any = model_or_build if is_model else model_or_build()
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model_or_build` is {model!r}; expected a `keras.Model`, or a function "
            "that returns one. Pass it first, then the batch size."
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
            return specs_of(given, data, number, training=training)

        if training:
            zeros = None if given.built else _zeros(specs(1, training=False))
            build(given, zeros)
        found = _estimate(given, specs, size, training=training)
        if not measure:
            return found
        batch = _zeros(specs(1))
        if build_model is not None and optimizer is None:
            return _measured(found, build_model, batch, policy)
        what = "`measure=True`"
        pickle = checks.require("cloudpickle", extra="report", purpose=what)
        try:
            pickle.loads(pickle.dumps(given))  # or it would fail where nobody sees why
        except Exception as error:  # of whatever objects the model holds
            raise TypeError(
                f"`model_or_build` is {given.name!r}, which cannot be taken to another "
                f"process ({checks.first_line(error)}); expected a model whose classes "
                "are registered, or a function that returns it. Pass that function."
            ) from error
        return _measured(found, lambda: given, batch, policy)


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
            apart = min(size / asked, 1.0) * _BLOCKS_APART
            trial = try_size(folder, task, {"MALLOC_MMAP_THRESHOLD_": f"{apart:.0f}"})
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


def _zeros(specs: Any) -> Any:
    return tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), specs)


def specs_of(model: keras.Model, data: Any, batch_size: int, *, training: bool) -> Any:
    """Returns a `tf.TensorSpec` for each tensor of a batch.

    Shapes are those of `data`, None asks the model. A TypeError says that `data` are
    nothing that `fit` takes, a ValueError that a size is not told.
    """
    given = _inputs(model) if data is None else _specs_of_data(data)
    open_sizes = [
        f"{repr(spec.name) if spec.name else 'an input'} {tuple(spec.shape)}"
        for spec in tf.nest.flatten(given)
        if None in _sizes(spec)
    ]
    if open_sizes:
        whose = f"Model {model.name!r}" if data is None else "`data`"
        raise ValueError(
            f"{whose} leaves sizes of its inputs open: {', '.join(open_sizes)}; "
            "expected sizes that are known but for the batch. Pass an example as "
            "`data`, x alone or (x, y), of which only the shapes are read."
        )
    specs = tf.nest.map_structure(
        lambda spec: tf.TensorSpec((batch_size, *_sizes(spec)), spec.dtype), given
    )
    if data is not None and not _is_x_alone(data):
        return specs
    # Without a loss `data` tell all that a `train_step` takes.
    has_targets = data is None or getattr(model, "loss", None) is not None
    return (specs, _targets(model, specs)) if training and has_targets else (specs,)


def _is_x_alone(data: Any) -> bool:
    """Returns whether data are inputs without targets, not in a tuple or dataset."""
    is_array = hasattr(data, "shape") and not callable(getattr(data, "build", None))
    return is_array or isinstance(data, dict)


def _sizes(spec: Any) -> list[int | None]:
    """Returns the sizes of a tensor beside the batch."""
    return [] if spec.shape.rank is None else spec.shape.as_list()[1:]


def _specs_of_data(data: Any) -> Any:
    is_batch = isinstance(data, (tuple, list)) and 1 <= len(data) <= 3
    if not is_batch and not _is_x_alone(data):
        return dataset_of(data).element_spec
    floatx = keras.config.floatx()

    def spec(array: Any) -> tf.TensorSpec:
        dtype = tf.as_dtype(getattr(array, "dtype", None) or floatx)
        return tf.TensorSpec(array.shape, floatx if dtype == tf.float64 else dtype)

    return tf.nest.map_structure(spec, tuple(data) if is_batch else data)


def _inputs(model: keras.Model) -> Any:
    graph = structure.graph_of(model)
    if graph is not None:
        return structure.map_structure(
            lambda x: tf.TensorSpec(x.shape, x.dtype, name=x.name),
            structure.inputs_of(graph),
        )
    shapes = structure.built_shapes(model)
    if not shapes:
        raise ValueError(
            f"Model {model.name!r} does not tell the shapes of its inputs; expected a "
            "Functional or Sequential model, or one that is built. Pass an example as "
            "`data`, x alone or (x, y), of which only the shapes are read."
        )
    found = [
        structure.map_shapes(lambda s: tf.TensorSpec(s, model.input_dtype), shape)
        for shape in shapes.values()
    ]
    return found[0] if len(found) == 1 else found


def _targets(model: keras.Model, x: Any) -> Any:
    """Returns targets that the compiled loss takes: classes as numbers, or outputs."""

    def target(output: keras.KerasTensor, loss: Any) -> tf.TensorSpec:
        name = loss if isinstance(loss, str) else getattr(loss, "name", None)
        name = name or getattr(loss, "__name__", type(loss).__name__)
        if "sparse" in str(name).lower():
            return tf.TensorSpec(output.shape[:-1], tf.int32)
        return tf.TensorSpec(output.shape, keras.config.floatx())

    inputs = structure.map_structure(
        lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), x
    )
    outputs, loss = model.compute_output_spec(inputs), getattr(model, "loss", None)
    if isinstance(loss, dict) and isinstance(outputs, dict):
        return {name: target(outputs[name], loss.get(name)) for name in outputs}
    if isinstance(loss, (list, tuple)) and isinstance(outputs, (list, tuple)):
        return tuple(target(y, each) for y, each in zip(outputs, loss, strict=True))
    return structure.map_structure(lambda y: target(y, loss), outputs)
