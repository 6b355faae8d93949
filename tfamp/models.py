"""A model's dtypes: read them, change them in place, load them again."""

import dataclasses
import os
import zipfile
from collections.abc import Iterator
from typing import Any

import keras

from tfamp.dtypes import compile_hooks, hooks, layer_dtypes, resolution
from tfamp.dtypes.in_force import IN_FORCE
from tfamp.dtypes.rules import gains_nothing
from tfamp.dtypes.settings import (
    MEASURE,
    KeepFloat32,
    PolicySettings,
    RuleSet,
    choose_policy,
    make_settings,
    named_policy,
    on_top_of,
    parse,
)
from tfamp.keras_hooks import saved_state, structure, trainer
from tfamp.keras_hooks.layers import Kind, Policy, policy_of
from tfamp.plan import PrecisionPlan, read_plan, refuse_rules
from tfamp.policy import choose_at_fit
from tfamp.records import checks, console
from tfamp.records.formats import HALF
from tfamp.records.record import Record

_COLUMNS = ("layer", "class", "computes in", "stores", "gives", "because")
_WIDTH_OF_THE_REST = 80


@dataclasses.dataclass(frozen=True)
class LayerAssignment(Record):
    """The dtypes of one layer.

    Attributes:
        path: Names from below the model, joined by "/"; the model's own name
            for the model itself.
        class_name: Name of the layer's class.
        compute_dtype: The dtype it computes in.
        variable_dtype: The dtype its weights are stored in.
        output_dtype: The dtype its floating-point outputs have.
        rule: What decided.
        reason: Why that rule exists.
        note: What a reader should know, such as that the rule gains nothing.
    """

    path: str
    class_name: str
    compute_dtype: str
    variable_dtype: str
    output_dtype: str
    rule: str
    reason: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Assignment(Record):
    """The dtypes of every layer of a model; `print` shows them as a table.

    Attributes:
        model: The model's name.
        policy: The policy that layers follow where no rule decides.
        layers: One entry for the model and each (sub)layer, in order.
    """

    model: str
    policy: str
    layers: tuple[LayerAssignment, ...]

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
        columns = {
            # A path in two lines is a path that nobody can search for.
            name: {**console.FOLD, "no_wrap": name == "layer"}
            for name in _COLUMNS
        }
        title = f"{self.model}: policy {self.policy}"
        table = console.table(columns, map(_cells, self.layers), title=title)
        longest = max(len(row.path) for row in self.layers)
        width = max(console.WIDTH, longest + _WIDTH_OF_THE_REST)
        return console.text_of(table, width=width)

    def to_text(self, width: int | None = None) -> str:
        """Returns a line for each layer, in columns without a frame, as for `grep`.

        Args:
            width: Characters in a line, at least 40; a longer reason is cut, a path
                never is. None cuts nothing.

        Raises:
            ValueError: The width is too small.

        Example:
            >>> layer = LayerAssignment("a/b", "Dense", "float16", "float32", "float16",
            ...     "policy mixed_float16")
            >>> print(Assignment("m", "mixed_float16", (layer,)).to_text())
            layer  class  computes in  stores   gives    because
            a/b    Dense  float16      float32  float16  policy mixed_float16
        """
        if width is not None:
            checks.positive_int("width", width, minimum=40)
        rows = [_COLUMNS, *map(_cells, self.layers)]
        sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, cells, sizes)).rstrip() for cells in rows)
        return "\n".join(
            line if width is None else line[: max(width, len(cells[0]))]
            for line, cells in zip(lines, rows, strict=True)
        )


def assignment(model: keras.layers.Layer) -> Assignment:
    """Reads the dtypes of a model and of every layer inside it.

    Args:
        model: A Keras model or layer, managed or not. The heads of a subclassed
            model are known once it has been called.

    Returns:
        The `Assignment`; it changes nothing.

    Raises:
        TypeError: `model` is not a Keras 3 model or layer.

    Example:
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> assignment(model)["dense"].compute_dtype  # doctest: +SKIP
        'float32'
    """
    _check_model(model)
    with compile_hooks.previewed(model):
        settings = resolution.settings_of(model)
        policy = model.dtype_policy.name if settings is None else settings.policy.name
        rows = tuple(_row(path, layer) for path, layer, _ in structure.walk(model))
    return Assignment(model.name, policy, rows)


def apply(
    model: keras.layers.Layer,
    policy: "str | os.PathLike[str] | PrecisionPlan | None" = None,
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
    _check_model(model)
    present = IN_FORCE.settings
    given = parse(keep_float32)
    follows = policy is None and present is not None
    asked = "auto" if policy is None else policy
    plan = present.plan if follows else read_plan(named_policy(asked))  # type: ignore[union-attr]
    if plan is not None:
        refuse_rules(keep_float32)
        plan.apply(model)
        return assignment(model)
    if follows and not given.of_user and given.has_defaults:
        put_under(model, present)  # type: ignore[arg-type]
        return assignment(model)
    settings = _settings(asked, keep_float32, present, follows=follows)
    _check_patterns(model, given.for_dtype(settings.compute_dtype))
    put_under(model, settings)
    return assignment(model)


def _settings(
    policy: Any,
    keep_float32: KeepFloat32,
    present: PolicySettings | None,
    *,
    follows: bool,
) -> PolicySettings:
    """Returns the settings of a model whose rules come on top of those in force."""
    name = present.policy.name if present and follows else choose_policy(policy)[0]
    if present is None:
        settings = make_settings(name, keep_float32)
    else:
        rules = on_top_of(keep_float32, present.keep_float32)
        loss_scale, options = present.loss_scale, present.loss_scale_options
        settings = make_settings(name, rules, loss_scale, options)
        settings.leave_open(present.rules_of_user)
    if present is not None and follows:
        settings.is_measured = present.is_measured
    elif named_policy(policy) == MEASURE:
        choose_at_fit(settings)
    return settings


def put_under(model: keras.layers.Layer, settings: PolicySettings) -> None:
    """Gives a built model the dtypes of settings, and the optimizers they need."""
    hooks.install(settings)
    layer_dtypes.take_back_patterns(model, settings)
    layers = [layer for _, layer, _ in structure.walk(model)]
    for layer in layers:
        layer_dtypes.begin_again(layer, settings)
    for layer in layers:
        layer_dtypes.decide(layer)
        trainer.drop_traced_functions(layer)
    resolution.resolve(model)
    compile_hooks.follow_policy(model, settings)


def load_model(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Loads a saved model with the dtypes, loss scale and counters it had.

    No `tfamp.enable` is needed before, and none is in force after.

    Args:
        path: A `.keras` file. One that was saved without tfamp loads as Keras
            loads it.
        **kwargs: As for `keras.saving.load_model`.

    Returns:
        The model.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a `.keras` archive, or holds the dtypes of
            another model.
    """
    text = os.fspath(path)
    if not os.path.exists(text):
        raise FileNotFoundError(
            f"Found no file {text!r}; expected a model saved with "
            "`model.save('name.keras')`. Check the path."
        )
    try:
        entry = saved_state.read_entry(text)
    except (zipfile.BadZipFile, FileNotFoundError, KeyError) as error:
        raise ValueError(
            f"Cannot read {text!r} as a `.keras` archive: {error}. Save the model with "
            "`model.save('name.keras')`; HDF5 files and SavedModels hold no dtypes of "
            "layers, load them with Keras and call `tfamp.apply(model)`."
        ) from error

    def load() -> Any:
        return keras.saving.load_model(text, **kwargs)

    if entry is None:
        return hooks.load_unmanaged(load)
    model = hooks.load(entry, load)
    compile_hooks.make_exact(model)
    return model


def _check_model(model: Any) -> None:
    if isinstance(model, keras.layers.Layer):
        return
    advice = "Pass what `keras.Model(...)` gave."
    if type(model).__module__.startswith(("tf_keras", "keras.src.legacy")):
        advice = (
            "It is a legacy tf_keras model: unset TF_USE_LEGACY_KERAS and build it "
            "with Keras 3."
        )
    raise TypeError(
        f"Cannot read the dtypes of {model!r}; expected a Keras 3 model or layer. "
        f"{advice}"
    )


def _check_patterns(model: keras.layers.Layer, given: RuleSet) -> None:
    """Raises where a rule of the user matches nothing, before any change."""
    rows = list(structure.walk(model))
    for rule in given.of_user:
        if not any(rule.matches(layer, path=path) for path, layer, _ in rows):
            raise ValueError(resolution.unmatched_message(model, rule))


def _row(path: str, layer: keras.layers.Layer) -> LayerAssignment:
    policy = policy_of(layer)
    told = ("not managed", "", "")
    if policy is not None:
        told = (policy.rule, policy.reason, _note(layer, policy))
    # The dtype of the weights that it has, which `apply` cannot change.
    stored = {w.dtype for w in structure.own_weights(layer)} & {"float32", *HALF}
    return LayerAssignment(
        path,
        type(layer).__name__,
        layer.compute_dtype,
        stored.pop() if len(stored) == 1 else layer.variable_dtype,
        _output_dtype(layer, policy),
        *told,
    )


def _output_dtype(layer: keras.layers.Layer, policy: Policy | None) -> str:
    if policy is not None and policy.output_dtype is not None:
        return policy.output_dtype
    graph = structure.graph_of(layer)
    if graph is None:
        return layer.compute_dtype
    tensor = structure.outputs_of(graph)[0]
    made = structure.producer(tensor)
    if made is not None and isinstance(made[0], keras.layers.Layer):
        return _output_dtype(made[0], policy_of(made[0]))
    return str(tensor.dtype)


def _note(layer: keras.layers.Layer, policy: Policy) -> str:
    if policy.kind is Kind.FLOAT32_INSIDE and policy.rule.startswith("keep_float32"):
        why = gains_nothing(layer)
        if why is not None:
            return f"gains nothing: {why}"
    if isinstance(layer, keras.Model) and not policy.is_resolved:
        return "heads are found at the first call"
    if policy.kind is Kind.WIDE_OUTPUT or policy.kind is Kind.OUTPUT_CAST:
        return policy.reason
    return ""


def _cells(row: LayerAssignment) -> tuple[str, ...]:
    because = f"{row.rule} ({row.note})" if row.note else row.rule
    dtypes = (row.compute_dtype, row.variable_dtype, row.output_dtype)
    return (row.path, row.class_name, *dtypes, because)
