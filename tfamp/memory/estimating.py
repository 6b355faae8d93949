"""`tfamp.estimate_memory`: bytes of a step, from its traced graph."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp import _checks, hardware
from tfamp.assignment import apply, assignment
from tfamp.copying import copied
from tfamp.data.bottlenecks.arguments import build
from tfamp.graphs.liveness import Peak, find_peak
from tfamp.graphs.plans import Plan, read_plan
from tfamp.keras_hooks import trainer
from tfamp.managed.lease import HALF
from tfamp.memory import accounting
from tfamp.memory.programs import program_peak
from tfamp.memory.records import MemoryEstimate, MemoryEstimates
from tfamp.memory.scaling import scaled
from tfamp.memory.specs import specs_of
from tfamp.numerics.marks import plain_name
from tfamp.numerics.tracing import TracedSpecs, trace_specs

# Batch sizes of a curve, as parts of the one that was asked for.
_PARTS = (1 / 8, 1 / 2, 1, 2, 8, 32)


def estimate_memory(
    model: keras.Model,
    batch_size: int | Sequence[int],
    *,
    optimizer: Any = None,
    policy: str | Sequence[str] | None = None,
    training: bool = True,
    data: Any = None,
    compiled: bool | None = None,
) -> Any:
    """Predicts the most memory that a step will hold, and nothing is run.

    The step is traced, with the loss, the optimizer, its loss scale, accumulation and
    moving averages, as `fit` traces it, and its operations are gone through in the
    order in which they become ready: each buffer lives from its making to its last
    reader, operations that write in place do, and what `tfamp.remat` computes again is
    not kept. With XLA its program is compiled and read. Not in it: what the process
    holds anyway (Python, TensorFlow, the runtime of a GPU), the input pipeline, and
    what an allocator keeps for later.

    Args:
        model: A Keras model, compiled unless for inference or with `optimizer`.
        batch_size: Examples of a step, of all replicas; or several sizes.
        optimizer: Another optimizer than the model's: an object or a Keras name. A
            model without a loss gets the mean squared error.
        policy: Another policy than the model's, or several; a copy of the model is
            made for each.
        training: False for a step of `predict`.
        data: A batch (x, y) or a dataset of batches, of which only shapes and dtypes
            are read; needed where the model does not tell its inputs or targets.
        compiled: Whether XLA compiles the step; None for what the model says. It takes
            as long as compiling.

    Returns:
        A `MemoryEstimate`; for several sizes or policies `MemoryEstimates`.

    Raises:
        TypeError: `model` is no Keras model.
        ValueError: It is not compiled, or does not tell its inputs; a size is not
            positive, or no multiple of the replicas.

    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> model.compile("sgd", "mse")
        >>> estimate = estimate_memory(model, 64)
        >>> estimate.by_kind["inputs"]  # 64 examples of 8 numbers, and 4 targets
        3072

    Source: T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016,
    section 3, for what a step keeps.
    """
    sizes = _sizes(batch_size)
    _check_model(model, training=training, optimizer=optimizer)
    policies = [policy] if policy is None or isinstance(policy, str) else list(policy)
    found = []
    for name in policies:
        given = model if name is None else _with_policy(model, name)
        with _ready(given, model, optimizer, data, training=training):
            in_xla = bool(given.jit_compile) if compiled is None else bool(compiled)
            ask = _Asked(given, data, training=training, in_xla=in_xla)
            found += [ask.estimate(size) for size in sizes]
    if len(found) == 1 and not isinstance(batch_size, Sequence):
        return found[0]
    return MemoryEstimates(tuple(found))


class _Asked:
    """Traces steps of one model, each size once."""

    def __init__(
        self, model: keras.Model, data: Any, *, training: bool, in_xla: bool
    ) -> None:
        self._model, self._data, self._training = model, data, training
        self._in_xla = in_xla
        self._replicas = model.distribute_strategy.num_replicas_in_sync
        self._emulated = frozenset(HALF) - _fast_dtypes()
        self._traced: dict[int, tuple[TracedSpecs, Plan]] = {}

    def estimate(self, size: int) -> MemoryEstimate:
        """Returns the estimate for one batch size."""
        if size % self._replicas:
            raise ValueError(
                f"`batch_size` is {size} on {self._replicas} replicas; expected a "
                "multiple of their number, as each gets as many. Round it."
            )
        traced, plan = self._trace(size)
        notes = []
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
        parameters, slots = accounting.standing(self._model, training=self._training)
        inputs = sum(map(accounting.num_bytes, tf.nest.flatten(self._specs(size))))
        inputs *= self._replicas
        standing = parameters + slots + inputs
        kinds = {"parameters": parameters, "optimizer slots": slots, "inputs": inputs}
        kinds |= accounting.by_kind(peak, self._model, traced.marks)
        model = self._model
        return MemoryEstimate(
            model.name,
            assignment(model).policy,
            size,
            self._training,
            source,
            standing + peak.num_bytes,
            {kind: kinds[kind] for kind in accounting.KINDS if kinds.get(kind)},
            accounting.by_layer(peak, model, traced.marks, slots),
            plain_name(peak.at),
            self._curve(size, peak, parameters + slots, inputs / size),
            tuple(notes),
        )

    def _curve(
        self, size: int, peak: Peak, standing: int, input_bytes: float
    ) -> tuple[tuple[int, int], ...]:
        """Returns peaks for sizes around one."""
        other = 2 * size
        step = self._replicas
        sizes = {max(1, round(size * part / step)) * step for part in _PARTS}
        if self._in_xla:
            at_other, _ = self._program(self._trace(size)[0], other)
            if at_other is not None:
                slope = (at_other.num_bytes - peak.num_bytes) / size
                steps = {n: round(peak.num_bytes + slope * (n - size)) for n in sizes}
                return _points(steps, standing, input_bytes)
        plans = self._trace(size)[1], self._trace(other)[1]
        found = {size: peak.num_bytes}
        for each in sizes - {size}:
            plan = scaled(*plans, (size, other), each)
            if plan is None:
                _, plan = self._trace(each)
            found[each] = find_peak(plan, emulated=self._emulated).num_bytes
        return _points(found, standing, input_bytes)

    def _trace(self, size: int) -> tuple[TracedSpecs, Plan]:
        if size not in self._traced:
            traced = trace_specs(
                self._model, self._specs(size), inference=not self._training
            )
            self._traced[size] = traced, read_plan(traced.concrete)
        return self._traced[size]

    def _specs(self, size: int) -> Any:
        each = size // self._replicas
        return specs_of(self._model, self._data, each, training=self._training)

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


def _sizes(batch_size: Any) -> list[int]:
    if isinstance(batch_size, Sequence) and not isinstance(batch_size, str):
        if not batch_size:
            raise ValueError(
                "`batch_size` is empty; expected a size or several. Pass 32, or [32, "
                "64]."
            )
        return [_checks.positive_int("batch_size", each) for each in batch_size]
    return [_checks.positive_int("batch_size", batch_size)]


def _check_model(model: Any, *, training: bool, optimizer: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` is {model!r}, of type {type(model).__name__}; expected a "
            "`keras.Model`. Pass the model first, then the batch size."
        )
    if training and not model.compiled and optimizer is None:
        raise ValueError(
            f"Model {model.name!r} is not compiled; expected one that `fit` takes. "
            "Compile it, or pass `optimizer='adam'`, or `training=False` for inference."
        )
    if optimizer is not None and not training:
        raise ValueError(
            "`optimizer` came with `training=False`; expected one of them, as "
            "inference has no optimizer. Leave one out."
        )


def _with_policy(model: keras.Model, policy: str) -> keras.Model:
    """Returns a copy that computes under another policy."""
    instead = "apply the policy to the model yourself, by `tfamp.apply`"
    with model.distribute_strategy.scope():
        copy = copied(model, instead=instead)
        apply(copy, policy)
    return copy


@contextlib.contextmanager
def _ready(
    model: keras.Model,
    original: keras.Model,
    optimizer: Any,
    data: Any,
    *,
    training: bool,
) -> Iterator[None]:
    """Has the model built, and compiled as it was asked for, as long as it lasts."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(model.distribute_strategy.scope())
        if training and (optimizer is not None or model is not original):
            arguments = trainer.compile_arguments(original)
            chosen = optimizer if optimizer is not None else original.optimizer
            arguments |= {"optimizer": _anew(chosen), "run_eagerly": False}
            arguments.setdefault("loss", "mse")
            stack.enter_context(trainer.compiled_as(model, **arguments))
        if training:
            build(model, None if model.built else _one_example(model, data))
        yield


def _one_example(model: keras.Model, data: Any) -> Any:
    """Returns zeros that a model without weights yet can be built with."""
    specs = specs_of(model, data, 1, training=True)
    return tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), specs)


def _anew(optimizer: Any) -> Any:
    """Returns an optimizer without state, and without a loss scale of its own."""
    if isinstance(optimizer, str):
        return optimizer
    return type(optimizer).from_config(optimizer.get_config())


def _fast_dtypes() -> set[str]:
    """Returns the half dtypes that every device here multiplies in by itself."""
    fast = [set(hardware.fast_dtypes(device)) for device in hardware.devices()]
    return set(HALF).intersection(*fast)
