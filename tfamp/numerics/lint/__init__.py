"""`lint`: what half precision would spoil in a model, before a step is run."""

from collections.abc import Mapping
from typing import Any

import keras

from tfamp.numerics.lint import arithmetic, environment, layers, weights
from tfamp.numerics.lint.subject import CannotTellError, LintRule, look
from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.records.findings import Finding, Findings
from tfamp.stepping.arguments import dataset_of

RULES: tuple[LintRule, ...] = (
    layers.half_head,
    layers.half_loss,
    weights.late_policy,
    weights.half_weights,
    arithmetic.optimizer_epsilon,
    weights.rounded_momentum,
    arithmetic.vanishing_epsilon,
    arithmetic.constant_range,
    arithmetic.long_reduction,
    layers.shifted_normalization,
    environment.unnormalised_input,
    environment.float_ids,
)
RULE_IDS: tuple[str, ...] = tuple(rule.id for rule in RULES)


def lint(
    model: keras.Model,
    data: Any = None,
    *,
    loss: Any = None,
    optimizer: Any = None,
    silence: Mapping[str, str] | None = None,
    batch_size: int = 32,
) -> Findings:
    """Returns what half precision would spoil in a model.

    Rules read the layers, the graph of one call for training, the first batches of
    the data, the loss and the optimizer. No step is run. Weights, seeds and policies
    are afterwards what they were; a model that is not built is built, if there are
    data. What tfamp keeps in float32 is no finding, and neither are faults of Keras
    that it mends. It takes as long as tracing the model.

    Args:
        model: A Keras model of any kind, compiled or not.
        data: What `fit` takes: a `tf.data.Dataset` of batches, a `Pipeline`, a
            `PyDataset`, a generator of batches, or arrays: (x, y), or x alone, as a
            dict where the model takes several inputs. Without,
            rules on numbers are skipped, and of a subclassed model those on its graph.
        loss: What it is trained with; None takes that of `compile`.
        optimizer: An optimizer or its name; None takes that of `compile`.
        silence: Rules that are not to run, each with the reason, which is listed
            with the result.
        batch_size: Examples in a batch where `data` are arrays, as in `fit`.

    Returns:
        The findings, worst first; `print` them for a table. `skipped` names the rules
        that were silenced or could not run, and why.

    Raises:
        TypeError: `model` is no Keras model, or `data` or `silence` are nothing of
            the above.
        ValueError: `silence` names a rule that does not exist or gives no reason, or
            the data are empty or single examples.

    Example:
        >>> layers = [keras.Input((4,)), keras.layers.Dense(8, dtype="mixed_bfloat16"),
        ...     keras.layers.Dense(8, "softmax", dtype="mixed_bfloat16", name="head")]
        >>> model = keras.Sequential(layers)
        >>> [(each.rule, each.layer) for each in lint(model).errors]
        [('half-head', 'head')]
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` is {model!r}, of type {type(model).__name__}; expected a "
            "`keras.Model`. Pass the model itself, not a function that builds it."
        )
    silenced = _checked(silence)
    dataset = None
    if data is not None:
        dataset = dataset_of(data, batch_size, needs_targets=False)
    findings: list[Finding] = []
    ran, skipped = [], []
    with progress("Linting the model", len(RULES) + 1, unit="parts") as done:
        subject = look(model, loss=loss, optimizer=optimizer, dataset=dataset)
        for number, rule in enumerate(RULES, start=1):
            done(number)
            if rule.id in silenced:
                skipped.append(f"{rule.id}: silenced, {silenced[rule.id]}")
                continue
            try:
                findings += rule.findings(subject)
            except CannotTellError as reason:
                skipped.append(f"{rule.id}: {reason}")
            else:
                ran.append(rule.id)
    half = {part.dtype for part in subject.half()}
    computing = " and ".join(sorted(half)) or "no half precision"
    return Findings(
        tuple(dict.fromkeys(findings)),
        title=f"Lint of model {model.name!r}, with {computing}",
        rules=tuple(ran),
        skipped=tuple(skipped),
    )


def _checked(silence: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the reasons by rule, or raises what is wrong with them."""
    if silence is not None and not isinstance(silence, Mapping):
        raise TypeError(
            f"`silence` is {silence!r}, of type {type(silence).__name__}; expected a "
            "dict of rules with reasons, as in silence={'half-head': 'a test'}."
        )
    for name, reason in (silence or {}).items():
        checks.choice("silence", name, RULE_IDS)
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(
                f"The reason to silence {name!r} is {reason!r}; expected a sentence "
                f"that says why, for one of {RULE_IDS!r}. Write down what makes it "
                "harmless here."
            )
    return {name: reason.strip() for name, reason in (silence or {}).items()}
