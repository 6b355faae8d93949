"""Commands that build a model with its data and ask one function of tfamp about it."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tfamp
from tfamp.cli._flags import PLOT, Call, Command, Flag, Outcome, one_of
from tfamp.records import checks
from tfamp.trials import parcel
from tfamp.trials.variant import Variant

TARGET = "module:build"
BUILD = (
    "`module:build` names a function that returns a compiled model with its data, "
    "(model, train) or (model, train, validation); it is called under the policy."
)
STATUS = "Ends with status 0, 1 if it cannot be told, 2 if called wrongly."
_FAIL_STATUS = (
    "Ends with status 0, 1 if something as bad as --fail_on was found or it cannot be "
    "told, 2 if called wrongly."
)
_AT_LEAST_1 = {"lower_bound": 1}


def _batches(default: int) -> tuple[Flag, Flag]:
    """Returns the flags on how much of the data is looked at."""
    help = "Batches to look at."
    return Flag("num_batches", "integer", default, help, _AT_LEAST_1), BATCH_SIZE


def one_policy(name: str, text: str) -> Variant:
    """Reads the value of a flag that names a policy, or the file of a plan."""
    return Variant.named(text, name)


def _policy(default: str) -> Flag:
    return Flag(
        *("policy", one_policy, default),
        "Policy to build under, such as float32, mixed_bfloat16+xla, "
        "keras:mixed_float16 for stock Keras, or the file of a plan, plan.json.",
    )


BATCH_SIZE = Flag(
    *("batch_size", "integer", 32, "Examples in a batch of arrays.", _AT_LEAST_1)
)
TRAINING = Flag(
    *("training", "bool", True, "Look at the step of fit, or else of predict.")
)


class Built(NamedTuple):
    """A model with its data, None where there are none, and the policy in force."""

    model: Any
    train: Any
    validation: Any
    policy: str


@contextlib.contextmanager
def built(target: str, variant: Variant, *, needs_data: bool = True) -> Iterator[Built]:
    """Yields what a function builds under a policy, which is in force in the block.

    Raises:
        TypeError: The function returned something else.
    """
    build = parcel.load(target)
    import keras

    from tfamp.trials.variant import in_force

    with in_force(variant) as (policy, _):
        found = parcel.call(build, seed=0, epochs=1)
        model, *data = found if isinstance(found, (tuple, list)) else (found,)
        if not isinstance(model, keras.Model) or len(data) > 2:
            raise TypeError(
                f"{target!r} returned {found!r}; expected a model, (model, train) or "
                "(model, train, validation). Return the model first."
            )
        if needs_data and not data:
            raise TypeError(
                f"{target!r} returned {found!r}; expected (model, train) or (model, "
                "train, validation). Return the data with the model."
            )
        if variant.jit_compile:
            model.jit_compile = True
        train, validation = (*data, None, None)[:2]
        yield Built(model, train, validation, policy)


def _on_model(
    name: str,
    purpose: str,
    ask: Callable[..., Any],
    *own: Flag,
    policy: str = "auto",
    needs_data: bool = True,
) -> Command:
    """Returns a command on a model.

    Args:
        name: The function's name, too.
        purpose: The start of the help; the rest is the same for all.
        ask: Given the `Built` and its own flags by name, returns the result.
        *own: The flags that are arguments of the function.
        policy: What is built under where no policy is given.
        needs_data: Whether a model alone is refused.
    """

    def work(call: Call) -> Outcome:
        given = {each.name: call.values[each.name] for each in own if each != PLOT}
        with built(call.argument, call.values["policy"], needs_data=needs_data) as made:
            return Outcome(ask(made, **given))

    flags = (_policy(policy), *own)
    return Command(name, f"{purpose} {BUILD}\n\n{STATUS}", work, flags, TARGET)


def _judging(command: Command) -> Command:
    """Returns a command whose findings decide its status, by `--fail_on`."""

    def work(call: Call) -> Outcome:
        outcome = command.work(call)
        found = outcome.record
        warned = call.values["fail_on"] == "warning" and found.warnings
        return outcome._replace(is_bad=bool(found.errors or warned))

    return dataclasses.replace(
        command,
        work=work,
        purpose=command.purpose.replace(STATUS, _FAIL_STATUS),
        flags=(*command.flags, _FAIL_ON),
    )


_FAIL_ON = Flag(
    *("fail_on", one_of("error", "warning"), "error"),
    "Severity that ends the command with status 1: error or warning.",
)


def _silenced(name: str, texts: Sequence[str]) -> dict[str, str]:
    """Returns the reasons by rule, of texts such as "rule:reason,rule:reason".

    A comma stands between two rules where the name of one follows, so that reasons
    may hold commas.

    Raises:
        ValueError: A text has another form, or names no rule or one twice.
    """
    if not texts:
        return {}
    from tfamp.numerics.lint.linter import RULE_IDS

    names = "|".join(map(re.escape, RULE_IDS))
    pairs = [each for text in texts for each in re.split(rf",(?=(?:{names}):)", text)]
    found: dict[str, str] = {}
    for pair in pairs:
        rule, _, reason = pair.partition(":")
        if not (rule and reason.strip()):
            raise ValueError(
                f"`{name}` is {pair!r}; expected 'rule:reason', such as "
                "'half-head:its loss takes logits'"
            )
        checks.choice(name, rule, RULE_IDS)
        if rule in found:
            raise ValueError(f"`{name}` names {rule!r} twice; expected one reason")
        found[rule] = reason.strip()
    return found


def _check(made: Built, *, compute_dtype: str | None, **given: Any) -> Any:
    dtype = compute_dtype or made.policy
    return tfamp.data.check(made.train, made.validation, compute_dtype=dtype, **given)


def _triage(made: Built, *, bundle: str | None, batch: int, batch_size: int) -> Any:
    if bundle is not None:
        return tfamp.triage(made.model, bundle)
    from tfamp.stepping.arguments import dataset_of, first_batch

    batches = dataset_of(made.train, batch_size).skip(batch)
    return tfamp.triage(made.model, first_batch(batches))


def _rate(name: str, default: float, help: str) -> Flag:
    return Flag(name, "float", default, help, {"lower_bound": 0.0})


_ALL = (
    _judging(
        _on_model(
            "check",
            "Shows what would go wrong with the data in a compute dtype: overflow, "
            "NaN, drift, duplicates, labels. The model is not looked at.",
            _check,
            Flag(
                *("compute_dtype", "string", None),
                "float16, bfloat16, float32 or a policy; else that of the model.",
            ),
            Flag(
                *("num_classes", "integer", None, "Outputs of a classifier."),
                _AT_LEAST_1,
            ),
            Flag(
                *("batched", "bool", None),
                "Whether elements of a dataset are batches, where that is not seen.",
            ),
            policy="mixed_float16",
        )
    ),
    _judging(
        _on_model(
            "lint",
            "Shows what half precision would spoil in a model, layer by layer, with "
            "the reason and the remedy. Nothing is trained; neither compilation nor "
            "data is needed. docs/lint.md explains each rule.",
            lambda made, **given: tfamp.lint(made.model, data=made.train, **given),
            Flag(
                *("silence", _silenced, []),
                "Rules to leave out and why, as rule:reason,rule:reason",
                again=True,
            ),
            BATCH_SIZE,
            policy="mixed_float16",
            needs_data=False,
        )
    ),
    _on_model(
        "assignment",
        "Shows the dtypes of each layer and the rule behind them. Nothing is trained; "
        "no data is needed.",
        lambda made: tfamp.assignment(made.model),
        needs_data=False,
    ),
    _on_model(
        "prove",
        "Shows which matrix products and convolutions of a train step run in which "
        "dtype, layer by layer, where numbers are cast, and why it is not faster. "
        "Nothing is trained.",
        lambda made, **given: tfamp.prove(made.model, made.train, **given),
        TRAINING,
        Flag(
            *("seconds", "float", None),
            "Measure for so long how much the input holds training up.",
            {"lower_bound": 0.0},
        ),
        BATCH_SIZE,
    ),
    _on_model(
        "ranges",
        "Counts the magnitudes of weights, activations and gradients in a few steps in "
        "float32, and tells the loss scale that float16 holds gradients best with. "
        "Nothing is updated.",
        lambda made, **given: tfamp.ranges(made.model, made.train, **given),
        *_batches(4),
        PLOT,
        policy="float32",
    ),
    _on_model(
        "sensitivity",
        "Finds the layers that should stay in float32: each runs again alone in the "
        "low precision, on what it got in a float32 step. Nothing is trained.",
        lambda made, **given: tfamp.sensitivity(made.model, made.train, **given),
        Flag("dtype", one_of("float16", "bfloat16"), "float16", "The low precision."),
        *_batches(3),
        policy="float32",
    ),
    _on_model(
        "bottleneck",
        "Times training, the same steps with batches from memory, and the input alone, "
        "and tells what holds training up. Weights are put back.",
        lambda made, **given: tfamp.data.bottleneck(made.model, made.train, **given),
        Flag(
            *("seconds", "float", 20.0, "About how long to measure at most."),
            {"lower_bound": 0.0},
        ),
        BATCH_SIZE,
    ),
    _on_model(
        "lr_find",
        "Trains some steps at rates that grow from step to step, and tells which "
        "suits. Weights are put back.",
        lambda made, **given: tfamp.training.lr_find(made.model, made.train, **given),
        _rate("min_rate", 1e-7, "The first rate."),
        _rate("max_rate", 10.0, "The last one."),
        Flag("num_steps", "integer", 100, "Steps from one to the other.", _AT_LEAST_1),
        BATCH_SIZE,
        PLOT,
    ),
    _on_model(
        "triage",
        "Replays a step with every layer watched, under the policy, in float32 and "
        "without a loss scale, and says why it fails: of a batch of the data, or of a "
        "bundle that `tfamp.callbacks.FlightRecorder` wrote. Nothing is updated.",
        _triage,
        Flag("bundle", "string", None, "Folder of the bundle; else a batch is taken."),
        Flag(
            *("batch", "integer", 0, "Which batch of the data, from 0."),
            {"lower_bound": 0},
        ),
        BATCH_SIZE,
    ),
)
COMMANDS = {command.name: command for command in _ALL}
