"""Rules on dtype policies: set too late, half-precision weights."""

import collections
from collections.abc import Iterator
from typing import Any

import keras

from tfamp.dtypes.in_force import IN_FORCE
from tfamp.keras_hooks import structure
from tfamp.numerics.lint.rule import Found, rule
from tfamp.numerics.lint.subject import Part, Subject
from tfamp.numerics.proof.causes import name_layers
from tfamp.records import formats
from tfamp.records.formats import HALF

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
    if IN_FORCE.settings is not None and IN_FORCE.settings.is_half:
        return str(IN_FORCE.settings.policy.name)
    present = keras.config.dtype_policy()
    if getattr(present, "compute_dtype", "") in HALF:
        return str(present.name)
    # The policy was taken back, but part of the model follows it.
    holders = _holders(subject)
    for part in subject.parts:
        policy = part.layer.dtype_policy
        if part.is_half and part.weights and holders[id(policy)] > 1:
            return str(policy.name)
    return None


def _is_managed(subject: Subject) -> bool:
    """States whether tfamp put part of a model in half precision."""
    cares = [part.record for part in subject.parts]
    return any(record is not None and record.settings.is_half for record in cares)


def _is_late(part: Part, subject: Subject) -> bool:
    """States whether a layer in float32 follows no decision but its making.

    A dtype given by name makes a policy of its own; layers without one share the
    global policy object of that time. Where that is still the global one, and tfamp
    manages nothing, the others were given half precision one by one.
    """
    if part.record is not None or part.dtype != "float32" or not part.weights:
        return False
    policy = part.layer.dtype_policy
    if policy is keras.config.dtype_policy() and not _is_managed(subject):
        return IN_FORCE.settings is not None
    return _holders(subject)[id(policy)] > 1


def _holders(subject: Subject) -> collections.Counter[int]:
    """Counts how many layers came by each policy object, input layers among them.

    Layers that a layer around them, which is no model, handed its own do not count.
    """
    held: dict[int, Any] = {id(part.layer): part.layer for part in subject.parts}
    handed = set()
    for part in subject.parts:
        for child in getattr(part.layer, "layers", ()):
            held[id(child)] = child
        if isinstance(part.layer, keras.Model):
            continue
        for child in structure.children(part.layer):
            if child.dtype_policy is part.layer.dtype_policy:
                handed.add(id(child))
    return collections.Counter(
        id(layer.dtype_policy) for key, layer in held.items() if key not in handed
    )


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
