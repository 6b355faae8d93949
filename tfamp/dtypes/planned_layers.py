"""The dtypes of a model's layers as rows of a plan: read, compared, put in force."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfamp.dtypes import heads, layer_dtypes, model_dtypes
from tfamp.dtypes.settings import POLICIES, PolicySettings
from tfamp.keras_hooks import structure, trainer
from tfamp.keras_hooks.layers import (
    FIELDS,
    KEPT,
    Kind,
    Policy,
    drop,
    policy_of,
    put,
)
from tfamp.records.checks import first_line
from tfamp.records.formats import HALF
from tfamp.records.record import Record

_FLOATS = ("float32", "float64", *HALF)
KINDS = {kind.value: kind for kind in Kind}
UNMANAGED = "unmanaged"


@dataclasses.dataclass(frozen=True)
class PlannedLayer(Record):
    """The dtypes of one layer in a plan.

    Attributes:
        path: Names from below the model, joined by "/"; the model's own for itself.
        class_name: Name of the layer's class.
        compute_dtype: What it computes in.
        dtype_policy: The name of its Keras policy.
        kind: How it came by that: "policy", "explicit", "float32 inside", "sublayer",
            "head", "wide output", "output cast", or "unmanaged".
        rule: What decided.
        reason: Why, with what was measured.
        output_dtype: What its floating-point outputs are cast to, None to leave them.
        exact_inputs: Whether it takes inputs as they were before they were rounded.
        applies_to: Whether its sublayers are in float32 with it: "all", "self", "own".
        inner_dtype: What sublayers' outputs are cast to inside it.
    """

    path: str
    class_name: str
    compute_dtype: str
    dtype_policy: str
    kind: str = Kind.FOLLOWS.value
    rule: str = ""
    reason: str = ""
    output_dtype: str | None = None
    exact_inputs: bool = False
    applies_to: str = "all"
    inner_dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class PlannedOperation(Record):
    """An operation of a Functional graph that computes in float32.

    Attributes:
        place: Its number among the operations of the model's graphs, from 0.
        path: Its name, behind the path of the graph it is in.
        class_name: Name of its class.
        output_dtype: What its floating-point outputs are cast to.
        rule: What decided.
        reason: Why, with what was measured.
    """

    place: int
    path: str
    class_name: str
    output_dtype: str
    rule: str = ""
    reason: str = ""


def planned_layer(path: str, layer: keras.layers.Layer) -> PlannedLayer:
    """Returns what a layer computes in now."""
    policy = policy_of(layer)
    common = (path, type(layer).__name__, layer.compute_dtype, layer.dtype_policy.name)
    if policy is None:
        return PlannedLayer(*common, kind=UNMANAGED)
    fields = {name: getattr(policy, name) for name in FIELDS}
    return PlannedLayer(*common, kind=policy.kind.value, **fields)


def planned_operations(model: keras.layers.Layer) -> tuple[PlannedOperation, ...]:
    """Returns the operations of a model's graphs that are kept in float32."""
    known = list(model_dtypes.of_model(model))
    return tuple(
        PlannedOperation(place, known[place][0], type(known[place][1]).__name__, *kept)
        for place, kept in model_dtypes.kept_in(model).items()
    )


def difference(
    model: keras.layers.Layer,
    rows: Sequence[PlannedLayer],
    operations: Sequence[PlannedOperation],
) -> str:
    """Returns the first way in which a model is not that of a plan, "" if it is."""
    here = [(path, type(layer).__name__) for path, layer, _ in structure.walk(model)]
    planned = [(row.path, row.class_name) for row in rows]
    pairs = zip(_without_numbers(here), _without_numbers(planned), strict=False)
    for place, (mine, plans) in enumerate(pairs):
        if mine[1] != plans[1] or (place > 0 and mine[0] != plans[0]):
            return (
                f"layer {place} is {here[place][0]!r}, a {mine[1]}, where the plan has "
                f"{planned[place][0]!r}, a {plans[1]}"
            )
    if len(here) != len(planned):
        is_more = len(here) > len(planned)
        path, class_name = (here if is_more else planned)[min(len(here), len(planned))]
        return (
            f"it has {len(here)} layers where the plan has {len(planned)}: "
            f"{'it' if is_more else 'the plan'} has {path!r}, a {class_name}, as well"
        )
    known = [type(o).__name__ for _, o in model_dtypes.of_model(model)]
    for row in operations:
        if known[row.place : row.place + 1] != [row.class_name]:
            return f"it has no operation {row.path!r}, a {row.class_name}"
    return ""


def in_float32(
    rows: Sequence[PlannedLayer], operations: Sequence[PlannedOperation]
) -> tuple[str, ...]:
    """Returns the paths of what computes in float32, the model itself left out."""
    layers = (row.path for row in rows[1:] if row.compute_dtype == "float32")
    return (*layers, *(operation.path for operation in operations))


def put_on(
    model: keras.layers.Layer,
    settings: PolicySettings,
    rows: Sequence[PlannedLayer],
    operations: Sequence[PlannedOperation],
    known: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Gives each layer of a model that is the plan's the dtypes planned for it.

    `known` has what else a file knows of each policy. A ValueError says that a layer
    cannot compute as planned; all are as before.
    """
    layers = [layer for _, layer, _ in structure.walk(model)]
    with layer_dtypes.restored_on_error(layers):
        for place, (layer, row) in enumerate(zip(layers, rows, strict=True)):
            _put(layer, row, settings, {} if known is None else known[place])
    for layer in layers:
        trainer.drop_traced_functions(layer)
    _tell_graph(model, settings)
    kept = {
        row.place: model_dtypes.Float32Operation(row.output_dtype, row.rule, row.reason)
        for row in operations
    }
    model_dtypes.keep_only(model, kept)


def _put(
    layer: keras.layers.Layer,
    row: PlannedLayer,
    settings: PolicySettings,
    known: Mapping[str, Any],
) -> None:
    name, before = row.dtype_policy, policy_of(layer)
    if name.startswith("float8") and layer.quantization_mode is None:
        _quantize(layer, row)
    kind = KINDS.get(row.kind)
    if kind is None:
        drop(layer)
        is_plain = layer.quantization_mode is None and layer.compute_dtype in _FLOATS
        if is_plain and layer.dtype_policy.name != name:
            layer.dtype_policy = keras.dtype_policies.get(name)
    else:
        source = name.partition("_from_")[2] or name
        if kind in KEPT and source == "float32":
            source = settings.policy.name
        elif source not in POLICIES:
            source = layer.compute_dtype
        policy = Policy(
            source,
            settings,
            kind=kind,
            **{field: getattr(row, field) for field in FIELDS},
            is_decided=True,
            is_propagated=True,
            is_resolved=True,
            graph_key=structure.graph_key(layer),
            made_in=None if before is None else before.made_in,
            wrapped_optimizer=before is not None and before.wrapped_optimizer,
        )
        policy.__dict__.update(known)
        put(layer, policy)
    if layer.dtype_policy.name != name:
        raise ValueError(
            f"Layer {row.path!r} has dtype policy {layer.dtype_policy.name!r}, "
            f"which cannot become {name!r} as the plan has it; expected a layer "
            "that was made like the plan's. Quantize it, or build it, as before."
        )


def _quantize(layer: keras.layers.Layer, row: PlannedLayer) -> None:
    """Gives a layer the float8 products that the plan has for it."""
    base = row.dtype_policy.partition("_from_")[2]
    try:
        put(layer, keras.DTypePolicy(base))
        layer.quantize("float8")
    except (NotImplementedError, ValueError, TypeError) as error:
        raise ValueError(
            f"Layer {row.path!r}, a {row.class_name}, cannot compute in float8 as the "
            f"plan has it: {first_line(error)} Give it another dtype in the plan."
        ) from error


def _tell_graph(model: keras.layers.Layer, settings: PolicySettings) -> None:
    """Makes the tensors of a graph behind its heads tell what they are now."""
    found = heads.graph_heads(model)
    if found is None or not found.heads:
        return
    gives_float32 = all(_gives_float32(head) for head in found.heads)
    for tensor in found.tensors:
        dtype = "float32" if gives_float32 else settings.compute_dtype
        structure.set_tensor_dtype(tensor, dtype)


def _gives_float32(layer: keras.layers.Layer) -> bool:
    policy = policy_of(layer)
    given = None if policy is None else policy.output_dtype
    return (given or layer.compute_dtype) == "float32"


def _without_numbers(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns (path, class) of layers without the numbers of automatic names.

    Keras names a layer after its class, "dense", and numbers the next "dense_1" for as
    long as the process runs, so the same program gives other numbers elsewhere.
    """
    known: dict[str, str] = {}
    found = []
    for path, class_name in rows:
        prefix, _, name = path.rpartition("/")
        bare = re.sub(r"_\d+$", "", name)
        automatic = structure.automatic_name(class_name)
        # Wrappers make names of automatic ones, such as "forward_lstm_1".
        if bare == automatic or bare.endswith(f"_{automatic}"):
            name = bare
        whole = f"{known.get(prefix, prefix)}/{name}" if prefix else name
        known[path] = whole
        found.append((whole, class_name))
    return found
