"""Takes what a layer computes itself into float32, between sublayers that stay.

The layer's inputs come unrounded, and what its sublayers return is widened: its own
operations meet float32 alone. A model's do where its last product is one of them.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfamp._care import care_of, change_care
from tfamp.keras_hooks import calls, structure
from tfamp.managed import heads, keeping
from tfamp.managed.lease import Lease
from tfamp.rules import Rule

_PRODUCT = "its own product makes an output of the model, which feeds the loss"


def take(layer: keras.layers.Layer, lease: Lease, rule: Rule) -> None:
    """Takes a layer into float32 for good; `rule.reach` says whether alone."""
    keeping.keep(layer, lease, rule)
    change_care(layer, settled=True)
    if isinstance(layer, keras.Model) and not calls.in_call():
        change_care(layer, output_dtype="float32")  # a model's output is a head


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
    lease: Lease,
    trace: Callable[[], Any],
) -> bool:
    """Takes a model's own operations into float32 where a product of its own ends it.

    Args:
        model: A model that is not a graph of layers.
        found: What makes its outputs.
        lease: Its settings.
        trace: Calls the model once, without side effects.

    Returns:
        Whether they are in float32 now: not where the product is large, as its share
        of the time is not known, or where the call raises then.
    """
    care = care_of(model)
    if care is None or not found.own_products:
        return False
    if care.reach == "own":  # by a rule, for a loss of its own
        change_care(model, output_dtype="float32")
        return True
    factors = [product.inputs[1].shape for product in found.own_products]
    weights = max(math.prod(size or 1 for size in factor) for factor in factors)
    if weights >= heads.MIN_LARGE_HEAD_WEIGHTS:
        return False
    with contextlib.suppress(Exception), tried(model):
        take(model, lease, Rule("default: heads", _PRODUCT, reach="own"))
        trace()
        return True
    return False
