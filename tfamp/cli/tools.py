"""Commands that build a model with its data and ask one function of tfamp about it."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tfamp
from tfamp.cli.command import PLOT, STATUS, Call, Command, Flag, Outcome, one_of
from tfamp.trials import parcel
from tfamp.trials.variant import Variant

TARGET = "module:build"
BUILD = (
    "`module:build` names a function that returns a compiled model with its data, "
    "(model, train) or (model, train, validation); it is called under the policy."
)


def one_policy(name: str, text: str) -> Variant:
    """Reads the value of a flag that names a policy, or the file of a plan."""
    return Variant.named(text, name)


def policy_flag(default: str = "auto") -> Flag:
    """Returns the flag that says what is built under."""
    return Flag(
        *("policy", one_policy, default),
        "Policy to build under, such as float32, mixed_bfloat16+xla, "
        "keras:mixed_float16 for stock Keras, or the file of a plan, plan.json.",
    )


class Built(NamedTuple):
    """A model with its data, None where there are none, and the policy in force."""

    model: Any
    train: Any
    validation: Any
    policy: str


@contextlib.contextmanager
def built(target: str, variant: Variant, *, needs_data: bool = True) -> Iterator[Built]:
    """Yields what a function builds under a policy, which is in force in the block."""
    build = parcel.load(target)
    from tfamp.trials.variant import in_force

    with in_force(variant) as (policy, _):
        found = parcel.call(build, seed=0, epochs=1)
        model, train, validation = parcel.parts(found, of=repr(target))
        if needs_data and train is None:
            raise TypeError(
                f"{target!r} returned {found!r}; expected (model, train) or (model, "
                "train, validation). Return the data with the model."
            )
        if variant.jit_compile:
            model.jit_compile = True
        yield Built(model, train, validation, policy)


def _on_model(
    function: str,
    *own: Flag,
    ask: Callable[..., Any] | None = None,
    policy: str = "auto",
    needs_data: bool = True,
    without: Sequence[str] = (),
    judges: bool = False,
) -> Command:
    """Returns a command on a model.

    Args:
        function: The function, such as "tfamp.prove".
        *own: Flags that the function does not have, or not so.
        ask: Given the `Built` and the flags that are arguments of the function, or its
            own, by name, returns the result; None gives the function model and data.
        policy: What is built under where no policy is given.
        needs_data: Whether a model alone is refused.
        without: Arguments that are no flag.
        judges: Whether the findings decide the status, by `--fail_on`.
    """

    def work(call: Call) -> Outcome:
        given = {**call.given, **{each.name: call.values[each.name] for each in own}}
        given.pop("plot", None)
        with built(call.argument, call.values["policy"], needs_data=needs_data) as made:
            if ask is not None:
                found = ask(made, **given)
            else:
                named = operator.attrgetter(function.removeprefix("tfamp."))(tfamp)
                found = named(made.model, made.train, **given)
        if not judges:
            return Outcome(found)
        warned = call.values["fail_on"] == "warning" and found.warnings
        return Outcome(found, is_bad=bool(found.errors or warned))

    status = STATUS
    if judges:
        told = "1 if something as bad as --fail_on was found or it cannot be told"
        status = STATUS.replace("1 if it cannot be told", told)
    return Command(
        function.rpartition(".")[2],
        function,
        work,
        (policy_flag(policy), *own, *([_FAIL_ON] if judges else [])),
        without,
        more=f"{BUILD}\n\n{status}",
        argument=TARGET,
    )


_FAIL_ON = Flag(
    *("fail_on", one_of("error", "warning"), "error"),
    "Severity that ends the command with status 1: error or warning.",
)


def _check(made: Built, *, compute_dtype: str | None, **given: Any) -> Any:
    dtype = compute_dtype or made.policy
    return tfamp.data.check(made.train, made.validation, compute_dtype=dtype, **given)


def _triage(made: Built, *, bundle: str | None, batch: int, batch_size: int) -> Any:
    if bundle is not None:
        return tfamp.triage(made.model, bundle)
    from tfamp.stepping.arguments import dataset_of, first_batch

    batches = dataset_of(made.train, batch_size).skip(batch)
    return tfamp.triage(made.model, first_batch(batches))


_ALL = (
    _on_model(
        "tfamp.data.check",
        Flag(
            *("compute_dtype", "string", None),
            "float16, bfloat16, float32 or a policy; else that of the model.",
        ),
        ask=_check,
        policy="mixed_float16",
        judges=True,
    ),
    _on_model(
        "tfamp.lint",
        ask=lambda made, **given: tfamp.lint(made.model, data=made.train, **given),
        policy="mixed_float16",
        needs_data=False,
        without=("loss", "optimizer", "data"),
        judges=True,
    ),
    _on_model(
        "tfamp.assignment",
        ask=lambda made: tfamp.assignment(made.model),
        needs_data=False,
    ),
    _on_model("tfamp.prove", without=("devices", "tf32")),
    _on_model("tfamp.ranges", PLOT, policy="float32"),
    _on_model(
        "tfamp.sensitivity",
        Flag("dtype", one_of("float16", "bfloat16"), "float16", "The low precision."),
        policy="float32",
    ),
    _on_model("tfamp.data.bottleneck", without=("clock",)),
    _on_model("tfamp.training.lr_find", PLOT),
    _on_model(
        "tfamp.triage",
        Flag("bundle", "string", None, "Folder of the bundle; else a batch is taken."),
        Flag("batch", "integer", 0, "Which batch of the data, from 0.", 0),
        Flag("batch_size", "integer", 32, "Examples in a batch of arrays.", 1),
        ask=_triage,
    ),
)
COMMANDS = {command.name: command for command in _ALL}
