"""What a whole model computes in: operations of its graphs, and all of it put back.

Operations of Functional graphs have no dtype of their own, and can be kept in float32.
A file of the model holds its dtypes as data, which `describe` puts in and `restore`
takes out.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.dtypes import heads, layer_dtypes, resolution
from tfamp.dtypes.settings import PolicySettings, make_settings
from tfamp.keras_hooks import structure, trainer, variables
from tfamp.keras_hooks.calls import cast_outputs
from tfamp.keras_hooks.exact_values import unrounded
from tfamp.keras_hooks.layers import Kind, LayerRecord, record_of, set_record
from tfamp.keras_hooks.patches import like, replaced
from tfamp.records.formats import HALF

_KEPT = "_tfamp_kept_in_float32"


class Float32Operation(NamedTuple):
    """How an operation is kept in float32."""

    output_dtype: str  # what its floating-point outputs are cast to
    rule: str = ""  # what decided
    reason: str = ""  # why


def of_model(model: keras.layers.Layer) -> Iterator[tuple[str, Any]]:
    """Yields path and operation of all graphs in a model, each once, in their order."""
    seen: set[int] = set()
    for path, layer, _ in structure.walk(model):
        prefix = "" if layer is model else f"{path}/"
        for operation in structure.operations_of(layer):
            if id(operation) not in seen:
                seen.add(id(operation))
                yield f"{prefix}{operation.name}", operation


def kept(operation: Any) -> Float32Operation | None:
    """Returns how an operation is kept in float32, None where it is not."""
    found = vars(operation).get(_KEPT)
    return None if found is None else found[1]


def keep(operation: Any, output_dtype: str, rule: str = "", reason: str = "") -> bool:
    """Has an operation compute in float32 from now on.

    It has no dtype to be set, so its call is replaced on the instance; Keras's own part
    of a file that the model is saved to knows nothing of that. Its floating-point
    outputs are cast to `output_dtype`. Returns whether it did not do so already.
    """
    if _KEPT in vars(operation):
        return False
    # Let go of, the stack would put the call back.
    stack = contextlib.ExitStack()
    vars(operation)[_KEPT] = stack, Float32Operation(output_dtype, rule, reason)
    stack.enter_context(in_float32(operation, output_dtype))
    return True


def release(operation: Any) -> None:
    """Has an operation compute again in what it gets; nothing where it does."""
    found = vars(operation).pop(_KEPT, None)
    if found is not None:
        found[0].close()


def kept_in(model: keras.layers.Layer) -> dict[int, Float32Operation]:
    """Returns the operations that are kept in float32, by their place in `of_model`."""
    found = {place: kept(each) for place, (_, each) in enumerate(of_model(model))}
    return {place: each for place, each in found.items() if each is not None}


def keep_only(
    model: keras.layers.Layer, wanted: Mapping[int, Float32Operation]
) -> None:
    """Keeps these operations in float32, by their place, and no others."""
    for place, (_, operation) in enumerate(of_model(model)):
        release(operation)
        if place in wanted:
            keep(operation, *wanted[place])


@contextlib.contextmanager
def restored(model: keras.layers.Layer) -> Iterator[None]:
    """Puts a model's layers, operations and graph back, however the block ends."""
    before = layer_dtypes.read(layer for _, layer, _ in structure.walk(model))
    operations = kept_in(model)
    found = heads.graph_heads(model)
    tensors = [(t, t.dtype) for t in (found.tensors if found is not None else ())]
    try:
        yield
    finally:
        layer_dtypes.restore(before)
        keep_only(model, operations)
        for tensor, dtype in tensors:
            structure.set_tensor_dtype(tensor, dtype)


@contextlib.contextmanager
def in_float32(layer: Any, dtype: str) -> Iterator[None]:
    """Has a float32 layer or an operation take inputs as exact as they are known.

    Its floating-point outputs are cast to `dtype`.
    """
    original = layer.call

    @like(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = structure.map_structure(widened, (args, kwargs))
        return cast_outputs(original(*args, **kwargs), dtype)

    # Without autocasting the layer is given the very tensors that others returned,
    # which know what they were rounded from. Operations have no such setting.
    uncast = {"autocast": False} if "autocast" in vars(layer) else {}
    with replaced(layer, call=call, **uncast):
        yield


def widened(x: Any) -> Any:
    """Returns a half-precision tensor in float32, unrounded where that is known."""
    if isinstance(x, tf.Tensor) and x.dtype.name in HALF:
        return unrounded(x)
    return x


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
            {"place": place, **kept._asdict()} for place, kept in kept_in(model).items()
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
        kept[row["place"]] = Float32Operation(**fields)
    keep_only(model, kept)
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
