"""`tfamp memory` and `tfamp find_batch_size`: what a step holds, which batch fits."""

import dataclasses
from typing import Any

import tfamp
from tfamp.cli._flags import MAX_MEMORY, PLOT, Call, Command, Flag, Outcome, UsageError
from tfamp.cli._flags import sizes as read_sizes
from tfamp.cli.tools import BUILD, STATUS, TARGET, TRAINING, built, one_policy
from tfamp.records import units
from tfamp.trials.variant import Variant

# `fit` and `predict` take as many examples where nobody says.
_BATCH_SIZE = 32
# Sizes that matrix units like.
_MULTIPLE = 8
# No model's batch is as large: what holds it, holds any.
_ENDLESS = 2**40


def _memory(call: Call) -> Outcome:
    values = call.values
    if not values["training"] and values["optimizer"] is not None:
        raise UsageError(
            "`--optimizer` came with `--notraining`; expected one of them, as predict "
            "has no optimizer. Leave one out"
        )
    if "resident" in call.given and values["max_memory"] is None:
        raise UsageError(
            "`--resident` came without `--max_memory`; expected both, as it says what "
            "the limit is for. Add --max_memory, or leave it out"
        )
    found = _estimates(call)
    lines = _largest(found, values["max_memory"], values["resident"])
    return Outcome(found, "\n".join([found.table(), *lines]))


def _estimates(call: Call) -> Any:
    """Returns the estimates of each policy, each built under it, and each size."""
    given = {name: call.values[name] for name in ("optimizer", "training")}
    found: list[Any] = []
    for variant in call.values["policy"]:
        with built(call.argument, variant, needs_data=False) as made:
            # Below `built`, which finds out whether there is such a module.
            from tfamp.memory.batch_search.settings import batch_of

            batch = None if made.train is None else batch_of(made.train)
            data = None
            if batch is not None:
                parts = batch.parts
                parts = parts if isinstance(parts, tuple) else (parts,)
                # `predict` takes inputs alone.
                data = parts if given["training"] else parts[:1]
            own = tfamp.estimate_memory(
                made.model,
                call.values["batch_size"] or [batch.size if batch else _BATCH_SIZE],
                data=data,
                sequence_length=call.values["sequence_length"],
                **given,
            )
        found += [_named(each, variant) for each in own]
    from tfamp.memory.estimates import MemoryEstimates

    return MemoryEstimates(tuple(found))


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
    by_size = sorted(estimates, key=lambda each: int(each.batch_size))
    by_policy = {each.policy: each for each in by_size}
    names = dict.fromkeys(each.policy for each in estimates)
    words = ", ".join(
        f"{_fitting(by_policy[name], limit, whole)} ({name})" for name in names
    )
    whose = "whose process" if whole else "that"
    return [f"Largest batch size {whose} fits in {units.format_bytes(limit)}: {words}."]


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


def _find(call: Call) -> Outcome:
    given = {flag.name: call.values[flag.name] for flag in _SEARCH}
    return Outcome(
        tfamp.find_batch_size(
            call.argument,
            policy=str(call.values["policy"]),
            max_memory_bytes=call.values["max_memory"],
            **given,
        )
    )


def _policies(name: str, text: str) -> list[Variant]:
    return [one_policy(name, word) for word in text.split(",")]


def _count(name: str, default: int | None, help: str) -> Flag:
    return Flag(name, "integer", default, help, {"lower_bound": 1})


# Arguments of `tfamp.find_batch_size` under the same names.
_SEARCH = (
    _count("start", 8, "The first size to try."),
    _count("max_batch_size", None, "The largest size to try."),
    Flag("margin", "float", 0.1, "Part of the memory that stays free."),
    Flag("min_gain", "float", 0.05, "Gain in speed that a doubling has to bring."),
    _count("target_batch_size", None, "Size to reach, by accumulation if need be."),
    _count("steps", 3, "Steps of a trial."),
    Flag("timeout_seconds", "float", 600.0, "The most that a trial may take."),
)
_MEMORY = Command(
    "memory",
    "Predicts what a training step will hold in memory, by kind, and trains nothing: "
    "the step is traced; on a CPU also how large the process will be. With "
    "--max_memory it tells the largest batch that fits, on a CPU with the whole "
    "process. Shapes and the batch size are read of the data, if there are any. "
    f"{BUILD}\n\n{STATUS}",
    _memory,
    (
        Flag(
            *("batch_size", read_sizes, None),
            "Batch sizes, separated by commas; else that of the data, without data 32.",
        ),
        Flag(
            *("policy", _policies, "auto"),
            "Policies to build under, such as float32,mixed_bfloat16+xla.",
        ),
        TRAINING,
        _count(
            *("sequence_length", None),
            "What sizes are that model and data leave open, as lengths of texts.",
        ),
        Flag(
            *("optimizer", "string", None),
            "Another optimizer than the model's, by its Keras name.",
        ),
        MAX_MEMORY,
        Flag(
            *("resident", "bool", None),
            "Take --max_memory for the whole process, or (--noresident) for what a "
            "step holds, as on a GPU; else the first where it is known, which it is on "
            "CPUs.",
        ),
        PLOT,
    ),
    TARGET,
)
_FIND = Command(
    "find_batch_size",
    "Trains a few steps of real batches, each size in a fresh process, until one does "
    "not fit below --max_memory and what there is, or gains too little speed. "
    f"{BUILD}\n\n{STATUS}",
    _find,
    (
        Flag("policy", one_policy, "auto", "Policy to build under."),
        MAX_MEMORY,
        *_SEARCH,
        PLOT,
    ),
    TARGET,
)
COMMANDS = {
    "memory": _MEMORY,
    "estimate_memory": dataclasses.replace(_MEMORY, name="estimate_memory"),
    "find_batch_size": _FIND,
}
