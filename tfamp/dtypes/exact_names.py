"""Names in `keep_float32` that a layer has, though others match them as a pattern."""

import keras

from tfamp.dtypes import layer_dtypes
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layer_record import Kind, record_of


def find(model: keras.layers.Layer, settings: PolicySettings) -> None:
    """Takes back what a pattern has kept that turns out to be another layer's name."""
    rows = [(path, layer) for path, layer, _ in structure.walk(model)]
    for rule in settings.rules.of_user:
        if any(rule.is_name_of(layer, path) for path, layer in rows):
            settings.exact.add(rule.name)
        if rule.name not in settings.exact:
            continue
        for path, layer in rows:
            record = record_of(layer)
            if (
                record is None
                or record.settings is not settings
                or record.rule != rule.name
            ):
                continue
            if not rule.matches(layer, path=path, is_exact=True):
                _begin_again(layer, settings)


def _begin_again(kept: keras.layers.Layer, settings: PolicySettings) -> None:
    for _, layer, _ in structure.walk(kept):
        record = record_of(layer)
        if layer is kept or (record is not None and record.kind is Kind.SUBLAYER):
            layer_dtypes.begin_again(layer, settings)
