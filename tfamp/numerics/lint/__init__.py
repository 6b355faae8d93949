"""`lint`: what half precision would spoil in a model, before a step is run."""

from typing import Any

import keras

from tfamp.numerics.lint.rules import RULES
from tfamp.numerics.lint.subject import CannotTellError, look
from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.records.findings import Finding, Findings
from tfamp.stepping.arguments import dataset_of

RULE_IDS = tuple(RULES)


def lint(
    model: keras.Model,
    data: Any = None,
    *,
    loss: Any = None,
    optimizer: Any = None,
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
        batch_size: Examples in a batch where `data` are arrays, as in `fit`.

    Returns:
        The findings, worst first; `print` them for a table. `skipped` names the rules
        that could not run, and why.

    Raises:
        TypeError: `model` is no Keras model, or `data` are nothing of the above.
        ValueError: The data are empty or single examples.

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
    dataset = None
    if data is not None:
        dataset = dataset_of(data, batch_size, needs_targets=False)
    findings: dict[tuple[Any, ...], Finding] = {}
    ran, skipped = [], []
    with progress("Linting the model", len(RULES) + 1, unit="parts") as done:
        subject = look(model, loss=loss, optimizer=optimizer, dataset=dataset)
        for number, (name, (need, rule)) in enumerate(RULES.items(), start=1):
            done(number)
            if need in subject.missing:
                skipped.append(f"{name}: {subject.missing[need]}")
                continue
            try:
                found = list(rule(subject))
            except CannotTellError as reason:
                skipped.append(f"{name}: {reason}")
                continue
            ran.append(name)
            page = {"documentation": checks.address(f"lint#{name}")}
            for each in found:
                finding = Finding(
                    name,
                    each.severity,
                    each.message,
                    each.remedy,
                    layer=each.layer,
                    figure=None if each.figure is None else float(each.figure),
                    details=dict(page),
                )
                key = name, each.severity, each.layer, each.about
                findings.setdefault(key, finding)
    computing = " and ".join(sorted(subject.half_dtypes)) or "no half precision"
    return Findings(
        tuple(findings.values()),
        title=f"Lint of model {model.name!r}, with {computing}",
        rules=tuple(ran),
        skipped=tuple(skipped),
    )
