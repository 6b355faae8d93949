"""A model's dtypes as data: what is put into a saved file, and taken out again."""

from typing import Any

import keras

from tfamp.dtypes import heads, layer_dtypes, model_dtypes, resolution
from tfamp.dtypes.settings import PolicySettings, make_settings
from tfamp.keras_hooks import structure, trainer, variables
from tfamp.keras_hooks.layers import Kind, LayerRecord, record_of, set_record
from tfamp.records.formats import HALF

SCHEMA = 1
# What a file calls a field of the record, and a kind of it.
_STORED = {
    **{name: name for name in ("rule", "reason", "output_dtype", "exact_inputs")},
    **{name: name for name in ("inner_dtype", "made_in", "wrapped_optimizer")},
    "reach": "applies_to",
    "settled": "is_decided",
    "spread": "is_propagated",
    "resolved": "is_resolved",
}
_KINDS = {Kind.FLOAT32_INSIDE: "ISLAND", Kind.SUBLAYER: "INSIDE"}
_KIND_OF = {_KINDS.get(kind, kind.name): kind for kind in Kind}


def describe(model: keras.layers.Layer) -> dict[str, Any] | None:
    """Returns the record of each layer of `model`, None where none is managed."""
    settings = resolution.settings_of(model)
    if settings is None:
        return None
    if structure.graph_of(model) is not None:
        resolution.resolve(model)
    options = settings.loss_scale_options
    plain = {
        k: v for k, v in options.items() if isinstance(v, int | float | str | None)
    }
    return {
        "schema": SCHEMA,
        "policy": settings.policy.name,
        "has_defaults": settings.rules.has_defaults,
        "loss_scale": {"loss_scale": settings.loss_scale, **plain},
        "jit_compile": settings.jit_compile,
        "evidence": dict(settings.evidence),
        "operations": [
            {"place": place, **kept._asdict()}
            for place, kept in model_dtypes.kept_in(model).items()
        ],
        "layers": [_row(*row[:2]) for row in structure.walk(model)],
    }


def _row(path: str, layer: keras.layers.Layer) -> dict[str, Any]:
    record = record_of(layer)
    row: dict[str, Any] = {
        "path": path,
        "class_name": type(layer).__name__,
        "policy": layer.dtype_policy.name,
    }
    if record is not None:
        row["kind"] = _KINDS.get(record.kind, record.kind.name)
        if record.made_in is not None and structure.constructor_makes_graph(layer):
            row["graph_made_in"] = record.made_in
        stored = [weight.dtype for weight in structure.own_weights(layer)]
        if {*stored} & {*HALF} and layer.variable_dtype not in HALF:
            row["stored"] = stored
        row.update({key: getattr(record, name) for key, name in _STORED.items()})
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
    """Gives each layer of a loaded `model` the policy and record it was saved with.

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
    settings = _settings_of_file(entry)
    policies = settings.policies()
    for layer, row in zip(layers, rows, strict=True):
        name = row["policy"]
        if layer.dtype_policy.name != name:
            policy = policies.setdefault(name, keras.dtype_policies.get(name))
            layer_dtypes.set_policy(layer, policy)
        if "kind" in row:
            stored = {name: row[key] for key, name in _STORED.items() if key in row}
            stored["graph_key"] = structure.graph_key(layer)
            set_record(layer, LayerRecord(settings, _KIND_OF[row["kind"]], **stored))
            # The weights of a layer of a frozen model are stored as they were.
            own = zip(structure.own_weights(layer), row.get("stored", ()), strict=False)
            for weight, dtype in own:
                if weight.dtype != dtype:
                    variables.store_in(weight, dtype)
        trainer.drop_traced_functions(layer)
    kept = {}
    for row in entry.get("operations", ()):
        fields = {name: value for name, value in row.items() if name != "place"}
        kept[row["place"]] = model_dtypes.Float32Operation(**fields)
    model_dtypes.keep_only(model, kept)
    found = heads.graph_heads(model)
    if found is not None and any(
        record_of(h) is not None
        and record_of(h).output_dtype in (None, "float32")  # type: ignore[union-attr]
        and h.compute_dtype == "float32"
        for h in found.heads
    ):
        for tensor in found.tensors:
            structure.set_tensor_dtype(tensor, "float32")


def settings_to_make(entry: dict[str, Any]) -> PolicySettings | None:
    """Returns the settings under which the layers of a saved model are to be made.

    The constructor of a subclass may wire a graph, in which operations keep the dtypes
    of the tensors that they met. Such a model is made as it was the first time; None
    stands for one without such a graph.
    """
    for row in entry["layers"]:
        settings = _settings_of_file(
            {**entry, "policy": row.get("graph_made_in", "float32")}
        )
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
