"""`tfamp prove`: which products run in which dtype, and why it is not faster."""

import functools
from collections.abc import Sequence
from typing import Any

from absl import flags

from tfamp.cli import _flags
from tfamp.trials import targets
from tfamp.trials.variant import Variant

_PURPOSE = """\
Shows which matrix products and convolutions of a train step run in which dtype, layer
by layer, where numbers are cast, and why it is not faster. Nothing is trained.
`module:build` names a function that returns a compiled model with its data, (model,
train) or (model, train, validation); it is called under the policy.

Ends with status 0, 1 if it cannot be told, 2 if called wrongly."""


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: The arguments after "prove".

    Returns:
        The exit status, as the help says.
    """
    values = _define()

    def work(target: str) -> _flags.Outcome:
        with _flags.reading():
            variant = Variant.parse(values.policy, "--policy")
        proof = run(target, variant, values)
        _flags.write(values, proof)
        return _flags.Outcome(proof.table())

    return _flags.run(argv, values, work, command="tfamp prove", purpose=_PURPOSE)


def run(target: str, variant: Variant, values: flags.FlagValues) -> Any:
    """Builds the model under a policy and returns the proof of a step."""
    build = targets.load(target)
    from tfamp.numerics.proof.prover import prove
    from tfamp.trials.in_force import in_force

    with in_force(variant):
        built = targets.call(build, seed=0, epochs=1)
        if not isinstance(built, tuple) or not 2 <= len(built) <= 3:
            raise TypeError(
                f"{target!r} returned {built!r}; expected (model, train) or (model, "
                "train, validation). Return the data with the model."
            )
        return prove(
            *built[:2],
            training=values.training,
            jit_compile=True if variant.jit_compile else None,
            seconds=values.seconds,
        )


def _define() -> flags.FlagValues:
    values = _flags.new_flags()
    add = functools.partial(_flags.define, values)
    add(
        "string",
        "policy",
        "auto",
        "Policy to build under, such as float32, mixed_bfloat16+xla or "
        "keras:mixed_bfloat16.",
    )
    add("string", "json", None, _flags.JSON)
    add(
        "float",
        "seconds",
        None,
        "Measure for so long how much the input holds training up.",
        lower_bound=0.0,
    )
    add("bool", "training", True, "Look at the step of fit, or else of predict.")
    return values
