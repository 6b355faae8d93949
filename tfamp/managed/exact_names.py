"""Names in `keep_float32` that a layer has, though others match them as a pattern."""

import keras

from tfamp._care import Kind, care_of
from tfamp.keras_hooks import structure
from tfamp.managed import keeping
from tfamp.managed.lease import Lease


def find(model: keras.layers.Layer, lease: Lease) -> None:
    """Takes back what a pattern has kept that turns out to be another layer's name."""
    rows = [(path, layer) for path, layer, _ in structure.walk(model)]
    for rule in lease.rules.of_user:
        if any(rule.is_name_of(layer, path) for path, layer in rows):
            lease.exact.add(rule.name)
        if rule.name not in lease.exact:
            continue
        for path, layer in rows:
            care = care_of(layer)
            if care is None or care.lease is not lease or care.rule != rule.name:
                continue
            if not rule.matches(layer, path=path, is_exact=True):
                _begin_again(layer, lease)


def _begin_again(kept: keras.layers.Layer, lease: Lease) -> None:
    for _, layer, _ in structure.walk(kept):
        care = care_of(layer)
        if layer is kept or (care is not None and care.kind is Kind.INSIDE):
            keeping.begin_again(layer, lease)
