"""Has `fit`, `evaluate` and `predict` build a pipeline that they are handed.

Relies on: Keras's epoch iterators calling `data_adapters.get_data_adapter` by this name
for all data, with the data as `x`.
"""

import functools
from typing import Any, TypeVar

from keras.src.trainers import data_adapters

from tfamp.keras_hooks.patches import Function, Patch, PatchSet

Kind = TypeVar("Kind", bound=type)


def built_by_fit(kind: Kind) -> Kind:
    """Has Keras call `build` of objects of a class, for the dataset to read."""

    def replace(original: Function) -> Function:
        @functools.wraps(original)
        def get_data_adapter(x: Any, *args: Any, **kwargs: Any) -> Any:
            data: Any = x
            if isinstance(x, kind):
                data = data.build()
            return original(data, *args, **kwargs)

        return get_data_adapter

    PatchSet([Patch(data_adapters, "get_data_adapter", replace)]).install()
    return kind
