"""Hooks where models and layers are written down, made again, and copied.

A saved model, and its copies, hold one more entry. Keras writes the dtype that a layer
inherited as if it had been passed, so a clone would take every dtype for the user's
own: the serialized dtype says which it is, in an entry that stock Keras passes over.

Relies on: `_serialize_model_as_json` giving configuration and metadata of an archive as
JSON; Keras passing over metadata and entries of a dtype that it does not know;
`KerasSaveable.__reduce__` giving the instance's `_unpickle_model` and an archive in
memory; `Layer.get_config` serializing the policy under "dtype"; layers being made by
`Operation.from_config`, or by one of their own that hands that on;
`_infer_input_signature_from_model` giving an `InputSpec` for each input, in the dtype
that the model computes in, where the model has no graph of layers. For copies in
memory: `Layer.__new__` putting wrappers of `build` and `quantize` on each instance, and
lists of layers noting what they get unless a `DotNotTrackScope` is open.
"""

import copy
import json
import os
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.export import export_utils
from keras.src.saving import saving_lib
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils.tracking import DotNotTrackScope

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.in_force import IN_FORCE
from tfamp.keras_hooks.layers import Kind, policy_of, update
from tfamp.keras_hooks.patches import Function, Patch, wrapper
from tfamp.keras_hooks.structure import Layer

_FILE, _KEY = "metadata.json", "tfamp"
_INHERITED = "tfamp_inherited"  # "" where it was passed
_PLAIN = ("DTypePolicy", "FloatDTypePolicy")  # those that quantize nothing
_IN_MEMORY = "tfamp copies in memory"


def patches(
    describe: Callable[[Layer], dict[str, Any] | None],
    load: Callable[[dict[str, Any], Callable[[], Any]], Any],
    after_quantized: Callable[[Layer], None],
) -> list[Patch]:
    """Returns the patches on saving, loading and copying.

    `describe` gives what to store for a model, None for nothing; `load` takes that, and
    a function that makes the model as Keras does, where Keras's own `load_model` is
    called; `after_quantized` takes a quantized layer that inherits its dtype.
    """

    @wrapper
    def wrap_serialize(original: Function, model: Any) -> tuple[str, str]:
        config, metadata = original(model)
        entry = describe(model) if isinstance(model, keras.layers.Layer) else None
        if entry is not None:
            metadata = json.dumps({**json.loads(metadata), _KEY: entry})
        return config, metadata

    @wrapper
    def wrap_load(original: Function, fileobj: Any, *args: Any, **kwargs: Any) -> Any:
        entry = read_entry(fileobj)
        if entry is None:
            return original(fileobj, *args, **kwargs)
        return load(entry, lambda: original(fileobj, *args, **kwargs))

    @wrapper
    def wrap_config(original: Function, self: Any) -> dict[str, Any]:
        config, policy = original(self), policy_of(self)
        dtype = config.get("dtype")
        if policy is not None and isinstance(dtype, dict):
            is_passed = policy.kind is Kind.EXPLICIT
            name = "" if is_passed else policy.settings.policy.name
            config["dtype"] = {**dtype, _INHERITED: name}
        return config

    @wrapper
    def wrap_signature(original: Function, model: Any) -> Any:
        """Lets an exported model of the user's class take float32, as it was called."""
        signature, policy = original(model), policy_of(model)
        if not signature or policy is None or policy.kind is Kind.EXPLICIT:
            return signature
        return tf.nest.map_structure(_in_float32, signature)

    def wrap_from_config(original: Any) -> Any:
        def from_config(cls: type, config: dict[str, Any]) -> Any:
            dtype, make = config.get("dtype"), original.__func__
            name = inherited_from(dtype)
            if dtype is None or name is None or not IN_FORCE.holds(name):
                return make(cls, config)
            if dtype["class_name"] in _PLAIN:
                return make(cls, {k: v for k, v in config.items() if k != "dtype"})
            layer = make(cls, config)
            after_quantized(layer)
            return layer

        return classmethod(from_config)

    return [
        Patch(saving_lib, "_load_model_from_fileobj", wrap_load),
        Patch(saving_lib, "_serialize_model_as_json", wrap_serialize),
        Patch(export_utils, "_infer_input_signature_from_model", wrap_signature),
        Patch(Layer, "get_config", wrap_config),
        Patch(keras.Operation, "from_config", wrap_from_config),
    ]


def _in_float32(spec: keras.layers.InputSpec) -> keras.layers.InputSpec:
    return keras.layers.InputSpec("float32", spec.shape, name=spec.name)


def unpickled(archive: Any) -> Any:
    """Loads a pickled model or layer as Keras does."""
    return KerasSaveable._unpickle_model(archive)


def read_entry(archive: Any) -> dict[str, Any] | None:
    """Returns what tfamp stored in an archive, a path or a file; None for nothing.

    A BadZipFile, KeyError or FileNotFoundError says that Keras did not write it.
    """
    if isinstance(archive, str) and os.path.isdir(archive):
        with open(os.path.join(archive, _FILE), encoding="utf-8") as text:
            return json.load(text).get(_KEY)
    with zipfile.ZipFile(archive) as file:
        return json.loads(file.read(_FILE)).get(_KEY)


def inherited_from(dtype: Any) -> str | None:
    """Returns the policy that a serialized dtype came from, None if it was passed.

    What was written without tfamp does not tell, and is taken for inherited.
    """
    if not isinstance(dtype, dict):
        return None
    if _INHERITED in dtype:
        return dtype[_INHERITED] or None
    is_plain = dtype.get("class_name") in _PLAIN
    return dtype.get("config", {}).get("name") if is_plain else None


def copied_in_memory(model: keras.Model) -> keras.Model:
    """Returns a copy of a model that is made object by object, not compiled.

    It needs no configuration, but each object that the model holds has to have a copy.
    """
    # Layers that draw hold their backend, a module.
    kept = [model._distribute_strategy, *sys.modules.values()]
    memo: dict[Any, Any] = {_IN_MEMORY: True, **{id(each): each for each in kept}}
    for name in ("optimizer", "train_function", "test_function", "predict_function"):
        memo[id(getattr(model, name, None))] = None
    patch = Patch(KerasSaveable, "__deepcopy__", lambda _: _deepcopy, optional=True)
    with patch.standing(), DotNotTrackScope():
        made = copy.deepcopy(model, memo)
    parts = [[*structure.layers_of(each), *each.weights] for each in (made, model)]
    if not {id(x) for x in parts[0]}.isdisjoint(id(x) for x in parts[1]):
        raise ValueError(f"Parts of {model.name!r} are shared by its copy.")
    for layer in structure.layers_of(made):
        if policy_of(layer) is not None:
            update(layer, graph_key=structure.graph_key(layer))
    return made


def _deepcopy(self: Any, memo: dict[Any, Any]) -> Any:
    if _IN_MEMORY not in memo:  # of another thread, as Keras copies
        function, arguments = self.__reduce__()
        return function(*arguments)
    cls: Any = type(self)
    made = cls.__new__(cls)
    memo[id(self)] = made
    # What wraps its own methods stays the copy's.
    own = {name for name, value in vars(made).items() if callable(value)}
    for name, value in vars(self).items():
        if name not in own:
            vars(made)[name] = copy.deepcopy(value, memo)
    return made
