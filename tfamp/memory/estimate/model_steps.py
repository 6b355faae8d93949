"""One model asked for the memory of its steps, each batch size traced once."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfamp.graph.compiled import find_program_peak
from tfamp.graph.liveness import Peak, find_peak
from tfamp.graph.schedules import Schedule, read_schedule
from tfamp.keras_hooks import structure
from tfamp.machine import devices
from tfamp.memory.estimate import breakdown
from tfamp.memory.estimate.records import MemoryEstimate
from tfamp.memory.estimate.resident import ResidentSize, Surroundings, surroundings
from tfamp.memory.estimate.specs import specs_of
from tfamp.models import assignment
from tfamp.records.checks import first_line
from tfamp.records.formats import HALF
from tfamp.stepping.arguments import build
from tfamp.stepping.layer_marks import plain_name
from tfamp.stepping.step_traces import TracedSpecs, trace_specs

# Batch sizes of a curve, as parts of the one that was asked for.
_PARTS = (1 / 8, 1 / 2, 1, 2, 8, 32)


def program_peak(step: Callable[..., Any], specs: Any) -> tuple[Peak | None, str]:
    """Compiles a step and returns what its program holds, or why that is not known.

    The compiler takes tensors, so zeros of the shapes are made.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        return None, "XLA's program of a step on several replicas cannot be read"
    zeros = tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), specs)
    function = tf.function(step, jit_compile=True)
    try:
        program = function.experimental_get_compiler_ir(zeros)
        return find_program_peak(program(stage="optimized_hlo")), ""
    except (tf.errors.OpError, ValueError, TypeError, NotImplementedError) as error:
        return None, f"XLA cannot compile this step ({first_line(error)})"


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


class Asked:
    """Traces steps of one model, each size once."""

    def __init__(
        self,
        model: keras.Model,
        data: Any,
        *,
        training: bool,
        in_xla: bool,
        sequence_length: int | None = None,
    ) -> None:
        self._model, self._data, self._training = model, data, training
        self._length = sequence_length
        self._in_xla = in_xla
        self._replicas = model.distribute_strategy.num_replicas_in_sync
        self._emulated = frozenset(HALF) - _fast_dtypes()
        self._traced: dict[int, tuple[TracedSpecs, Schedule]] = {}
        self._planned: dict[int, dict[int, Schedule]] = {}
        if training:
            build(model, None if model.built else self._one_example())

    def estimate(self, size: int) -> MemoryEstimate:
        """Returns the estimate for one batch size."""
        if size % self._replicas:
            raise ValueError(
                f"`batch_size` is {size} on {self._replicas} replicas; expected a "
                "multiple of their number, as each gets as many. Round it."
            )
        traced, plan = self._trace(size)
        notes = []
        if self._length is not None:
            notes.append(
                f"Sizes that the model leaves open are taken as {self._length}."
            )
        peak, source = None, "graph"
        if self._in_xla:
            peak, why = self._program(traced, size)
            source = "XLA" if peak is not None else "graph"
            notes += [f"{why}; the traced graph was read."] if why else []
        if peak is None:
            peak = find_peak(plan, emulated=self._emulated)
        if plan.unknown and source == "graph":
            notes.append(
                f"{len(plan.unknown)} operations do not tell the size of what they "
                f"give, the first is {plain_name(plan.unknown[0])!r}; it counts 0."
            )
        kinds = self._standing(size)
        parameters, slots, inputs = kinds.values()
        standing = parameters + slots + inputs
        kinds |= breakdown.by_kind(peak, self._model, traced.marks)
        model = self._model
        curve = self._curve(size, peak, parameters + slots, inputs / size)
        around = surroundings(in_xla=source == "XLA")
        sizes = self._resident(size, around, inputs / size)
        return MemoryEstimate(
            model.name,
            assignment(model).policy,
            size,
            self._training,
            source,
            standing + peak.num_bytes,
            {kind: kinds[kind] for kind in breakdown.KINDS if kinds.get(kind)},
            breakdown.by_layer(peak, model, traced.marks, slots),
            plain_name(peak.at),
            curve,
            tuple(notes),
            dict(sizes).get(size),
            sizes,
            around.allocator,
        )

    def whole(self, size: int) -> tuple[int, TracedSpecs, Peak]:
        """Returns all bytes at the peak, with the trace and what the step holds then.

        The graph is read, with XLA or without.
        """
        traced, plan = self._trace(size)
        peak = find_peak(plan, emulated=self._emulated)
        return sum(self._standing(size).values()) + peak.num_bytes, traced, peak

    def _standing(self, size: int) -> dict[str, int]:
        """Returns the bytes of what is there before a step, by kind."""
        parameters, slots = breakdown.standing(self._model, training=self._training)
        inputs = sum(map(structure.num_bytes, tf.nest.flatten(self._specs(size))))
        return {
            "parameters": parameters,
            "optimizer slots": slots,
            "inputs": inputs * self._replicas,
        }

    def _curve(
        self, size: int, peak: Peak, standing: int, input_bytes: float
    ) -> tuple[tuple[int, int], ...]:
        """Returns peaks for sizes around one."""
        if self._in_xla:
            at_other, _ = self._program(self._trace(size)[0], 2 * size)
            if at_other is not None:
                slope = (at_other.num_bytes - peak.num_bytes) / size
                steps = {
                    n: round(peak.num_bytes + slope * (n - size))
                    for n in self._sizes(size)
                }
                return _points(steps, standing, input_bytes)
        found = {
            n: peak.num_bytes
            if n == size
            else find_peak(plan, emulated=self._emulated).num_bytes
            for n, plan in self._plans(size).items()
        }
        return _points(found, standing, input_bytes)

    def _resident(
        self, size: int, around: Surroundings, input_bytes: float
    ) -> tuple[tuple[int, int], ...]:
        """Returns resident sizes of the process for sizes around one."""
        if around.process_bytes is None:
            return ()
        ask = ResidentSize(
            self._model, around, training=self._training, emulated=self._emulated
        )
        return ask.curve(self._plans(size), input_bytes)

    def _sizes(self, size: int) -> set[int]:
        """Returns sizes around one."""
        step = self._replicas
        return {max(1, round(size * part / step)) * step for part in _PARTS}

    def _plans(self, size: int) -> dict[int, Schedule]:
        """Returns the steps for sizes around one, from those of two where that goes."""
        if size in self._planned:
            return self._planned[size]
        plans = self._trace(size)[1], self._trace(2 * size)[1]
        found = self._planned[size] = {size: plans[0]}
        for each in self._sizes(size) - {size}:
            plan = scaled(*plans, (size, 2 * size), each)
            found[each] = self._trace(each)[1] if plan is None else plan
        return found

    def _trace(self, size: int) -> tuple[TracedSpecs, Schedule]:
        if size not in self._traced:
            traced = trace_specs(
                self._model, self._specs(size), training=self._training
            )
            self._traced[size] = traced, read_schedule(traced.concrete)
        return self._traced[size]

    def _specs(self, size: int) -> Any:
        each = size // self._replicas
        return self._specs_for(each, training=self._training)

    def _specs_for(self, batch_size: int, *, training: bool) -> Any:
        return specs_of(
            self._model,
            self._data,
            batch_size,
            training=training,
            sequence_length=self._length,
        )

    def _one_example(self) -> Any:
        """Returns zeros that a model without weights yet can be built with."""
        specs = self._specs_for(1, training=False)
        return tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), specs)

    def _program(self, traced: TracedSpecs, size: int) -> tuple[Peak | None, str]:
        model = self._model
        step = model.train_step if self._training else model.predict_step
        with traced.marks.placed():
            return program_peak(step, self._specs(size))


def _points(
    steps: dict[int, int], standing: int, input_bytes: float
) -> tuple[tuple[int, int], ...]:
    return tuple(
        (n, standing + steps[n] + round(input_bytes * n)) for n in sorted(steps)
    )


def _fast_dtypes() -> set[str]:
    """Returns the half dtypes that every device here multiplies in by itself."""
    fast = [set(devices.fast_dtypes(device)) for device in devices.devices()]
    return set(HALF).intersection(*fast)
