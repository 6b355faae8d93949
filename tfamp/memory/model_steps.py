"""The memory of one model's steps: traced, scaled to other batches, sorted by kind."""

import collections
import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfamp.graph.bodies import is_backward
from tfamp.graph.compiled import find_program_peak
from tfamp.graph.liveness import Held, Peak, find_peak
from tfamp.graph.schedules import Schedule, read_schedule
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.structure import bytes_of, num_bytes
from tfamp.machine import devices
from tfamp.memory.estimates import KINDS, MemoryEstimate
from tfamp.memory.resident import Surroundings, resident_curve, surroundings
from tfamp.memory.specs import specs_of
from tfamp.models import assignment
from tfamp.records.checks import first_line
from tfamp.records.formats import HALF
from tfamp.stepping.arguments import build
from tfamp.stepping.snapshots import optimizers_of
from tfamp.stepping.step_traces import Marks, TracedSpecs, plain_name, trace_specs

# Batch sizes of a curve, as parts of the one that was asked for.
_PARTS = (1 / 8, 1 / 2, 1, 2, 8, 32)
# What belongs to no layer: the loss, the optimizer, the train step itself.
_OUTSIDE = "(outside layers)"


def scaled(
    first: Schedule, second: Schedule, sizes: tuple[int, int], size: int
) -> Schedule | None:
    """Returns the steps for a batch size, each buffer growing evenly with the batch.

    From plans of two different `sizes`; None where they don't run the same operations.
    """
    part = (size - sizes[0]) / (sizes[1] - sizes[0])

    def between(low: int, high: int) -> int:
        return max(0, round(low + (high - low) * part))

    if len(first.steps) != len(second.steps):
        return None
    plan = Schedule(map(between, first.argument_bytes, second.argument_bytes))
    for one, other in zip(first.steps, second.steps, strict=True):
        if one.op != other.op or len(one.outputs) != len(other.outputs):
            return None
        inner = []
        for low, high in zip(one.inner, other.inner, strict=True):
            each = scaled(low, high, sizes, size)
            if each is None:
                return None
            inner.append(each)
        outputs = list(map(between, one.outputs, other.outputs))
        plan.add(dataclasses.replace(one, outputs=outputs, inner=tuple(inner)))
    plan.results = first.results
    return plan


class StepMemory:
    """The memory that steps of one model take; each batch size is traced once."""

    def __init__(
        self,
        model: keras.Model,
        data: Any,
        *,
        training: bool = True,
        in_xla: bool = False,
        sequence_length: int | None = None,
    ) -> None:
        self._model, self._data, self._training = model, data, training
        self._in_xla, self._length = in_xla, sequence_length
        self._replicas = model.distribute_strategy.num_replicas_in_sync
        # Half dtypes that some device here does not multiply in by itself.
        fast = [set(devices.fast_dtypes(device)) for device in devices.devices()]
        self._emulated = frozenset(HALF) - set(HALF).intersection(*fast)
        self._traced: dict[int, tuple[TracedSpecs, Schedule]] = {}
        self._scheduled: dict[int, dict[int, Schedule]] = {}
        if training:
            example = None
            if not model.built:  # zeros that it can be built with
                example = _zeros(self._specs_for(1, training=False))
            build(model, example)

    def estimate(self, size: int) -> MemoryEstimate:
        """Returns the estimate for one batch size."""
        if size % self._replicas:
            raise ValueError(
                f"`batch_size` is {size} on {self._replicas} replicas; expected a "
                "multiple of their number, as each gets as many. Round it."
            )
        model = self._model
        (_, marks), schedule = self._trace(size)
        notes = []
        if self._length is not None:
            notes.append(
                f"Sizes that the model leaves open are taken as {self._length}."
            )
        in_program = None
        if self._in_xla:
            in_program, why = self._program_peak(marks, size)
            notes += [f"{why}; the traced graph was read."] if why else []
        peak = in_program or self._graph_peak(schedule)
        if schedule.unknown and in_program is None:
            notes.append(
                f"{len(schedule.unknown)} operations do not tell the size of what they "
                f"give, the first is {plain_name(schedule.unknown[0])!r}; it counts 0."
            )
        standing = self._standing(size)
        kinds = standing | by_kind(peak, model, marks)
        around = surroundings(in_xla=in_program is not None)
        resident = self._resident_curve(size, around)
        return MemoryEstimate(
            model=model.name,
            policy=assignment(model).policy,
            batch_size=size,
            training=self._training,
            source="graph" if in_program is None else "XLA",
            peak_bytes=sum(standing.values()) + peak.num_bytes,
            by_kind={kind: kinds[kind] for kind in KINDS if kinds.get(kind)},
            by_layer=by_layer(peak, model, marks, standing["optimizer slots"]),
            at=plain_name(peak.at),
            curve=self._curve(size, peak, marks if in_program else None),
            notes=tuple(notes),
            resident_bytes=dict(resident).get(size),
            resident_curve=resident,
            allocator=around.allocator,
        )

    def peak_of_graph(self, size: int) -> tuple[int, TracedSpecs, Peak]:
        """Returns all bytes at the peak, with the trace and what the step holds then.

        The graph is read, with XLA or without.
        """
        traced, schedule = self._trace(size)
        peak = self._graph_peak(schedule)
        return sum(self._standing(size).values()) + peak.num_bytes, traced, peak

    def _standing(self, size: int) -> dict[str, int]:
        """Returns the bytes of what is there before a step, by kind."""
        model = self._model
        parameters = [*model.variables, *model.metrics_variables]
        known = {id(variable) for variable in parameters}
        optimizers = optimizers_of(model) if self._training else []
        slots = [v for o in optimizers for v in o.variables if id(v) not in known]
        return {
            "parameters": bytes_of(parameters),
            "optimizer slots": bytes_of(slots),
            "inputs": self._input_bytes(size),
        }

    def _input_bytes(self, size: int) -> int:
        specs = tf.nest.flatten(self._specs(size))
        return sum(map(num_bytes, specs)) * self._replicas

    def _curve(
        self, size: int, peak: Peak, marks: Marks | None
    ) -> tuple[tuple[int, int], ...]:
        """Returns (batch size, peak bytes) around a size whose peak is known.

        With the `marks` of a trace XLA's program is read, without the graph.
        """
        at_other = None
        if marks is not None:
            at_other, _ = self._program_peak(marks, 2 * size)
        if at_other is not None:
            slope = (at_other.num_bytes - peak.num_bytes) / size
            steps = {
                n: round(peak.num_bytes + slope * (n - size)) for n in self._sizes(size)
            }
        else:
            steps = {
                n: (peak if n == size else self._graph_peak(schedule)).num_bytes
                for n, schedule in self._schedules(size).items()
            }
        kinds = self._standing(size)
        inputs = kinds.pop("inputs") / size
        standing = sum(kinds.values())
        return tuple(
            (n, standing + steps[n] + round(inputs * n)) for n in sorted(steps)
        )

    def _resident_curve(
        self, size: int, around: Surroundings
    ) -> tuple[tuple[int, int], ...]:
        """Returns (batch size, resident bytes of the process) around a size."""
        if around.process_bytes is None:
            return ()
        return resident_curve(
            self._model,
            around,
            self._schedules(size),
            self._input_bytes(size) / size,
            training=self._training,
            emulated=self._emulated,
        )

    def _sizes(self, size: int) -> set[int]:
        """Returns sizes around one."""
        step = self._replicas
        return {max(1, round(size * part / step)) * step for part in _PARTS}

    def _schedules(self, size: int) -> dict[int, Schedule]:
        """Returns the steps for sizes around one, from those of two where that goes."""
        if size in self._scheduled:
            return self._scheduled[size]
        known = self._trace(size)[1], self._trace(2 * size)[1]
        found = self._scheduled[size] = {size: known[0]}
        for each in self._sizes(size) - {size}:
            schedule = scaled(*known, (size, 2 * size), each)
            found[each] = self._trace(each)[1] if schedule is None else schedule
        return found

    def _trace(self, size: int) -> tuple[TracedSpecs, Schedule]:
        if size not in self._traced:
            traced = trace_specs(
                self._model, self._specs(size), training=self._training
            )
            self._traced[size] = traced, read_schedule(traced.concrete)
        return self._traced[size]

    def _specs(self, size: int) -> Any:
        """Returns the specifications of the batch that a replica gets."""
        return self._specs_for(size // self._replicas, training=self._training)

    def _specs_for(self, batch_size: int, *, training: bool) -> Any:
        return specs_of(
            self._model,
            self._data,
            batch_size,
            training=training,
            sequence_length=self._length,
        )

    def _graph_peak(self, schedule: Schedule) -> Peak:
        return find_peak(schedule, emulated=self._emulated)

    def _program_peak(self, marks: Marks, size: int) -> tuple[Peak | None, str]:
        """Compiles a step and returns what its program holds, or why it is not known.

        The compiler takes tensors, so zeros of the shapes are made.
        """
        if self._replicas > 1:
            return None, "XLA's program of a step on several replicas cannot be read"
        model = self._model
        step = model.train_step if self._training else model.predict_step
        zeros = _zeros(self._specs(size))
        function = tf.function(step, jit_compile=True)
        try:
            with marks.placed():
                program = function.experimental_get_compiler_ir(zeros)
            return find_program_peak(program(stage="optimized_hlo")), ""
        except (tf.errors.OpError, ValueError, TypeError, NotImplementedError) as error:
            return None, f"XLA cannot compile this step ({first_line(error)})"


def _zeros(specs: Any) -> Any:
    return tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), specs)


def by_kind(peak: Peak, model: keras.Model, marks: Marks) -> dict[str, int]:
    """Returns the bytes of what a step made and holds at its peak, by kind."""
    shapes = {num_bytes(variable) for variable in model.trainable_variables}
    sizes = shapes | {size // 2 for size in shapes}
    found: collections.Counter[str] = collections.Counter()
    for held in peak.held:
        in_layer = bool(marks.layer_of(held.name))
        found[_kind(held, sizes, in_layer=in_layer)] += held.num_bytes
    return {kind: found[kind] for kind in KINDS if found[kind]}


def _kind(held: Held, weights: set[int], *, in_layer: bool) -> str:
    if held.op == "scratch":
        return "workspace"
    if held.op == "Cast" and held.source == "ReadVariableOp":
        return "casts"
    if is_backward(held.name):
        return "gradients" if held.num_bytes in weights else "workspace"
    # The optimizer computes with numbers of the weights' sizes.
    return "activations" if in_layer or held.num_bytes not in weights else "workspace"


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
        size = bytes_of(own)
        # Slots have the shapes of what is trained.
        share = sum(num_bytes(w) for w in own if getattr(w, "trainable", False))
        found[path] += size + slots * share // trainable
    return {path: size for path, size in found.most_common() if size}
