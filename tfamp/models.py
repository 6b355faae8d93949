"""A model's dtypes: read them, change them in place, load them again."""

import dataclasses
import functools
import os
import zipfile
from collections.abc import Iterator
from typing import Any

import keras

from tfamp.dtypes import hooks, layer_dtypes, resolution, rows
from tfamp.dtypes.rules import KeepFloat32, Rule
from tfamp.dtypes.settings import IN_FORCE, PolicySettings, make_settings
from tfamp.keras_hooks import exact_values, saved_state, structure, trainer
from tfamp.keras_hooks.layers import Kind, policy_of
from tfamp.plan import PrecisionPlan, check_model
from tfamp.policy import PolicyName, settings_for
from tfamp.records import checks
from tfamp.records.formats import HALF
from tfamp.records.record import Record


@dataclasses.dataclass(frozen=True)
class LayerAssignment(Record):
    """The dtypes of one layer: what it computes in, stores and gives, and why."""

    path: str  # names from below the model, joined by "/"; its own for the model
    class_name: str
    compute_dtype: str
    variable_dtype: str
    output_dtype: str
    rule: str  # what decided
    reason: str = ""  # why that rule exists
    note: str = ""  # what a reader should know, such as why an output alone is cast


@dataclasses.dataclass(frozen=True)
class Assignment(Record):
    """The dtypes of every layer of a model; `print` shows them as a table."""

    model: str  # the model's name
    policy: str  # the one that layers follow where no rule decides
    layers: tuple[LayerAssignment, ...]  # the model and each (sub)layer, in order

    def __iter__(self) -> Iterator[LayerAssignment]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, path: str) -> LayerAssignment:
        for layer in self.layers:
            if layer.path == path:
                return layer
        paths = tuple(layer.path for layer in self.layers)
        raise ValueError(
            f"No layer {path!r} in model {self.model!r}; expected one of {paths}. "
            "Print the assignment to see them all."
        )

    def __str__(self) -> str:
        heads = ("layer", "class", "computes in", "stores", "gives", "because")
        cells = [
            (
                *(row.path, row.class_name, row.compute_dtype, row.variable_dtype),
                row.output_dtype,
                f"{row.rule} ({row.note})" if row.note else row.rule,
            )
            for row in self.layers
        ]
        return rows.table(heads, cells, f"{self.model}: policy {self.policy}")


def assignment(model: keras.layers.Layer) -> Assignment:
    """Reads the dtypes of a model, or layer, and of every layer inside it.

    It changes nothing. The heads of a subclassed model are known once it has been
    called. A TypeError says that `model` is not a Keras 3 model or layer.

    Example:
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> assignment(model)["dense"].compute_dtype  # doctest: +SKIP
        'float32'
    """
    check_model(model)
    # Which layers are heads is decided when a graph is compiled or used; until then it
    # may yet become a part of another model.
    with rows.restored(model):
        if structure.graph_of(model) is not None:
            resolution.resolve(model)
        for layer in structure.layers_of(model):
            layer_dtypes.decide(layer)
        settings = resolution.settings_of(model)
        policy = model.dtype_policy.name if settings is None else settings.policy.name
        layers = tuple(_row(path, layer) for path, layer, _ in structure.walk(model))
    return Assignment(model.name, policy, layers)


@checks.knows_other_names
def apply(
    model: keras.layers.Layer,
    policy: "PolicyName | str | os.PathLike[str] | PrecisionPlan | None" = None,
    *,
    keep_float32: KeepFloat32 = "default",
) -> Assignment:
    """Gives a built, even a trained model other dtypes, in place.

    Weights and optimizer state keep every bit. What `fit`, `evaluate` and
    `predict` had traced is traced anew; a `tf.function` of yours that calls the
    model keeps what it traced. The optimizer of a compiled model gets or loses
    its loss scale as the dtypes need.

    Args:
        model: A Keras model or layer.
        policy: As for `tfamp.enable`, "measure" and a plan as well; None takes the
            policy or plan that is enabled, or "auto" where none is.
        keep_float32: As for `tfamp.enable`. While that is in force its rules hold too,
            unless "none" is given.

    Returns:
        The `Assignment` after the change.

    Raises:
        TypeError: `model` is not a Keras 3 model or layer.
        ValueError: The policy is unknown, or a pattern matches no layer. The
            model is as it was.

    Example:
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> _ = apply(model, "mixed_bfloat16", keep_float32="none")
        >>> model.layers[0].compute_dtype
        'bfloat16'
    """
    check_model(model)
    present = IN_FORCE.settings
    if policy is None and present is not None and keep_float32 == "default":
        settings, given_rules = present, tuple[Rule, ...]()
    else:
        make, given = make_settings, policy
        if present is not None:
            make = present.under
            given = given or present.plan or present.policy.name
        settings, *_ = settings_for(given or "auto", keep_float32, make)
        if policy is None and present is not None:
            settings.is_measured = present.is_measured
        given_rules = settings.open_rules
    if settings.plan is not None:
        settings.plan.apply(model)
        return assignment(model)
    for rule in given_rules:
        known = structure.walk(model)
        if not any(rule.matches(layer, path=path) for path, layer, _ in known):
            raise ValueError(resolution.unmatched_message(model, rule))
    put_under(model, settings)
    return assignment(model)


def put_under(model: keras.layers.Layer, settings: PolicySettings) -> None:
    """Gives a built model the dtypes of settings, and the optimizers they need."""
    hooks.install(settings)
    put_rules_on(model, settings)
    for layer in structure.layers_of(model):
        trainer.drop_traced_functions(layer)
    hooks.follow_policy(model, settings)


def put_rules_on(model: keras.layers.Layer, settings: PolicySettings) -> None:
    """Gives a model's layers and operations the dtypes of settings."""
    layers = structure.layers_of(model)
    exact_values.keep_only(model, {})
    for layer in layers:
        layer_dtypes.begin_again(layer, settings)
    for layer in layers:
        layer_dtypes.decide(layer)
    resolution.resolve(model)


def load_model(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Loads a saved model with the dtypes, loss scale and counters it had.

    No `tfamp.enable` is needed before, and none is in force after.

    Args:
        path: A `.keras` file. One that was saved without tfamp loads as Keras
            loads it.
        **kwargs: As for `keras.saving.load_model`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a `.keras` archive, or holds the dtypes of
            another model.
    """
    text = os.fspath(path)
    try:
        entry = saved_state.read_entry(text)
    except (zipfile.BadZipFile, KeyError, FileNotFoundError) as error:
        if isinstance(error, FileNotFoundError) and not os.path.isdir(text):
            raise
        raise ValueError(
            f"Cannot read {text!r} as a `.keras` archive: {error}. Save the model with "
            "`model.save('name.keras')`; HDF5 files and SavedModels hold no dtypes of "
            "layers, load them with Keras and call `tfamp.apply(model)`."
        ) from error
    make = functools.partial(keras.saving.load_model, text, **kwargs)
    return hooks.load(entry, make)


def _row(path: str, layer: keras.layers.Layer) -> LayerAssignment:
    policy = policy_of(layer)
    told = ("not managed", "", "")
    if policy is not None:
        note = ""
        if isinstance(layer, keras.Model) and not policy.is_resolved:
            note = "heads are found at the first call"
        elif policy.kind in (Kind.WIDE_OUTPUT, Kind.OUTPUT_CAST):
            note = policy.reason
        told = (policy.rule, policy.reason, note)
    # The dtype of the weights that it has, which `apply` cannot change.
    stored = {w.dtype for w in structure.own_weights(layer)} & {"float32", *HALF}
    return LayerAssignment(
        path,
        type(layer).__name__,
        layer.compute_dtype,
        stored.pop() if len(stored) == 1 else layer.variable_dtype,
        rows.output_dtype(layer),
        *told,
    )
