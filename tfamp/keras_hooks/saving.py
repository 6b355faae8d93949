"""Hooks that put one more entry into a saved model, and take it out of copies.

Relies on: `_serialize_model_as_json` giving the configuration and the metadata
of a `.keras` archive as two JSON texts; Keras ignoring metadata it does not
know; pickling and `copy.deepcopy` going through `_unpickle_model`.
"""

import json
import os
import zipfile
from collections.abc import Callable
from typing import Any

import keras
from keras.src.saving import saving_lib
from keras.src.saving.keras_saveable import KerasSaveable

from tfamp._patch import Patch, like

METADATA_FILE = "metadata.json"
METADATA_KEY = "tfamp"


def patches(
    describe: Callable[[keras.layers.Layer], dict[str, Any] | None],
    restore: Callable[[keras.layers.Layer, dict[str, Any]], None],
) -> list[Patch]:
    """Returns the patches on saving and on copying.

    Args:
        describe: Gives what to store for a model or layer, None for nothing.
        restore: Gives a freshly unpickled model or layer what was stored.
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

    def wrap_unpickle(original: Callable[..., Any]) -> Any:
        def _unpickle_model(cls: type, bytesio: Any) -> Any:
            model = original(bytesio)
            entry = read_entry(bytesio)
            if entry is not None:
                restore(model, entry)
            return model

        return classmethod(_unpickle_model)

    return [
        Patch(saving_lib, "_serialize_model_as_json", wrap_serialize),
        Patch(KerasSaveable, "_unpickle_model", wrap_unpickle),
    ]


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
