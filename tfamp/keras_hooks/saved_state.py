"""Hooks where models and layers are written down, made again, and copied.

A saved model, and its copies, hold one more entry. Keras writes the dtype that a layer
inherited as if it had been passed, so a clone would take every dtype for the user's
own: the serialized dtype says which it is, in an entry that stock Keras passes over.

Relies on: `_serialize_model_as_json` giving the configuration and the metadata of a
`.keras` archive as two JSON texts; Keras ignoring metadata it does not know; pickling
and `copy.deepcopy` going through `KerasSaveable.__reduce__`, which gives a function and
an archive in memory; `Layer.get_config` serializing the policy into a dict under
"dtype"; `deserialize_keras_object` passing over entries it does not know; layers being
made by `Operation.from_config`, or by a `from_config` of their own that hands that dict
to `Layer.__init__`; `Model.build_from_config` tracing `self.call` on float32 inputs.
For copies in memory: `Layer.__new__` putting wrappers of `build` and `quantize` on each
instance, and lists of layers noting what they get unless a `DotNotTrackScope` is open.
"""

import copy
import json
import os
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import keras
from keras.src.saving import saving_lib
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils.tracking import DotNotTrackScope

from tfamp.keras_hooks import calls, structure
from tfamp.keras_hooks.layers import CALLS, policy_of, update
from tfamp.keras_hooks.patches import Function, Patch, replaced, wrapper
from tfamp.records.formats import HALF

METADATA_FILE = "metadata.json"
METADATA_KEY = "tfamp"
_INHERITED = "tfamp_inherited"  # "" where it was passed
_PLAIN = ("DTypePolicy", "FloatDTypePolicy")  # those that quantize nothing


def patches(
    describe: Callable[[keras.layers.Layer], dict[str, Any] | None],
    unpickle: Callable[[Any], Any],
    load: Callable[[dict[str, Any], Callable[[], Any]], Any],
    policy_of: Callable[[keras.layers.Layer], str | None],
) -> list[Patch]:
    """Returns the patches on saving, loading and copying.

    Args:
        describe: Gives what to store for a model or layer, None for nothing.
        unpickle: Loads a pickled model or layer with what was stored. A function of a
            module: a pickle names it, so that any process finds it.
        load: Takes what was stored in a file that Keras's own `load_model` is given,
            and a function that makes the model as Keras does; returns the model.
        policy_of: Gives the name of the policy that a layer's dtype came from, "" where
            it was passed to the layer, None where nobody knows.
    """

    @wrapper
    def wrap_serialize(original: Function, model: Any) -> tuple[str, str]:
        config, metadata = original(model)
        entry = describe(model) if isinstance(model, keras.layers.Layer) else None
        if entry is not None:
            metadata = json.dumps({**json.loads(metadata), METADATA_KEY: entry})
        return config, metadata

    @wrapper
    def wrap_reduce(
        original: Function, self: Any
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        function, (archive,) = original(self)
        is_ours = read_entry(archive) is not None
        return unpickle if is_ours else function, (archive,)

    @wrapper
    def wrap_load(original: Function, fileobj: Any, *args: Any, **kwargs: Any) -> Any:
        entry = read_entry(fileobj)
        if entry is None:
            return original(fileobj, *args, **kwargs)
        return load(entry, lambda: original(fileobj, *args, **kwargs))

    @wrapper
    def wrap_config(original: Function, self: keras.layers.Layer) -> dict[str, Any]:
        config = original(self)
        name, dtype = policy_of(self), config.get("dtype")
        if name is not None and isinstance(dtype, dict):
            config["dtype"] = {**dtype, _INHERITED: name}
        return config

    return [
        Patch(saving_lib, "_load_model_from_fileobj", wrap_load),
        Patch(saving_lib, "_serialize_model_as_json", wrap_serialize),
        Patch(KerasSaveable, "__reduce__", wrap_reduce),
        Patch(keras.layers.Layer, "get_config", wrap_config),
        Patch(keras.Model, "build_from_config", _wrap_build),
    ]


def unpickled(archive: Any) -> Any:
    """Loads a pickled model or layer as Keras does."""
    return KerasSaveable._unpickle_model(archive)


def read_entry(archive: Any) -> dict[str, Any] | None:
    """Returns what tfamp stored in a `.keras` archive, None where nothing is.

    The archive is a path, also of an unzipped one, or a file object.

    Raises:
        zipfile.BadZipFile: The file is no archive.
        KeyError: The archive has no metadata, so Keras did not write it.
        FileNotFoundError: The folder has none.
    """
    if isinstance(archive, str) and os.path.isdir(archive):
        with open(os.path.join(archive, METADATA_FILE), encoding="utf-8") as text:
            return json.load(text).get(METADATA_KEY)
    with zipfile.ZipFile(archive) as file:
        return json.loads(file.read(METADATA_FILE)).get(METADATA_KEY)


def read_patches(
    is_in_force: Callable[[str], bool],
    after_quantized: Callable[[keras.layers.Layer], None],
) -> list[Patch]:
    """Returns the patch that lets a layer inherit its dtype as the written one did.

    `is_in_force` states whether new layers come under the policy of a name. A quantized
    layer needs the dtype that was written; `after_quantized` is called with it.
    """

    def wrap(original: Any) -> Any:
        def from_config(cls: type, config: dict[str, Any]) -> Any:
            dtype = config.get("dtype")
            name = inherited_from(dtype)
            if dtype is None or name is None or not is_in_force(name):
                return original.__func__(cls, config)
            if dtype["class_name"] not in _PLAIN:
                layer = original.__func__(cls, config)
                after_quantized(layer)
                return layer
            config = {k: v for k, v in config.items() if k != "dtype"}
            return original.__func__(cls, config)

        return classmethod(from_config)

    return [Patch(keras.Operation, "from_config", wrap)]


@wrapper
def _wrap_build(original: Function, self: keras.Model, config: Any) -> Any:
    """Hands a loaded model's `call`, by which it is built, inputs as in a real call."""
    dtype = self.compute_dtype
    if policy_of(self) is None or dtype not in HALF:
        return original(self, config)
    plain = self.call

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = calls.cast_outputs((args, kwargs), dtype)
        return plain(*args, **kwargs)

    building = replaced(CALLS, num_builds=CALLS.num_builds + 1)
    with building, replaced(self, call=call):
        return original(self, config)


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


_IN_MEMORY = "tfamp copies in memory"


def copied_in_memory(model: keras.Model) -> keras.Model:
    """Returns a copy of a model that is made object by object, not compiled.

    It needs no configuration, but each object that the model holds has to have a copy.
    """
    memo: dict[Any, Any] = {_IN_MEMORY: True}
    policies = [layer.dtype_policy for layer in model._flatten_layers()]
    # Layers that draw hold their backend, a module.
    kept = [model._distribute_strategy, *policies, *sys.modules.values()]
    memo.update((id(each), each) for each in kept)
    for name in ("optimizer", "train_function", "test_function", "predict_function"):
        memo[id(getattr(model, name, None))] = None
    patch = Patch(KerasSaveable, "__deepcopy__", lambda _: _deepcopy, optional=True)
    with patch.standing(), DotNotTrackScope():
        made = copy.deepcopy(model, memo)
    of_copy, of_model = (
        [layer for _, layer, _ in structure.walk(each)] + each.weights
        for each in (made, model)
    )
    if {id(each) for each in of_copy} & {id(each) for each in of_model}:
        raise ValueError(f"Parts of {model.name!r} are shared by its copy.")
    for _, layer, _ in structure.walk(made):
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
