"""The dtypes of a model in its file: `describe` puts them in, `restore` takes them out.

Stock Keras passes them over and loads the file with the dtypes that were decided.
"""

from typing import Any

import keras

from tfamp.dtypes import model_dtypes, planned_layers, resolution
from tfamp.dtypes.planned_layers import UNMANAGED, PlannedLayer, PlannedOperation
from tfamp.dtypes.settings import PolicySettings, make_settings
from tfamp.keras_hooks import fake_quantization, structure, variables
from tfamp.keras_hooks.layers import Kind, policy_of
from tfamp.records.formats import HALF

SCHEMA = 1
# What a file calls what a plan has of a layer, and what only a file has.
_PLANNED = {
    "policy": "dtype_policy",
    **{name: name for name in ("rule", "reason", "output_dtype", "exact_inputs")},
    "inner_dtype": "inner_dtype",
    "reach": "applies_to",
}
_KNOWN = {
    **{name: name for name in ("made_in", "wrapped_optimizer")},
    "settled": "is_decided",
    "spread": "is_propagated",
    "resolved": "is_resolved",
}
_NAMES = {Kind.FLOAT32_INSIDE: "ISLAND", Kind.SUBLAYER: "INSIDE"}
_KINDS = {_NAMES.get(kind, kind.name): kind.value for kind in Kind}


def describe(model: keras.layers.Layer) -> dict[str, Any] | None:
    """Returns what is known of each layer of `model`, None where none is managed."""
    settings = resolution.settings_of(model)
    if settings is None:
        return None
    if structure.graph_of(model) is not None:
        resolution.resolve(model)
    options = settings.loss_scale_options
    plain = {
        k: v for k, v in options.items() if isinstance(v, int | float | str | None)
    }
    kept = model_dtypes.kept_in(model)
    return {
        "schema": SCHEMA,
        "policy": settings.policy.name,
        "has_defaults": settings.rules.has_defaults,
        "loss_scale": {"loss_scale": settings.loss_scale, **plain},
        "jit_compile": settings.jit_compile,
        "evidence": dict(settings.evidence),
        "operations": [{"place": place, **kept[place]._asdict()} for place in kept],
        "layers": [_described(*row[:2]) for row in structure.walk(model)],
    }


def _described(path: str, layer: keras.layers.Layer) -> dict[str, Any]:
    policy, planned = policy_of(layer), planned_layers.planned_layer(path, layer)
    row: dict[str, Any] = {"path": path, "class_name": planned.class_name}
    if fake_quantization.is_attached(layer):
        row["fake_quantized"] = fake_quantization.ranges_in(layer)
    if policy is None:
        return {**row, "policy": planned.dtype_policy}
    row["kind"] = _NAMES.get(policy.kind, policy.kind.name)
    if policy.made_in is not None and structure.constructor_makes_graph(layer):
        row["graph_made_in"] = policy.made_in
    stored = [weight.dtype for weight in structure.own_weights(layer)]
    if {*stored} & {*HALF} and layer.variable_dtype not in HALF:
        row["stored"] = stored
    row.update({key: getattr(planned, name) for key, name in _PLANNED.items()})
    row.update({key: getattr(policy, name) for key, name in _KNOWN.items()})
    return row


def check_schema(entry: dict[str, Any]) -> None:
    """Raises ValueError where the file was written by a newer tfamp."""
    if entry.get("schema") != SCHEMA:
        raise ValueError(
            f"The file's dtype assignment has schema {entry.get('schema')!r}; expected "
            f"{SCHEMA}. Load it with the version of tfamp that wrote it, or upgrade: "
            "`pip install --upgrade tfamp`."
        )


def restore(model: keras.layers.Layer, entry: dict[str, Any]) -> None:
    """Gives each layer of a loaded `model` the policy that it was saved with.

    Layers are told apart by their place and class: names may have changed. A ValueError
    says that the file describes another model than this one.
    """
    layers = [layer for _, layer, _ in structure.walk(model)]
    rows = entry["layers"]
    if [type(layer).__name__ for layer in layers] != [r["class_name"] for r in rows]:
        raise ValueError(
            f"The file assigns dtypes to {len(rows)} layers, but model {model.name!r} "
            f"has {len(layers)}, or of other classes. Was the model's code changed "
            "since it was saved? Load it with `keras.saving.load_model` and call "
            "`tfamp.apply(model)`."
        )
    planned = [_planned(row) for row in rows]
    known = [{_KNOWN[key]: row[key] for key in _KNOWN if key in row} for row in rows]
    operations = [
        PlannedOperation(path="", class_name="", **row)
        for row in entry.get("operations", ())
    ]
    settings = _settings_of_file(entry)
    planned_layers.put_on(model, settings, planned, operations, known)
    by_place = {
        path: row["fake_quantized"]
        for (path, *_), row in zip(structure.walk(model), rows, strict=True)
        if "fake_quantized" in row
    }
    fake_quantization.attach_all(model, by_place)
    for layer, row in zip(layers, rows, strict=True):
        # The weights of a layer of a frozen model are stored as they were.
        own = zip(structure.own_weights(layer), row.get("stored", ()), strict=False)
        for weight, dtype in own:
            if weight.dtype != dtype:
                variables.store_in(weight, dtype)


def _planned(row: dict[str, Any]) -> PlannedLayer:
    fields = {name: row[key] for key, name in _PLANNED.items() if key in row}
    kind = _KINDS[row["kind"]] if "kind" in row else UNMANAGED
    return PlannedLayer(row["path"], row["class_name"], "", kind=kind, **fields)


def settings_to_make(entry: dict[str, Any]) -> PolicySettings | None:
    """Returns the settings under which the layers of a saved model are to be made.

    The constructor of a subclass may wire a graph, in which operations keep the dtypes
    of the tensors that they met. Such a model is made as it was the first time; None
    stands for one without such a graph.
    """
    for row in entry["layers"]:
        if "graph_made_in" in row:
            settings = _settings_of_file({**entry, "policy": row["graph_made_in"]})
            if settings.is_half:
                return settings
    return None


def _settings_of_file(entry: dict[str, Any]) -> PolicySettings:
    options = dict(entry["loss_scale"])
    # The user's own rules, which may be functions, are known by what they decided.
    return make_settings(
        entry["policy"],
        "default" if entry["has_defaults"] else "none",
        options.pop("loss_scale"),
        options,
        jit_compile=entry.get("jit_compile"),
        evidence=entry.get("evidence", {}),
    )
