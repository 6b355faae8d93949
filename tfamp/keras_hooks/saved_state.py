"""Hooks that put one more entry into a saved model, and into its copies.

Relies on: `_serialize_model_as_json` giving the configuration and the metadata
of a `.keras` archive as two JSON texts; Keras ignoring metadata it does not
know; pickling and `copy.deepcopy` going through `KerasSaveable.__reduce__`, which
gives a function and an archive in memory.
"""

import json
import os
import zipfile
from collections.abc import Callable
from typing import Any

import keras
from keras.src.saving import saving_lib
from keras.src.saving.keras_saveable import KerasSaveable

from tfamp.keras_hooks.patches import Patch, like

METADATA_FILE = "metadata.json"
METADATA_KEY = "tfamp"


def patches(
    describe: Callable[[keras.layers.Layer], dict[str, Any] | None],
    unpickle: Callable[[Any], Any],
    load: Callable[[dict[str, Any], Callable[[], Any]], Any],
) -> list[Patch]:
    """Returns the patches on saving and on copying.

    Args:
        describe: Gives what to store for a model or layer, None for nothing.
        unpickle: Loads a pickled model or layer with what was stored. A function of a
            module: a pickle names it, so that any process finds it.
        load: Takes what was stored in a file that Keras's own `load_model` is given,
            and a function that makes the model as Keras does; returns the model.
    """

    def wrap_serialize(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def _serialize_model_as_json(model: Any) -> tuple[str, str]:
            config, metadata = original(model)
            entry = describe(model) if isinstance(model, keras.layers.Layer) else None
            if entry is not None:
                metadata = json.dumps({**json.loads(metadata), METADATA_KEY: entry})
            return config, metadata

        return _serialize_model_as_json

    def wrap_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def __reduce__(self: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            function, (archive,) = original(self)
            is_ours = read_entry(archive) is not None
            return unpickle if is_ours else function, (archive,)

        return __reduce__

    def wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def _load_model_from_fileobj(fileobj: Any, *args: Any, **kwargs: Any) -> Any:
            entry = read_entry(fileobj)
            if entry is None:
                return original(fileobj, *args, **kwargs)
            return load(entry, lambda: original(fileobj, *args, **kwargs))

        return _load_model_from_fileobj

    return [
        Patch(saving_lib, "_load_model_from_fileobj", wrap_load),
        Patch(saving_lib, "_serialize_model_as_json", wrap_serialize),
        Patch(KerasSaveable, "__reduce__", wrap_reduce),
    ]


def unpickled(archive: Any) -> Any:
    """Loads a pickled model or layer as Keras does."""
    return KerasSaveable._unpickle_model(archive)


def read_entry(archive: Any) -> dict[str, Any] | None:
    """Returns what tfamp stored in a `.keras` archive, None where nothing is.

    Args:
        archive: A path or a file object; a path may be that of an unzipped
            archive.

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
