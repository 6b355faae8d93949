"""A model's dtypes as data: what is put into a saved file, and taken out again."""

from collections.abc import Sequence
from typing import Any

import keras

from tfamp import rules as _rules
from tfamp._care import Care, Kind, care_of, set_care
from tfamp.keras_hooks import storage, structure, trainer
from tfamp.managed import heads, keeping, resolving
from tfamp.managed.lease import HALF, Lease

SCHEMA = 1
_STORED = (
    "rule reason output_dtype exact_inputs reach inner_dtype settled spread resolved "
    "made_in wrapped_optimizer"
).split()


def describe(model: keras.layers.Layer) -> dict[str, Any] | None:
    """Returns the care of each layer of `model`, None where none is managed."""
    lease = resolving.care_lease(model)
    if lease is None:
        return None
    if structure.graph_of(model) is not None:
        resolving.resolve(model)
    loss_scale = {"loss_scale": lease.loss_scale, **_plain(lease.loss_scale_options)}
    return {
        "schema": SCHEMA,
        "policy": lease.policy.name,
        "has_defaults": lease.rules.has_defaults,
        "loss_scale": loss_scale,
        "layers": [_row(*row[:2]) for row in structure.walk(model)],
    }


def _plain(options: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in options.items()
        if isinstance(value, int | float | str | bool | None)
    }


def _row(path: str, layer: keras.layers.Layer) -> dict[str, Any]:
    care = care_of(layer)
    row: dict[str, Any] = {
        "path": path,
        "class_name": type(layer).__name__,
        "policy": layer.dtype_policy.name,
    }
    if care is not None:
        row["kind"] = care.kind.name
        if care.made_in is not None and structure.constructor_makes_graph(layer):
            row["graph_made_in"] = care.made_in
        stored = [weight.dtype for weight in structure.own_weights(layer)]
        if {*stored} & {*HALF} and layer.variable_dtype not in HALF:
            row["stored"] = stored
        row.update({name: getattr(care, name) for name in _STORED})
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
    """Gives each layer of a loaded `model` the policy and care it was saved with.

    Layers are told apart by their place and class: names may have changed.

    Raises:
        ValueError: The file describes another model than this one.
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
    lease = _lease(entry)
    policies: dict[str, keras.DTypePolicy] = {
        lease.policy.name: lease.policy,
        lease.kept.name: lease.kept,
    }
    for layer, row in zip(layers, rows, strict=True):
        name = row["policy"]
        if layer.dtype_policy.name != name:
            policy = policies.setdefault(name, keras.dtype_policies.get(name))
            keeping.set_policy(layer, policy)
        if "kind" in row:
            stored = {field: row[field] for field in _STORED if field in row}
            stored["graph_key"] = structure.graph_key(layer)
            set_care(layer, Care(lease, Kind[row["kind"]], **stored))
            _store(layer, row.get("stored", ()))
        trainer.drop_traced_functions(layer)
    found = heads.graph_heads(model)
    if found is not None and any(
        care_of(h) is not None
        and care_of(h).output_dtype in (None, "float32")  # type: ignore[union-attr]
        and h.compute_dtype == "float32"
        for h in found.heads
    ):
        for tensor in found.tensors:
            structure.set_tensor_dtype(tensor, "float32")


def lease_to_make(entry: dict[str, Any]) -> Lease | None:
    """Returns the settings under which the layers of a saved model are to be made.

    The constructor of a subclass may wire a graph, in which operations keep the dtypes
    of the tensors that they met. Such a model is made as it was the first time.

    Returns:
        None where no such graph was made in half precision under tfamp.
    """
    for row in entry["layers"]:
        lease = _lease({**entry, "policy": row.get("graph_made_in", "float32")})
        if lease.is_half:
            return lease
    return None


def _store(layer: keras.layers.Layer, dtypes: Sequence[str]) -> None:
    """Stores the weights of a layer of a frozen model as they were."""
    for weight, dtype in zip(structure.own_weights(layer), dtypes, strict=False):
        if weight.dtype != dtype:
            storage.store_in(weight, dtype)


def _lease(entry: dict[str, Any]) -> Lease:
    options = dict(entry["loss_scale"])
    loss_scale = options.pop("loss_scale")
    policy = keras.DTypePolicy(entry["policy"])
    # The user's own rules, which may be functions, are known by what they decided.
    rules = _rules.parse("default" if entry["has_defaults"] else "none")
    rules = rules.for_dtype(policy.compute_dtype)
    return Lease(policy, rules, loss_scale, options)
