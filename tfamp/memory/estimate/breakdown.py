"""Sorts what lives at the peak by kind and by layer."""

import collections

import keras

from tfamp.graph.bodies import is_backward
from tfamp.graph.liveness import Held, Peak
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.structure import bytes_of, num_bytes
from tfamp.stepping.layer_marks import Marks
from tfamp.stepping.snapshots.names import optimizers_of

# In the order of a table; kinds that hold nothing are left out of a step.
KINDS = (
    "parameters",
    "optimizer slots",
    "inputs",
    "activations",
    "gradients",
    "casts",
    "workspace",
)
# What belongs to no layer: the loss, the optimizer, the train step itself.
OUTSIDE = "(outside layers)"


def standing(model: keras.Model, *, training: bool) -> tuple[int, int]:
    """Returns the bytes of a model's variables and of its optimizers' slots."""
    parameters = [*model.variables, *model.metrics_variables]
    slots = [v for o in optimizers_of(model) for v in o.variables] if training else []
    known = {id(variable) for variable in parameters}
    return bytes_of(parameters), bytes_of(v for v in slots if id(v) not in known)


def by_kind(peak: Peak, model: keras.Model, marks: Marks) -> dict[str, int]:
    """Returns the bytes of what a step made and holds at its peak, by kind."""
    shapes = {num_bytes(variable) for variable in model.trainable_variables}
    sizes = shapes | {size // 2 for size in shapes}
    found: collections.Counter[str] = collections.Counter()
    for held in peak.held:
        in_layer = bool(marks.layer_of(held.name))
        found[_kind(held, sizes, in_layer=in_layer)] += held.num_bytes
    return {kind: found[kind] for kind in KINDS if found[kind]}


def _kind(held: Held, weights: set[int], *, in_layer: bool) -> str:
    if held.op == "scratch":
        return "workspace"
    if held.op == "Cast" and held.source == "ReadVariableOp":
        return "casts"
    if is_backward(held.name):
        return "gradients" if held.num_bytes in weights else "workspace"
    # The optimizer computes with numbers of the weights' sizes.
    return "activations" if in_layer or held.num_bytes not in weights else "workspace"


def by_layer(
    peak: Peak, model: keras.Model, marks: Marks, slots: int
) -> dict[str, int]:
    """Returns the bytes of each layer: weights, slots, and what the step holds."""
    found: collections.Counter[str] = collections.Counter()
    for held in peak.held:
        found[marks.layer_of(held.name) or OUTSIDE] += held.num_bytes
    trainable = sum(map(num_bytes, model.trainable_variables)) or 1
    counted: set[int] = set()
    for path, layer, _ in structure.walk(model):
        own = [w for w in structure.own_weights(layer) if id(w) not in counted]
        counted |= {id(w) for w in own}
        size = bytes_of(own)
        # Slots have the shapes of what is trained.
        share = sum(num_bytes(w) for w in own if getattr(w, "trainable", False))
        found[path] += size + slots * share // trainable
    return {path: size for path, size in found.most_common() if size}
