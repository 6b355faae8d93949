"""`tfamp.check`: what half precision does to a model, in one table of findings."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.dtypes import heads, hooks
from tfamp.dtypes.rows import put_on, restored
from tfamp.dtypes.settings import (
    IN_FORCE,
    PolicySettings,
    choose_policy,
    make_settings,
    named_policy,
)
from tfamp.keras_hooks import exact_values, structure
from tfamp.keras_hooks.layers import policy_of
from tfamp.loss_scale.tape import scaled_by
from tfamp.models import Assignment, assignment, put_rules_on
from tfamp.numerics.evidence import Examined, one_update, rate_of, words_of_jump
from tfamp.numerics.lint import lint
from tfamp.numerics.magnitudes import tallied
from tfamp.numerics.passes import (
    build_by_call,
    check_is_model,
    exactly,
    grouped,
    record,
    why_float32,
)
from tfamp.numerics.proof import prove
from tfamp.numerics.sensitivity import Search
from tfamp.numerics.triage import triage
from tfamp.plan import PrecisionPlan, read_plan
from tfamp.policy import PolicyName
from tfamp.records.findings import Finding, Findings
from tfamp.records.formats import FLOAT16, HALF
from tfamp.records.units import format_share
from tfamp.stepping.arguments import build, dataset_of, first_batch
from tfamp.stepping.eager_step import Site
from tfamp.stepping.layer_calls import computes_itself, how_to_keep
from tfamp.stepping.unchanged import seeds_put_back

# Numbers and examples of a batch that are looked at: each layer runs several times.
_MAX_NUMBERS, _MIN_EXAMPLES, _MAX_EXAMPLES = 2**19, 4, 32
_SHOWN = "`tfamp.prove` shows each product and cast."
# The rules that need data, and those of them that need a step, too.
_OF_NUMBERS = ("ranges", "guilty-layer", "learning-rate")
_OF_DATA = ("half-share", *_OF_NUMBERS)


def check(
    model: keras.Model,
    data: Any = None,
    *,
    policy: PolicyName | str | os.PathLike[str] | PrecisionPlan = "auto",
) -> Findings:
    """Tells what half precision does to a model: what to change, and what is kept.

    One table of what `tfamp.lint` finds, what computes in float32 and why, the share
    of half precision in the work of a step, how large the numbers are and which loss
    scale suits them, the layers that should stay in float32, and a learning rate that
    throws the loss up. Up to 32 examples of the first batch are looked at. The model is
    afterwards what it was.

    Args:
        model: A Keras model; one that is not compiled has no loss, so only what does
            not need one is judged.
        data: What `fit` takes; `skipped` says what is left out without.
        policy: As for `tfamp.enable`. A model that was built under a policy is judged
            as it stands, whatever this says.

    Raises:
        TypeError: `model` is no Keras model, or `data` are nothing that `fit` takes.
        ValueError: The policy is unknown, or the data are empty or single examples.

    Example:
        >>> layers = [keras.Input((4,)), keras.layers.Rescaling(1e6, name="huge"),
        ...     keras.layers.Dense(1)]
        >>> model = keras.Sequential(layers)
        >>> model.compile("sgd", "mse")
        >>> x = np.ones((8, 4), "float32")
        >>> found = check(model, (x, x[:, :1]), policy="mixed_float16")
        >>> found[0].rule, found[0].layer
        ('guilty-layer', 'huge')
    """
    check_is_model(model)
    with seeds_put_back():
        batch = None if data is None else _batch_of(data)
        if batch is not None:
            build_by_call(model, keras.utils.unpack_x_y_sample_weight(batch)[0])
        with _judged(model, policy) as why:
            return _found(model, batch, why)


def _found(model: keras.Model, batch: Any, why: str) -> Findings:
    """Returns what is found in a model that computes now as it is to be judged."""
    # That of the model itself too, where rules keep all that it is made of.
    halves = {layer.compute_dtype for layer in structure.layers_of(model)}
    dtype = next((each for each in HALF if each in halves), "")
    dataset = None if batch is None else tf.data.Dataset.from_tensors(batch)
    linted = lint(model, dataset)
    rows = assignment(model)  # heads are known by the call that was traced
    findings = [*linted, *_in_float32(model, rows, dtype)]
    skipped: dict[str, Any] = {}
    if dataset is None:
        skipped = dict.fromkeys(_OF_DATA, "no `data` were passed")
    else:
        numbers = list(_of_numbers(model, batch, dtype, rows, skipped))
        findings = [*numbers, *findings, *_half_share(model, dataset, skipped)]
    ran = [rule for rule in ("in-float32", *_OF_DATA) if rule not in skipped]
    return Findings(
        tuple(dict.fromkeys(findings)),
        title=f"Check of model {model.name!r}{dtype and f', with {dtype}'} "
        f"({why.removesuffix('.')})",
        rules=(*linted.rules, *ran),
        skipped=(*linted.skipped, *(f"{rule}: {skipped[rule]}" for rule in skipped)),
    )


def _in_float32(model: keras.Model, rows: Assignment, dtype: str) -> Iterator[Finding]:
    """Yields a note on the layers that compute in float32, and why each does."""
    layers = {path: layer for path, layer, _ in structure.walk(model)}
    computing = [
        row for row in rows if computes_itself(Site(row.path, layers[row.path]))
    ]
    wide = [row for row in computing if row.compute_dtype == "float32"]
    because = grouped((row.path, why_float32(row)) for row in wide)
    text = f"{len(wide)} of {len(computing)} layers compute in float32: {because}."
    remedy = "Nothing, unless the share of half precision is too small."
    if not dtype:
        text = f"All {len(wide)} layers compute in float32."
        remedy = "The title says why; `policy=` judges the model under another one."
    if wide:
        yield Finding("in-float32", "note", text, remedy, figure=len(wide))


def _half_share(
    model: keras.Model, dataset: tf.data.Dataset, skipped: dict[str, Any]
) -> Iterator[Finding]:
    """Yields the share of half precision in a step, and why it is not larger."""
    try:
        with scaled_by(1.0):  # as by hand, for an optimizer without a scale
            proof = prove(model, dataset, training=bool(model.compiled))
    except (TypeError, ValueError) as error:
        skipped["half-share"] = error
        return
    share = proof.half_share_of_flops
    step = "training" if proof.step == "train" else "inference"
    text = f"{format_share(share)} of the FLOPs of a step of {step} run in half "
    yield Finding("half-share", "note", f"{text}precision.", _SHOWN, figure=share)
    for each in proof.causes:
        if each.rule != "float32":  # which is told layer by layer
            yield dataclasses.replace(each, rule="half-share")


def _of_numbers(
    model: keras.Model,
    batch: Any,
    dtype: str,
    rows: Assignment,
    skipped: dict[str, Any],
) -> Iterator[Finding]:
    """Yields what one tapped pass tells: magnitudes, guilty layers, the update."""
    try:
        if not model.compiled:
            raise ValueError("the model is not compiled, so no loss")
        build(model, batch)
    except ValueError as error:
        skipped |= dict.fromkeys(_OF_NUMBERS, error)
        return
    kept, rate = _kept(model, rows), rate_of(model)
    is_fresh = not int(getattr(model.optimizer, "iterations", 1))
    with exactly(model) as sites:
        recording = record(model, sites, batch)
        found = tallied(model.name, sites, [recording])
        for most in sorted(found.layers, key=lambda each: -each.largest)[:1]:
            text = f"In float32 the {most.kind} of {most.path!r} are largest, up to "
            text += f"{most.largest:.3g}; float16 ends at {FLOAT16.max:.0f}."
            place: Any = {"layer": most.path, "figure": most.largest}
            yield Finding(
                "ranges", "note", text, "`tfamp.ranges` shows each layer.", **place
            )
        remedy = f"{dtype or 'float32'} needs no loss scale."
        if dtype == "float16":
            remedy = "`tfamp.enable` scales the loss by itself."
        place = {"figure": found.best_loss_scale}
        yield Finding("ranges", "note", found.scale_sentence, remedy, **place)
        if recording.ran.step.is_finite:
            exact = Examined(recording.ran.step, recording.calls)
            update = one_update(model, batch, exact, rate)
            if update is not None and update.is_jump:  # which no precision mends
                text, remedy = words_of_jump(update, rate)
                text = f"{text} That is the learning rate, in float32 too."
                yield Finding("learning-rate", "warning", text, remedy, figure=rate)
            if dtype:
                search = Search(model, sites, [recording], dtype)
                yield from _guilty_layers(search, sites, kept, is_fresh)
            else:
                skipped["guilty-layer"] = (
                    "nothing computes in half precision; `policy=` judges it under "
                    "another"
                )
            return
    skipped |= dict.fromkeys(_OF_NUMBERS[1:], "a step is not finite in float32")
    blamed = triage(model, batch)
    text = f"A step is not finite in float32 either; the cause is {blamed.cause}: "
    text += " ".join(blamed.evidence)
    yield Finding("not-finite", "error", text, blamed.remedy, layer=blamed.layer)


def _kept(model: keras.Model, rows: Assignment) -> set[str]:
    """Returns the paths of layers and operations that compute in float32."""
    graph = heads.graph_heads(model)
    # The operations of a graph between a head and an output.
    wide = {
        id(made[0])
        for tensor in (graph.tensors if graph is not None else ())
        if tensor.dtype == "float32" and (made := structure.producer(tensor))
    }
    return {row.path for row in rows if row.compute_dtype == "float32"} | {
        path
        for path, operation in exact_values.operations_in(model)
        if id(operation) in wide or exact_values.kept(operation)
    }


def _guilty_layers(
    search: Search, sites: list[Site], kept: set[str], is_fresh: bool
) -> Iterator[Finding]:
    """Yields the layers that half precision spoils, kept ones as notes."""
    found, by_path = search.run(), {site.path: site for site in sites}
    for layer in found.layers:
        if not layer.is_guilty:
            continue
        is_kept, remedy = layer.path in kept, "It is in float32 already."
        if not is_kept:
            remedy = how_to_keep([by_path[layer.path]])
        yield Finding(
            "guilty-layer",
            "note" if is_kept else "error",
            f"{found.dtype} would spoil this {layer.class_name}, "
            f"{layer.reason}: {layer.explanation}.",
            remedy,
            layer=layer.path,
            figure=max(layer.forward_error, layer.backward_error),
        )
    if found.verdict not in ("layers", "safe"):
        text, remedy = "", found.advice
        # Of a fresh ResNet50 gradients are off by 1.3 times their size in bfloat16, and
        # after 20 steps in float32 by 0.4.
        is_early = found.verdict == "amplification" and is_fresh
        if is_early:
            text = (
                " Before the first step deep models often are so, and not after some."
            )
            remedy = "Check again after some steps of training; that counts."
        yield Finding(
            "guilty-layer",
            "note" if is_early or found.verdict == "loss scale" else "warning",
            f"In {found.dtype} without rules the verdict is {found.verdict!r}.{text}",
            remedy,
            figure=found.whole_error,
        )


@contextlib.contextmanager
def _judged(
    model: keras.Model, policy: PolicyName | str | os.PathLike[str] | PrecisionPlan
) -> Iterator[str]:
    """Has a model compute as it is to be judged, a managed one as it is; yields why."""
    plan = read_plan(named_policy(policy))
    name, why, _ = choose_policy(policy) if plan is None else ("", "", None)  # type: ignore[arg-type]
    is_managed = any(policy_of(layer) for _, layer, _ in structure.walk(model))
    in_force = IN_FORCE.settings is not None and IN_FORCE.settings.is_half
    if is_managed or in_force or structure.compute_dtypes(model) & {*HALF}:
        yield "as it was built"
    elif plan is not None:
        plan.check(model)
        with _under_rules(model, plan.settings()):
            put_on(model, plan.settings(), plan.rows, plan.operations)
            yield plan.why
    elif name == "float32":
        yield f"policy float32: {why}"
    else:
        with _under_rules(model, make_settings(name)):
            yield f"policy {name}: {why}"


@contextlib.contextmanager
def _under_rules(model: keras.Model, settings: PolicySettings) -> Iterator[None]:
    """Has a model that is not managed compute as tfamp has it under settings."""
    hooks.install(settings)
    with restored(model):
        put_rules_on(model, settings)
        yield


def _batch_of(data: Any) -> Any:
    """Returns the first batch, cut to a few examples where those are large."""
    batch = first_batch(dataset_of(data, _MAX_EXAMPLES, needs_targets=False))
    leaves = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor)]
    numbers = max((int(np.prod(leaf.shape[1:])) for leaf in leaves), default=1)
    most = int(np.clip(_MAX_NUMBERS // max(numbers, 1), _MIN_EXAMPLES, _MAX_EXAMPLES))
    return tf.nest.map_structure(lambda leaf: leaf[:most], batch)
