"""`tfamp lint`: what half precision would spoil in a model, before a step is run."""

import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from absl import flags

from tfamp import _checks, _targets
from tfamp.cli import _flags
from tfamp.evidence import Variant

_COMMAND = "tfamp lint"
_ARGUMENT = "module:build"
_PURPOSE = """\
Shows what half precision would spoil in a model, layer by layer, with the reason and
the remedy. Nothing is trained. `module:build` names a function that returns a model,
compiled or not, alone or with its data, as (model, train) or (model, train,
validation); it is called under the policy. docs/lint.md explains each rule.

Ends with status 0, 1 if something as bad as --fail_on was found or it cannot be told,
2 if called wrongly."""
_EXIT_FAILED = 1


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: The arguments after "lint".

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
        silence = _silenced(values.silence)
    except ValueError as error:
        return _flags.refuse(str(error).rstrip("."), _COMMAND)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            found = run(target, variant, silence)
            if values.json is not None:
                found.to_json(values.json)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"{_COMMAND}: {error}", file=sys.stderr)
        return _EXIT_FAILED
    print(found.table())
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"{_COMMAND}: {text}", file=sys.stderr)
    is_bad = found.errors or (values.fail_on == "warning" and found.warnings)
    return _EXIT_FAILED if is_bad else 0


def run(target: str, variant: Variant, silence: dict[str, str]) -> Any:
    """Builds the model under a policy and returns the findings.

    Args:
        target: The function, as "module:build".
        variant: The policy to build under.
        silence: Reasons to leave rules out, by their names.
    """
    build = _targets.load(target)
    import keras

    from tfamp.compare.in_force import in_force
    from tfamp.numerics.linting.linting import lint

    with in_force(variant):
        built = _targets.call(build, seed=0, epochs=1)
        model, *data = built if isinstance(built, (tuple, list)) else (built,)
        if not isinstance(model, keras.Model) or len(data) > 2:
            raise TypeError(
                f"{target!r} returned {built!r}; expected a model, (model, train) or "
                "(model, train, validation). Return the model first."
            )
        return lint(model, data=data[0] if data else None, silence=silence)


def _silenced(texts: Sequence[str]) -> dict[str, str]:
    """Returns the reasons by rule, of texts such as "rule:reason,rule:reason".

    A comma stands between two rules where the name of one follows, so that reasons
    may hold commas.

    Raises:
        ValueError: A text has another form, or names no rule or one twice.
    """
    if not texts:
        return {}
    from tfamp.numerics.linting.registry import RULE_IDS

    names = "|".join(map(re.escape, RULE_IDS))
    pairs = [each for text in texts for each in re.split(rf",(?=(?:{names}):)", text)]
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, reason = pair.partition(":")
        if not (name and reason.strip()):
            raise ValueError(
                f"`--silence` is {pair!r}; expected 'rule:reason', such as "
                "'half-head:its loss takes logits'"
            )
        _checks.choice("--silence", name, RULE_IDS)
        if name in found:
            raise ValueError(f"`--silence` names {name!r} twice; expected one reason")
        found[name] = reason.strip()
    return found


def _define() -> flags.FlagValues:
    values = _flags.new_flags()
    flags.DEFINE_string(
        "policy",
        "mixed_float16",
        "Policy to build under, such as mixed_bfloat16, auto or "
        "keras:mixed_float16 for stock Keras.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "json", None, "File that gets the findings as JSON.", flag_values=values
    )
    flags.DEFINE_enum(
        "fail_on",
        "error",
        ["error", "warning"],
        "Severity that ends the command with status 1.",
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "silence",
        [],
        "Rules to leave out and why, as rule:reason,rule:reason; may be given again.",
        flag_values=values,
    )
    return values
