"""A second model like a first one, with its classes, weights and dtypes."""

import tempfile
from pathlib import Path

import keras

from tfamp.keras_hooks import structure
from tfamp.models import load_model
from tfamp.records.checks import first_line


def copied(model: keras.Model, *, instead: str) -> keras.Model:
    """Returns the model as it is after saving and loading, not compiled.

    Args:
        model: A built model.
        instead: What to do where its classes cannot be saved, for the error.

    Raises:
        ValueError: It cannot be saved or loaded.
    """
    classes = {
        type(layer).__name__: type(layer)
        for _, layer, _ in structure.walk(model)
        if not type(layer).__module__.startswith("keras.")
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        try:
            model.save(path)
            return load_model(
                path, custom_objects=classes, compile=False, safe_mode=False
            )
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ValueError(
                f"Cannot copy model {model.name!r}: {first_line(error)} Give its "
                f"classes a `get_config` that returns their arguments, or {instead}."
            ) from error
