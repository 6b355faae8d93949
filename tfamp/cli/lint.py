"""`tfamp lint`: what half precision would spoil in a model, before a step is run."""

import functools
import re
from collections.abc import Sequence
from typing import Any

from absl import flags

from tfamp.cli import _flags
from tfamp.records import checks
from tfamp.trials import targets
from tfamp.trials.variant import Variant

_PURPOSE = """\
Shows what half precision would spoil in a model, layer by layer, with the reason and
the remedy. Nothing is trained. `module:build` names a function that returns a model,
compiled or not, alone or with its data, as (model, train) or (model, train,
validation); it is called under the policy. docs/lint.md explains each rule.

Ends with status 0, 1 if something as bad as --fail_on was found or it cannot be told,
2 if called wrongly."""


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: The arguments after "lint".

    Returns:
        The exit status, as the help says.
    """
    values = _define()

    def work(target: str) -> _flags.Outcome:
        with _flags.reading():
            variant = Variant.parse(values.policy, "--policy")
            silence = _silenced(values.silence)
        found = run(target, variant, silence)
        _flags.write(values, found)
        is_bad = found.errors or (values.fail_on == "warning" and found.warnings)
        return _flags.Outcome(found.table(), is_bad=bool(is_bad))

    return _flags.run(argv, values, work, command="tfamp lint", purpose=_PURPOSE)


def run(target: str, variant: Variant, silence: dict[str, str]) -> Any:
    """Builds the model under a policy and returns the findings.

    Args:
        target: The function, as "module:build".
        variant: The policy to build under.
        silence: Reasons to leave rules out, by their names.
    """
    build = targets.load(target)
    import keras

    from tfamp.numerics.lint.linter import lint
    from tfamp.trials.in_force import in_force

    with in_force(variant):
        built = targets.call(build, seed=0, epochs=1)
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
    from tfamp.numerics.lint.linter import RULE_IDS

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
        checks.choice("--silence", name, RULE_IDS)
        if name in found:
            raise ValueError(f"`--silence` names {name!r} twice; expected one reason")
        found[name] = reason.strip()
    return found


def _define() -> flags.FlagValues:
    values = _flags.new_flags()
    add = functools.partial(_flags.define, values)
    add(
        "string",
        "policy",
        "mixed_float16",
        "Policy to build under, such as mixed_bfloat16, auto or "
        "keras:mixed_float16 for stock Keras.",
    )
    add("string", "json", None, _flags.JSON)
    add(
        "enum",
        "fail_on",
        "error",
        ["error", "warning"],
        "Severity that ends the command with status 1.",
    )
    add(
        "multi_string",
        "silence",
        [],
        "Rules to leave out and why, as rule:reason,rule:reason; may be given again.",
    )
    return values
