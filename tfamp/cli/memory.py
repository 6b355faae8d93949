"""`tfamp memory` and `tfamp find_batch_size`: what a step holds, which batch fits."""

import dataclasses
from typing import Any

import tfamp
from tfamp.cli.command import (
    PLOT,
    STATUS,
    Call,
    Command,
    Flag,
    Outcome,
    UsageError,
    sizes,
)
from tfamp.cli.tools import BUILD, TARGET, built, one_policy, policy_flag
from tfamp.records import units
from tfamp.records.units import parse_bytes
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
    found = _estimates(call)
    lines = _largest(found, values["max_memory"], values["measure"])
    return Outcome(found, "\n".join([found.table(), *lines]))


def _estimates(call: Call) -> Any:
    """Returns the estimates of each policy, each built under it, and each size."""
    found: list[Any] = []
    for variant in call.values["policy"]:
        with built(call.argument, variant, needs_data=False) as made:
            # Below `built`, which finds out whether there is such a module.
            from tfamp.trials.batches import batch_of

            batch = None if made.train is None else batch_of(made.train)
            data = None
            if batch is not None:
                parts = batch.parts
                parts = parts if isinstance(parts, tuple) else (parts,)
                # `predict` takes inputs alone.
                data = parts if call.values["training"] else parts[:1]
            own = tfamp.estimate_memory(
                made.model,
                call.values["batch_size"] or [batch.size if batch else _BATCH_SIZE],
                data=data,
                **call.given,
            )
        found += [_named(each, variant) for each in own]
    from tfamp.memory.estimates import MemoryEstimates

    return MemoryEstimates(tuple(found))


def _named(estimate: Any, variant: Variant) -> Any:
    """Returns an estimate under the name its policy was typed by, "auto" resolved."""
    if variant.policy == "auto":
        variant = dataclasses.replace(variant, policy=estimate.policy)
    return dataclasses.replace(estimate, policy=str(variant))


def _largest(estimates: Any, limit: int | None, is_measured: bool) -> list[str]:
    """Returns a line on the largest batch that fits, of each policy."""
    if limit is None:
        return []
    # The largest size that was traced says most of those beyond.
    by_size = sorted(estimates, key=lambda each: int(each.batch_size))
    by_policy = {each.policy: each for each in by_size}
    names = dict.fromkeys(each.policy for each in estimates)
    words = ", ".join(f"{_fitting(by_policy[name], limit)} ({name})" for name in names)
    whose = "whose process" if is_measured else "that"
    return [f"Largest batch size {whose} fits in {units.format_bytes(limit)}: {words}."]


def _fitting(estimate: Any, limit: int) -> str:
    def fits(size: int) -> bool:
        return bool(estimate.bytes_at(size) <= limit)

    if not fits(1):
        least = estimate.bytes_at(1)
        return f"none, 1 takes {units.format_bytes(least)}"
    if fits(_ENDLESS):
        return "any"
    multiple = _MULTIPLE if fits(_MULTIPLE) else 1
    found = estimate.largest_batch(limit, multiple_of=multiple)
    return f"{found:,}"


def _find(call: Call) -> Outcome:
    policy = str(call.values["policy"])
    return Outcome(tfamp.find_batch_size(call.argument, policy=policy, **call.given))


def _policies(name: str, text: str) -> list[Variant]:
    return [one_policy(name, word) for word in text.split(",")]


_MEMORY = Command(
    "memory",
    "tfamp.estimate_memory",
    _memory,
    (
        Flag(
            *("batch_size", sizes, None),
            "Batch sizes, separated by commas; else that of the data, without data 32.",
        ),
        Flag(
            *("policy", _policies, "auto"),
            "Policies to build under, such as float32,mixed_bfloat16+xla.",
        ),
        Flag("max_memory", parse_bytes, None, "Memory there is, such as 16GB."),
        PLOT,
    ),
    without=("batch_size", "policy", "data"),
    more="With --max_memory it tells the largest batch that fits, with --measure the "
    "whole process. Shapes and the batch size are read of the data, if there are any. "
    f"{BUILD}\n\n{STATUS}",
    argument=TARGET,
)
_FIND = Command(
    "find_batch_size",
    "tfamp.find_batch_size",
    _find,
    (policy_flag(),),
    without=("policy", "verbose", "on_trial"),
    more=f"{BUILD}\n\n{STATUS}",
    argument=TARGET,
)
COMMANDS = {
    "memory": _MEMORY,
    "estimate_memory": dataclasses.replace(_MEMORY, name="estimate_memory"),
    "find_batch_size": _FIND,
}
