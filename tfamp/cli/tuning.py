"""`tfamp measure` and `tfamp tune`: a policy, and layers in float32, by measuring."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tfamp
from tfamp.cli._flags import Call, Command, Flag, Outcome, UsageError, one_of, some_of
from tfamp.cli.tools import (
    BATCH_SIZE,
    STATUS,
    TARGET,
    TRAINING,
    Built,
    built,
    one_policy,
)
from tfamp.records import checks, units
from tfamp.trials import parcel
from tfamp.trials.variant import Variant

# What a policy is compared with, and what is built under.
_FLOAT32 = Variant("float32")
_AUTO = "auto"
_HALF = ("mixed_float16", "mixed_bfloat16")
_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
_BUILD = (
    "`module:build` names a function that returns a compiled model with its data, "
    "(model, train) or (model, train, validation), or the model alone where --data "
    "names another for the data."
)


def _measure(call: Call) -> Outcome:
    given = {flag.name: call.values[flag.name] for flag in _MEASURED}
    with built(call.argument, _FLOAT32, needs_data=_needs_data(call)) as made:
        return Outcome(tfamp.measure_policies(made.model, _train(call, made), **given))


def _tune(call: Call) -> Outcome:
    values = call.values
    out = Path(values["out"])
    if not out.parent.is_dir():
        raise UsageError(
            f"`--out` is {str(out)!r}, but there is no folder {str(out.parent)!r}; "
            "expected a file in one that is there. Make it, or name another"
        )
    given = {flag.name: values[flag.name] for flag in _TUNED}
    with built(call.argument, _FLOAT32, needs_data=_needs_data(call)) as made:
        named = values["validation"]
        plan = tfamp.tune(
            made.model if values["trained"] else _builder(call.argument),
            _train(call, made),
            policy=_half_policy(values["policy"]),
            metric=_metric(values["metric"]),
            validation=made.validation if named is None else parcel.load(named)(),
            **given,
        )
    plan.to_json(out)
    tuning = plan.evidence["tuning"]
    number = len(tuning["evaluations"]) + (tuning["confirmed"] is not None)
    lines = (
        plan.table(),
        f"{plan.policy}: {tuning['reason']}.",
        f"{tuning['metric']} by {tuning['judged_by']}: {number} evaluations, "
        f"{units.format_seconds(tuning['seconds'])}.",
        f"Plan: {out}; train under it with `tfamp.enable(policy={str(out)!r})`.",
    )
    return Outcome(plan, "\n".join(lines))


def _needs_data(call: Call) -> bool:
    return call.values["data"] is None


def _train(call: Call, made: Built) -> Any:
    """Returns what the function of --data gives, or what came with the model."""
    named = call.values["data"]
    return made.train if named is None else parcel.load(named)()


def _builder(target: str) -> Callable[[], Any]:
    """Returns a function that builds a model alone, as `tfamp.tune` takes it.

    A function that sets seeds itself gets one that those in force decide, so that each
    of the trainings begins elsewhere.
    """
    build = parcel.load(target)

    def build_model() -> Any:
        found = parcel.call(build, seed=random.randrange(2**31), epochs=1)
        return found[0] if isinstance(found, (tuple, list)) else found

    return build_model


def _half_policy(given: str) -> str:
    """Returns the policy to tune; that which suits the devices for "auto"."""
    if given != _AUTO:
        return given
    from tfamp.machine import devices

    found = devices.recommend(devices.devices())
    if found.policy not in _HALF:
        raise ValueError(
            f"`--policy` 'auto' is {found.policy!r} here, in which nothing is to be "
            f"tuned: {found.reason} Name one of {_HALF} to make a plan for the devices "
            "that it will train on."
        )
    return found.policy


def _metric(text: str | None) -> Any:
    """Returns a metric of Keras by name, or the function that "module:name" names."""
    return parcel.load(text) if text is not None and ":" in text else text


def _policy_or_plan(name: str, text: str) -> str:
    if text.endswith(".json"):
        return one_policy(name, text).policy
    return checks.choice(name, text, _CHOICES)


_CHOICES = (_AUTO, *_HALF)
_AT_LEAST_1 = {"lower_bound": 1}
_DATA = Flag(
    *("data", "string", None),
    "module:data, a function that returns what `fit` takes; else data of the build.",
)
# Arguments of the functions under the same names.
_MEASURED = (
    Flag(
        *("budget_seconds", "float", 20.0, "About how long to measure at most."),
        {"lower_bound": 0.0},
    ),
    Flag("max_steps", "integer", 200, "Steps of each policy at most.", _AT_LEAST_1),
    Flag(
        *("policies", some_of(*_POLICIES), list(_POLICIES)),
        "What to time beside float32, such as mixed_bfloat16,mixed_float16.",
    ),
    Flag(
        *("jit_compile", "bool", None),
        "Time steps compiled by XLA alone, or (--nojit_compile) without; else both.",
    ),
    Flag(
        *("use_cache", "bool", True),
        "Take what an earlier run measured of the same model, data and devices.",
    ),
    BATCH_SIZE,
)
_TUNED = (
    Flag(
        *("tolerance", "float", 0.005),
        "Loss of the metric that counts as none: of accuracies as it is, of losses "
        "and errors relative to float32.",
    ),
    Flag(
        *("max_evaluations", "integer", 12, "Plans to try at most."),
        {"lower_bound": 2},
    ),
    Flag(
        *("objective", one_of("time", "memory", "size"), "time"),
        "What half precision is to save: time, memory or size.",
    ),
    Flag(
        *("relax_rules", "bool", False),
        "Let layers that default rules keep go to half precision where that does no "
        "harm.",
    ),
    TRAINING._replace(help="Make a plan to train under, or else to predict."),
    Flag(
        *("checkpoint", "string", None),
        "File that keeps evaluations; the same command goes on from there.",
    ),
    Flag("num_batches", "integer", 3, "Batches that rank layers.", _AT_LEAST_1),
    Flag("seeds", "integer", 3, "Short trainings of a plan.", {"lower_bound": 2}),
    Flag("num_steps", "integer", 50, "Steps of each of them.", _AT_LEAST_1),
    BATCH_SIZE,
)
_MEASURE = Command(
    "measure",
    "Times the model's own training step under each policy, with XLA and without, in "
    "turns on the same batches, and says which is fastest; none is that is not shown "
    "to be faster than float32. `tfamp.enable()` takes the answer from then on, "
    f"`tfamp doctor` lists what was measured. {_BUILD}\n\n{STATUS}",
    _measure,
    (_DATA, *_MEASURED),
    TARGET,
)
_TUNE = Command(
    "tune",
    "Finds the layers that have to stay in float32 for a metric to stay what it is, "
    "and writes a plan that `tfamp.enable(policy=FILE)` takes. Plans are judged by "
    "short trainings of what the function builds, or by outputs with --trained, the "
    "last one on examples that the choice has not seen. Where no half precision holds "
    f"the plan is float32, and says why. {_BUILD}\n\n{STATUS}",
    _tune,
    (
        Flag(
            *("policy", _policy_or_plan, _AUTO),
            "mixed_float16, mixed_bfloat16, that of them that suits this machine "
            "(auto), or the file of a plan to start from.",
        ),
        _DATA,
        Flag(
            *("validation", "string", None),
            "module:data, likewise, to take the metric of; else that of the build, "
            "without it the data.",
        ),
        Flag(
            *("metric", "string", None),
            "A metric of Keras by name, or module:function of targets and outputs; "
            "else the loss.",
        ),
        Flag("out", "string", "plan.json", "File that gets the plan."),
        Flag(
            *("trained", "bool", False),
            "The function returns a trained model, whose outputs are compared.",
        ),
        *_TUNED,
    ),
    TARGET,
    interrupted="stopped before a plan was found; with --checkpoint=FILE the same "
    "command goes on.",
)
COMMANDS = {
    "measure": _MEASURE,
    "measure_policies": dataclasses.replace(_MEASURE, name="measure_policies"),
    "tune": _TUNE,
}
