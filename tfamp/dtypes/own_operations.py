"""Takes what a layer computes itself into float32, between sublayers that stay.

The layer's inputs come unrounded, and what its sublayers return is widened: its own
operations meet float32 alone. A model's do where its last product is one of them.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfamp.dtypes import heads, layer_dtypes
from tfamp.dtypes.rule import Rule
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import calls, structure
from tfamp.keras_hooks.layer_record import record_of, update_record

_PRODUCT = "its own product makes an output of the model, which feeds the loss"


def take(layer: keras.layers.Layer, settings: PolicySettings, rule: Rule) -> None:
    """Takes a layer into float32 for good; `rule.applies_to` says whether alone."""
    layer_dtypes.keep(layer, settings, rule)
    update_record(layer, is_decided=True)
    if isinstance(layer, keras.Model) and not calls.in_call():
        update_record(layer, output_dtype="float32")  # a model's output is a head


@contextlib.contextmanager
def tried(layer: keras.layers.Layer) -> Iterator[None]:
    """Puts the dtypes of a layer and its sublayers back where the block fails."""
    before = heads.held(part for _, part, _ in structure.walk(layer))
    try:
        yield
    except BaseException:
        heads.restore(before)
        raise


def take_for_output(
    model: keras.layers.Layer,
    found: heads.Heads,
    settings: PolicySettings,
    trace: Callable[[], Any],
) -> bool:
    """Takes a model's own operations into float32 where a product of its own ends it.

    Args:
        model: A model that is not a graph of layers.
        found: What makes its outputs.
        settings: Its settings.
        trace: Calls the model once, without side effects.

    Returns:
        Whether they are in float32 now: not where the product is large, as its share
        of the time is not known, or where the call raises then.
    """
    record = record_of(model)
    if record is None or not found.own_products:
        return False
    if record.applies_to == "own":  # by a rule, for a loss of its own
        update_record(model, output_dtype="float32")
        return True
    factors = [product.inputs[1].shape for product in found.own_products]
    weights = max(math.prod(size or 1 for size in factor) for factor in factors)
    if weights >= heads.MIN_LARGE_HEAD_WEIGHTS:
        return False
    with contextlib.suppress(Exception), tried(model):
        take(model, settings, Rule("default: heads", _PRODUCT, applies_to="own"))
        trace()
        return True
    return False
