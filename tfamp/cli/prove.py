"""`tfamp prove`: which products run in which dtype, and why it is not faster."""

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from absl import flags

from tfamp import _targets
from tfamp.cli import _flags
from tfamp.evidence import Variant

_COMMAND = "tfamp prove"
_ARGUMENT = "module:build"
_PURPOSE = """\
Shows which matrix products and convolutions of a train step run in which dtype, layer
by layer, where numbers are cast, and why it is not faster. Nothing is trained.
`module:build` names a function that returns a compiled model with its data, (model,
train) or (model, train, validation); it is called under the policy.

Ends with status 0, 1 if it cannot be told, 2 if called wrongly."""
_EXIT_FAILED = 1


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: The arguments after "prove".

    Returns:
        The exit status, as the help says.
    """
    values = _define()
    target = _flags.parse(
        values, argv, command=_COMMAND, purpose=_PURPOSE, argument=_ARGUMENT
    )
    if not isinstance(target, str):
        return int(target or 0)
    # TensorFlow reads it when it is imported; its notices are of no help here.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        variant = Variant.parse(values.policy, "--policy")
    except ValueError as error:
        return _flags.refuse(str(error).rstrip("."), _COMMAND)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            proof = run(target, variant, values)
            if values.json is not None:
                proof.to_json(values.json)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"{_COMMAND}: {error}", file=sys.stderr)
        return _EXIT_FAILED
    print(proof.table())
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"{_COMMAND}: {text}", file=sys.stderr)
    return 0


def run(target: str, variant: Variant, values: flags.FlagValues) -> Any:
    """Builds the model under a policy and returns the proof of a step."""
    build = _targets.load(target)
    from tfamp.compare.in_force import in_force
    from tfamp.numerics.proving import prove

    with in_force(variant):
        built = _targets.call(build, seed=0, epochs=1)
        if not isinstance(built, tuple) or not 2 <= len(built) <= 3:
            raise TypeError(
                f"{target!r} returned {built!r}; expected (model, train) or (model, "
                "train, validation). Return the data with the model."
            )
        return prove(
            *built[:2],
            inference=values.inference,
            compiled=True if variant.jit_compile else None,
            seconds=values.seconds,
        )


def _define() -> flags.FlagValues:
    values = _flags.new_flags()
    flags.DEFINE_string(
        "policy",
        "auto",
        "Policy to build under, such as float32, mixed_bfloat16+xla or "
        "keras:mixed_bfloat16.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "json", None, "File that gets the proof as JSON.", flag_values=values
    )
    flags.DEFINE_float(
        "seconds",
        None,
        "Measure for so long how much the input holds training up.",
        lower_bound=0.0,
        flag_values=values,
    )
    flags.DEFINE_bool(
        "inference",
        False,
        "Look at the step of predict, not of fit.",
        flag_values=values,
    )
    return values
