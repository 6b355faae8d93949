"""Rules on dtype policies: set too late, half-precision weights."""

import collections
from collections.abc import Iterator
from typing import Any

import keras

from tfamp import formats
from tfamp.managed.lease import HALF, IN_FORCE
from tfamp.numerics.causes import name_layers
from tfamp.numerics.linting.rule import Found, rule
from tfamp.numerics.linting.subject import Part, Subject

# The step that most recipes take: the rate of Adam, whose update is about its size.
_USUAL_RATE = 1e-3


@rule("late-policy")
def late_policy(subject: Subject) -> Iterator[Found]:
    """Layers that were made before the policy, and so in float32."""
    wanted = _wanted(subject)
    if wanted is None:
        return
    late = [part for part in subject.parts if _is_late(part, subject)]
    computing = [part for part in subject.parts if part.weights]
    if not late:
        return
    yield Found(
        "warning",
        f"{len(late)} of {len(computing)} layers with weights were made in float32 "
        f"before the policy {wanted!r} was set, and stay there: "
        f"{name_layers([part.path for part in late])}.",
        "Set the policy before the first layer is made, or convert the model in "
        "place: `tfamp.apply(model)`.",
        late[0].path,
        len(late),
        {"policy": wanted},
    )


def _wanted(subject: Subject) -> str | None:
    """Returns the policy that layers should have followed, None if there is none."""
    present = keras.config.dtype_policy()
    if IN_FORCE.lease is not None and IN_FORCE.lease.is_half:
        return str(IN_FORCE.lease.policy.name)
    if getattr(present, "compute_dtype", "") in HALF:
        return str(present.name)
    # The policy was taken back, but part of the model follows it.
    shared = _shared_policies(subject)
    for part in subject.parts:
        policy = part.layer.dtype_policy
        if part.care is not None and part.care.lease.is_half:
            return str(part.care.lease.policy.name)
        if part.is_half and part.weights and shared[id(policy)] > 1:
            return str(policy.name)
    return None


def _is_late(part: Part, subject: Subject) -> bool:
    """States whether a layer in float32 follows no decision but its making.

    A dtype given by name makes a policy of its own; layers without one share the
    global policy object of that time.
    """
    if part.care is not None or part.dtype != "float32" or not part.weights:
        return False
    return _shared_policies(subject)[id(part.layer.dtype_policy)] > 1


def _shared_policies(subject: Subject) -> collections.Counter[int]:
    """Counts how many layers hold each policy object, input layers among them."""
    layers: dict[int, Any] = {id(part.layer): part.layer for part in subject.parts}
    for part in subject.parts:
        # Children that were handed the policy of a layer around them are no evidence.
        for child in getattr(part.layer, "layers", ()):
            layers[id(child)] = child
    return collections.Counter(id(layer.dtype_policy) for layer in layers.values())


@rule("half-weights")
def half_weights(subject: Subject) -> Iterator[Found]:
    """Trainable weights in half precision, which small updates do not move."""
    for dtype in HALF:
        layers = [
            part.path
            for part in subject.parts
            if any(w.trainable and w.dtype == dtype for w in part.weights)
        ]
        if not layers:
            continue
        spacing = formats.FORMATS[dtype].epsilon
        yield Found(
            "warning",
            f"The weights of {name_layers(layers)} are stored in {dtype}, where the "
            f"next number after 1 is {1 + spacing:g}: an update of less than "
            f"{spacing / 4:.2g} of a weight is lost, and at a learning rate of "
            f"{_USUAL_RATE:g} those near 1 hardly move or never.",
            f"Use the policy 'mixed_{dtype}', which keeps weights in float32.",
            layers[0],
            spacing / 4,
            {"dtype": dtype, "num_layers": len(layers)},
        )
