"""The dtypes of a model as rows: read off, compared, put on, in plans and in files.

A file holds a plan of the model, and what only a file needs. Stock Keras passes it over
and loads the file with the dtypes that were decided.
"""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from tfamp.dtypes import heads, layer_dtypes, resolution
from tfamp.dtypes.settings import POLICIES, PolicySettings, make_settings
from tfamp.keras_hooks import (
    backend,
    exact_values,
    fake_quantization,
    structure,
    trainer,
)
from tfamp.keras_hooks.layers import FIELDS, KEPT, Kind, Policy, policy_of, put, update
from tfamp.keras_hooks.structure import Layer
from tfamp.records import console
from tfamp.records.formats import HALF
from tfamp.records.record import Record

_FLOATS = ("float32", "float64", *HALF)
KINDS = {kind.value: kind for kind in Kind}
UNMANAGED = "unmanaged"
SCHEMA = 2  # of the entry in a file
_WIDTH_OF_THE_REST = 80


@dataclasses.dataclass(frozen=True)
class PlannedLayer(Record):
    """The dtypes of one layer in a plan, as its policy has them."""

    path: str  # names from below the model, joined by "/"; its own for the model
    class_name: str
    compute_dtype: str
    dtype_policy: str  # the name of its Keras policy
    kind: str = Kind.FOLLOWS.value  # of `Kind`, or "unmanaged"
    rule: str = ""
    reason: str = ""
    output_dtype: str | None = None
    exact_inputs: bool = False
    applies_to: str = "all"
    inner_dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class PlannedOperation(Record):
    """An operation of a Functional graph that computes in float32."""

    place: int  # its number among the operations of the model's graphs, from 0
    path: str  # its name, behind the path of the graph it is in
    class_name: str
    output_dtype: str  # what its floating-point outputs are cast to
    rule: str = ""
    reason: str = ""


def read_layers(model: Layer) -> tuple[PlannedLayer, ...]:
    """Returns what each layer of a model computes in now."""
    found = []
    for path, layer, _ in structure.walk(model):
        policy, told = policy_of(layer), dict[str, Any](kind=UNMANAGED)
        if policy is not None:
            told = {field: getattr(policy, field) for field in FIELDS}
            told["kind"] = policy.kind.value
        names = path, type(layer).__name__, layer.compute_dtype, layer.dtype_policy.name
        found.append(PlannedLayer(*names, **told))
    return tuple(found)


def read_operations(model: Layer) -> tuple[PlannedOperation, ...]:
    """Returns the operations of a model's graphs that are kept in float32."""
    known = list(exact_values.operations_in(model))
    return tuple(
        PlannedOperation(place, known[place][0], type(known[place][1]).__name__, *kept)
        for place, kept in exact_values.kept_in(model).items()
    )


def difference(
    model: Layer, rows: Sequence[PlannedLayer], operations: Sequence[PlannedOperation]
) -> str:
    """Returns the first way in which a model is not that of a plan, "" if it is."""
    here = [(path, type(layer).__name__) for path, layer, _ in structure.walk(model)]
    planned = [(row.path, row.class_name) for row in rows]
    pairs = itertools.zip_longest(_without_numbers(here), _without_numbers(planned))
    for place, (mine, plans) in enumerate(pairs):
        if mine is None or plans is None or mine[place == 0 :] != plans[place == 0 :]:
            # The root's own name may be another.
            told = [
                f"{known[place][0]!r}, a {known[place][1]}"
                if known[place:]
                else "nothing"
                for known in (here, planned)
            ]
            return f"layer {place} is {told[0]}, where the plan has {told[1]}"
    known = [type(each).__name__ for _, each in exact_values.operations_in(model)]
    for row in operations:
        if known[row.place : row.place + 1] != [row.class_name]:
            return f"it has no operation {row.path!r}, a {row.class_name}"
    return ""


def _without_numbers(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns (path, class) of layers without the numbers of automatic names.

    Keras numbers "dense_1" on as long as the process runs.
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
        known[path] = f"{known.get(prefix, prefix)}/{name}" if prefix else name
        found.append((known[path], class_name))
    return found


def put_on(
    model: Layer,
    settings: PolicySettings,
    rows: Sequence[PlannedLayer],
    operations: Sequence[PlannedOperation],
) -> None:
    """Gives each layer of a model that is the plan's the dtypes planned for it.

    A ValueError says that a layer cannot compute as planned; all are as before.
    """
    layers = structure.layers_of(model)
    with layer_dtypes.restored_on_error(model):
        for layer, row in zip(layers, rows, strict=True):
            _put(layer, row, settings)
    for layer in layers:
        trainer.drop_traced_functions(layer)
    found = heads.graph_heads(model)
    if found is not None and found.heads:
        # The tensors of a graph behind its heads tell what they are now.
        is_wide = all(output_dtype(head) == "float32" for head in found.heads)
        for tensor in found.tensors:
            dtype = "float32" if is_wide else settings.compute_dtype
            structure.set_tensor_dtype(tensor, dtype)
    kept = {row.place: (row.output_dtype, row.rule, row.reason) for row in operations}
    exact_values.keep_only(model, kept)


def _put(layer: Layer, row: PlannedLayer, settings: PolicySettings) -> None:
    name, before = row.dtype_policy, policy_of(layer)
    kind = KINDS.get(row.kind)
    if kind is None:
        put(layer, None)
        is_plain = layer.quantization_mode is None and layer.compute_dtype in _FLOATS
        if is_plain and layer.dtype_policy.name != name:
            layer.dtype_policy = keras.dtype_policies.get(name)
    else:
        source = name.partition("_from_")[2] or name
        if kind in KEPT and source == "float32":
            source = settings.policy.name
        elif source not in POLICIES:
            source = layer.compute_dtype
        known = {field: getattr(row, field) for field in FIELDS}
        known |= {"kind": kind, "is_decided": True, "is_propagated": layer.built}
        known |= {"is_resolved": True, "graph_key": structure.graph_key(layer)}
        known["made_in"] = "float32" if before is None else before.made_in
        put(layer, Policy(source, settings, **known))
    if layer.dtype_policy.name != name:
        raise ValueError(
            f"Layer {row.path!r} has dtype policy {layer.dtype_policy.name!r}, "
            f"which cannot become {name!r} as the plan has it; expected a layer "
            "that was made like the plan's. Quantize it, or build it, as before."
        )


def output_dtype(layer: Layer) -> str:
    """Returns the dtype of what a layer gives, a graph by what makes its output."""
    policy, graph = policy_of(layer), structure.graph_of(layer)
    if policy is not None and policy.output_dtype is not None:
        return policy.output_dtype
    if graph is None:
        return str(layer.compute_dtype)
    tensor = graph.outputs[0]
    made = structure.producer(tensor)
    is_layer = made is not None and isinstance(made[0], keras.layers.Layer)
    return output_dtype(made[0]) if is_layer else str(tensor.dtype)  # type: ignore[index]


def table(columns: Sequence[str], cells: Sequence[Sequence[str]], title: str) -> str:
    """Returns a table whose first column has paths, which are never broken."""
    options: dict[str, dict[str, Any]] = dict.fromkeys(columns, console.FOLD)
    # A path in two lines is a path that nobody can search for.
    options[columns[0]] = {**console.FOLD, "no_wrap": True}
    width = max(console.WIDTH, max(len(row[0]) for row in cells) + _WIDTH_OF_THE_REST)
    return console.text_of(console.table(options, cells, title=title), width=width)


@contextlib.contextmanager
def restored(model: Layer) -> Iterator[None]:
    """Puts a model's layers, operations and graph back, however the block ends."""
    before = layer_dtypes.Before(structure.layers_of(model))
    operations = exact_values.kept_in(model)
    found = heads.graph_heads(model)
    tensors = [(t, t.dtype) for t in (found.tensors if found is not None else ())]
    try:
        yield
    finally:
        before.put_back()
        exact_values.keep_only(model, operations)
        for tensor, dtype in tensors:
            structure.set_tensor_dtype(tensor, dtype)


def describe(model: Layer) -> dict[str, Any] | None:
    """Returns the entry of a model in its file, None where no layer is managed."""
    settings = resolution.settings_of(model)
    if settings is None:
        return None
    if structure.graph_of(model) is not None:
        resolution.resolve(model)
    layers = structure.layers_of(model)
    policies = [policy_of(layer) for layer in layers]
    weights = [[w.dtype for w in structure.own_weights(layer)] for layer in layers]
    return {
        "schema": SCHEMA,
        **facts_of(settings),
        # The constructor of a subclass may wire a graph, in which operations keep the
        # dtypes of the tensors that they met.
        "made_in": [
            policy.made_in
            for layer, policy in zip(layers, policies, strict=True)
            if policy and structure.constructor_makes_graph(layer)
        ],
        "unresolved": [
            n for n, each in enumerate(policies) if each and not each.is_resolved
        ],
        # The weights of a frozen model.
        "stored": {
            str(place): dtypes
            for place, dtypes in enumerate(weights)
            if {*dtypes} & {*HALF} and layers[place].variable_dtype not in HALF
        },
        "layers": [dataclasses.asdict(row) for row in read_layers(model)],
        "operations": [dataclasses.asdict(row) for row in read_operations(model)],
        "fake_quantized": {
            str(place): fake_quantization.ranges_in(layer)
            for place, layer in enumerate(layers)
            if fake_quantization.is_attached(layer)
        },
    }


def restore(model: Layer, entry: dict[str, Any]) -> None:
    """Gives each layer of a loaded `model` the policy that it was saved with."""
    layers = structure.layers_of(model)
    rows = [PlannedLayer(**row) for row in entry["layers"]]
    places = _places(layers, rows)
    if len(places) != len(layers):
        raise ValueError(
            f"The file assigns dtypes to {len(rows)} layers, but model {model.name!r} "
            f"has {len(layers)}, or of other classes. Was the model's code changed "
            "since it was saved? Load it with `keras.saving.load_model` and call "
            "`tfamp.apply(model)`."
        )
    operations = [PlannedOperation(**row) for row in entry["operations"]]
    present = [rows[place] for place in places]
    put_on(model, settings_from(entry, entry["policy"]), present, operations)
    known = dict(zip(places, structure.walk(model), strict=True))
    ranges = {known[int(n)][0]: each for n, each in entry["fake_quantized"].items()}
    if ranges:
        fake_quantization.attach_all(model, ranges)
    for place in known.keys() & entry["unresolved"]:
        update(known[place][1], is_resolved=False)
    for place, dtypes in entry["stored"].items():
        weights = structure.own_weights(known[int(place)][1])
        for weight, dtype in zip(weights, dtypes, strict=False):
            if weight.dtype != dtype:
                backend.store_in(weight, dtype)


def _places(layers: Sequence[Layer], rows: Sequence[PlannedLayer]) -> list[int]:
    """Returns which rows are those of layers; the first call makes the other layers."""
    names = [type(layer).__name__ for layer in layers]
    found: list[int] = []
    for place, row in enumerate(rows):
        if len(found) < len(names) and row.class_name == names[len(found)]:
            found.append(place)
    return found


def settings_to_make(entry: dict[str, Any]) -> PolicySettings:
    """Returns the settings under which the layers of a saved model are to be made.

    They are made in float32, but as they were where a constructor wires a graph.
    """
    if entry.get("schema") != SCHEMA:
        raise ValueError(
            f"The file's dtype assignment has schema {entry.get('schema')!r}; expected "
            f"{SCHEMA}. Load it with the version of tfamp that wrote it."
        )
    is_mixed = entry["policy"].startswith("mixed_")
    plain = "float32" if is_mixed else entry["policy"]
    return settings_from(entry, next(iter(entry["made_in"]), plain))


def facts_of(settings: PolicySettings) -> dict[str, Any]:
    """Returns what plans and files hold of settings, for `settings_from`."""
    options = settings.loss_scale_options.items()
    return {
        "policy": settings.policy.name,
        "has_default_rules": settings.with_defaults,
        "loss_scale": settings.loss_scale,
        "loss_scale_options": {
            name: value
            for name, value in options
            if isinstance(value, int | float | str | None)
        },
        "jit_compile": settings.jit_compile,
        "evidence": dict(settings.evidence),
    }


def settings_from(
    facts: Mapping[str, Any], policy: str, *, plan: Any = None
) -> PolicySettings:
    """Returns the settings that a plan or a file holds, for a policy.

    The user's own rules, which may be functions, are known by what they decided.
    """
    known = ("loss_scale", "loss_scale_options", "jit_compile", "evidence")
    keep_float32 = "default" if facts["has_default_rules"] else "none"
    fields = {name: facts[name] for name in known}
    return make_settings(policy, keep_float32, plan=plan, **fields)
