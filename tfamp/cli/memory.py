"""`tfamp memory`: what a step will hold, and which batch size fits or suits."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from absl import flags

from tfamp.cli import _flags
from tfamp.records import units
from tfamp.trials import targets
from tfamp.trials.variant import Variant

_PURPOSE = """\
Predicts what a training step will hold in memory, by kind, and trains nothing: the
step is traced; on a CPU also how large the process will be. With --max_memory it tells
the largest batch that fits, on a CPU with the whole process. `module:build` names
a function that returns a compiled model, or (model, train) or (model, train,
validation), of which shapes and the batch size are read. --find trains a few steps of
real batches instead, each size in a fresh process, until one does not fit or gains too
little speed.

Ends with status 0, 1 if it cannot be told, 2 if called wrongly."""
# `fit` and `predict` take as many examples where nobody says.
_BATCH_SIZE = 32
# Sizes that matrix units like.
_MULTIPLE = 8
# No model's batch is as large: what holds it, holds any.
_ENDLESS = 2**40
# Flags that trials have no use for.
_NOT_FOUND_WITH = (
    *("batch_size", "training", "optimizer", "resident", "sequence_length"),
)


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: The arguments after "memory".

    Returns:
        The exit status, as the help says.
    """
    values = _define()

    def work(target: str) -> _flags.Outcome:
        with _flags.reading():
            variants = [Variant.parse(word, "--policy") for word in values.policy]
            sizes = [_whole(text) for text in values.batch_size or ()]
            limit = _flags.max_memory(values)
            _check(values)
        if values.find:
            found = find(target, variants[0], limit)
            text = str(found)
        else:
            found = estimate(target, variants, sizes, values)
            text = "\n".join([found.table(), *_largest(found, limit, values.resident)])
        _flags.write(values, found)
        if values.plot is not None:
            found.plot(values.plot)
        return _flags.Outcome(text)

    return _flags.run(argv, values, work, command="tfamp memory", purpose=_PURPOSE)


def estimate(
    target: str,
    variants: Sequence[Variant],
    sizes: Sequence[int],
    values: flags.FlagValues,
) -> Any:
    """Returns the estimates of each policy, each built under it, and each size."""
    build = targets.load(target)
    from tfamp.memory.batch_search.data import batch_of
    from tfamp.memory.estimate.estimator import estimate_memory
    from tfamp.memory.estimate.records import MemoryEstimates
    from tfamp.trials.in_force import in_force

    found: list[Any] = []
    for variant in variants:
        with in_force(variant):
            model, data = _built(target, targets.call(build, seed=0, epochs=1))
            batch = None if data is None else batch_of(data)
            own = estimate_memory(
                model,
                list(sizes) or [_BATCH_SIZE if batch is None else batch.size],
                optimizer=values.optimizer,
                training=values.training,
                data=None if batch is None else _parts(batch.parts, values.training),
                sequence_length=values.sequence_length,
                jit_compile=True if variant.jit_compile else None,
            )
        found += [_named(each, variant) for each in own]
    return MemoryEstimates(tuple(found))


def find(target: str, variant: Variant, limit: int | None) -> Any:
    """Returns what trials of real batches come to."""
    from tfamp.memory.batch_search.finder import find_batch_size

    return find_batch_size(target, policy=str(variant), max_memory_bytes=limit)


def _built(target: str, built: Any) -> tuple[Any, Any]:
    """Returns the model, and the data or None, of what a function returned."""
    if not isinstance(built, tuple):
        return built, None
    if not 2 <= len(built) <= 3:
        raise TypeError(
            f"{target!r} returned a tuple of {len(built)}; expected a compiled model, "
            "(model, train) or (model, train, validation). Return one of them."
        )
    return built[0], built[1]


def _parts(parts: Any, training: bool) -> Any:
    """Returns the parts of a batch that a step takes: for `predict` inputs alone."""
    if not isinstance(parts, tuple):
        return (parts,)
    return parts if training else parts[:1]


def _named(estimate: Any, variant: Variant) -> Any:
    """Returns an estimate under the name its policy was typed by, "auto" resolved."""
    if variant.policy == "auto":
        variant = dataclasses.replace(variant, policy=estimate.policy)
    return dataclasses.replace(estimate, policy=str(variant))


def _largest(estimates: Any, limit: int | None, resident: bool | None) -> list[str]:
    """Returns a line on the largest batch that fits, of each policy."""
    if limit is None:
        return []
    whole = resident
    if whole is None:
        whole = all(each.resident_bytes is not None for each in estimates)
    # The largest size that was traced says most of those beyond.
    by_policy = {each.policy: each for each in sorted(estimates, key=_size)}
    names = dict.fromkeys(each.policy for each in estimates)
    words = ", ".join(
        f"{_fitting(by_policy[name], limit, whole)} ({name})" for name in names
    )
    whose = "whose process" if whole else "that"
    return [f"Largest batch size {whose} fits in {units.format_bytes(limit)}: {words}."]


def _size(estimate: Any) -> int:
    return int(estimate.batch_size)


def _fitting(estimate: Any, limit: int, resident: bool) -> str:
    def fits(size: int) -> bool:
        return bool(estimate.bytes_at(size, resident=resident) <= limit)

    if not fits(1):
        least = estimate.bytes_at(1, resident=resident)
        return f"none, 1 takes {units.format_bytes(least)}"
    if fits(_ENDLESS):
        return "any"
    multiple = _MULTIPLE if fits(_MULTIPLE) else 1
    found = estimate.largest_batch(limit, multiple_of=multiple, resident=resident)
    return f"{found:,}"


def _check(values: flags.FlagValues) -> None:
    """Checks that every flag that was given has an effect."""
    if not values.training and values.optimizer is not None:
        raise ValueError(
            "`--optimizer` came with `--notraining`; expected one of them, as predict "
            "has no optimizer. Leave one out"
        )
    if values["resident"].present and values.max_memory is None:
        raise ValueError(
            "`--resident` came without `--max_memory`; expected both, as it says what "
            "the limit is for. Add --max_memory, or leave it out"
        )
    if not values.find:
        return
    if len(values.policy) != 1:
        raise ValueError(
            f"`--policy` is {','.join(values.policy)!r} with `--find`; expected one "
            "policy, as its trials take minutes. Call once for each"
        )
    for name in _NOT_FOUND_WITH:
        if values[name].present:
            raise ValueError(
                f"`--{name}` came with `--find`; expected one of them, as trials train "
                "what is built, in sizes of their own. Leave one out"
            )


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(
            f"`--batch_size` has {text!r}; expected whole numbers of at least 1. Write "
            "for example 32,64"
        )
    return int(text)


def _define() -> flags.FlagValues:
    values = _flags.new_flags()
    add = functools.partial(_flags.define, values)
    add(
        "list",
        "batch_size",
        None,
        "Batch sizes, separated by commas; else that of the data, without data 32.",
    )
    add(
        "list",
        "policy",
        "auto",
        "Policies to build under, such as float32,mixed_bfloat16+xla.",
    )
    add("bool", "training", True, "Look at the step of fit, or else of predict.")
    add(
        "integer",
        "sequence_length",
        None,
        "What sizes are that model and data leave open, as lengths of texts.",
        lower_bound=1,
    )
    add(
        "string",
        "optimizer",
        None,
        "Another optimizer than the model's, by its Keras name.",
    )
    add(
        "string",
        "max_memory",
        None,
        "Memory there is, such as 16GB, 14.5GiB or a number of bytes.",
    )
    add(
        "bool",
        "resident",
        None,
        "Take --max_memory for the whole process, or (--noresident) for what a step "
        "holds, as on a GPU; else the first where it is known, which it is on CPUs.",
    )
    add(
        "bool",
        "find",
        False,
        "Try sizes by training real batches, below --max_memory and what there is.",
    )
    add("string", "json", None, _flags.JSON)
    add("string", "plot", None, "Image file that gets memory by batch size.")
    return values
