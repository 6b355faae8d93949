"""`tfamp.estimate_memory`: bytes of a step, from its traced graph."""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras

from tfamp.keras_hooks import trainer
from tfamp.memory.estimates import MemoryEstimate, MemoryEstimates
from tfamp.memory.model_steps import StepMemory
from tfamp.models import apply
from tfamp.records import checks
from tfamp.stepping.unchanged import copied


def estimate_memory(
    model: keras.Model,
    batch_size: int | Sequence[int],
    *,
    optimizer: Any = None,
    policy: str | Sequence[str] | None = None,
    training: bool = True,
    data: Any = None,
    sequence_length: int | None = None,
    jit_compile: bool | None = None,
) -> Any:
    """Predicts the most memory that a step will hold, and nothing is run.

    The step is traced, with the loss, the optimizer, its loss scale, accumulation and
    moving averages, as `fit` traces it, and its operations are gone through in the
    order in which they become ready: each buffer lives from its making to its last
    reader, operations that write in place do, and what `tfamp.remat` computes again is
    not kept. With XLA its program is compiled and read. Not in it: what the process
    holds anyway (Python, TensorFlow, the runtime of a GPU), the input pipeline, and
    what an allocator keeps for later.

    On a CPU `resident_bytes` has these too: the resident size that the whole process
    will show. What steps take and free goes through a simulation of the allocator in
    force: TensorFlow's own, which it uses with oneDNN and which gives nothing back, or
    glibc's, with the thresholds of the environment. For others, and with XLA, it is
    not told. A model whose steps have run has their graphs already.

    Args:
        model: A Keras model, compiled unless for inference or with `optimizer`.
        batch_size: Examples of a step, of all replicas; or several sizes.
        optimizer: Another optimizer than the model's: an object or a Keras name. A
            model without a loss gets the mean squared error.
        policy: Another policy than the model's, or several; a copy of the model is
            made for each.
        training: False for a step of `predict`.
        data: A batch (x, y), x alone, as an array or a dict, or whatever else `fit`
            takes, of which only shapes and dtypes are read; needed where the model
            does not tell its inputs or targets.
        sequence_length: What to take for every size that the model leaves open, as
            models of text do; or pass an example as `data`.
        jit_compile: Whether XLA compiles the step; None for what the model says. It
            takes as long as compiling.

    Returns:
        A `MemoryEstimate`; for several sizes or policies `MemoryEstimates`.

    Raises:
        TypeError: `model` is no Keras model.
        ValueError: It is not compiled, does not tell its inputs, or leaves sizes open
            that neither `data` nor `sequence_length` tell; a size is not positive, or
            no multiple of the replicas.

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
    if sequence_length is not None:
        checks.positive_int("sequence_length", sequence_length)
    _check_model(model, training=training, optimizer=optimizer)
    policies = [policy] if policy is None or isinstance(policy, str) else list(policy)
    found: list[MemoryEstimate] = []
    for name in policies:
        with contextlib.ExitStack() as stack:
            stack.enter_context(model.distribute_strategy.scope())
            given = model
            if name is not None:  # a copy that computes under it
                instead = "apply the policy to the model yourself, by `tfamp.apply`"
                given = copied(model, instead=instead)
                apply(given, name)
            if training and (optimizer is not None or given is not model):
                chosen = model.optimizer if optimizer is None else optimizer
                if not isinstance(chosen, str):
                    # Without state, and without a loss scale of its own.
                    chosen = type(chosen).from_config(chosen.get_config())
                arguments = {"loss": "mse", **trainer.compile_arguments(model)}
                arguments |= {"optimizer": chosen, "run_eagerly": False}
                stack.enter_context(trainer.compiled_as(given, **arguments))
            steps = StepMemory(
                given,
                data,
                training=training,
                in_xla=bool(given.jit_compile if jit_compile is None else jit_compile),
                sequence_length=sequence_length,
            )
            found += map(steps.estimate, sizes)
    if len(found) == 1 and not isinstance(batch_size, Sequence):
        return found[0]
    return MemoryEstimates(tuple(found))


def _sizes(batch_size: Any) -> list[int]:
    is_one = isinstance(batch_size, str) or not isinstance(batch_size, Sequence)
    given = [batch_size] if is_one else batch_size
    if not given:
        raise ValueError(
            "`batch_size` is empty; expected a size or several. Pass 32, or [32, 64]."
        )
    return [checks.positive_int("batch_size", each) for each in given]


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
