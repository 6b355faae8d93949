"""Rules on policies, weights in half precision, and the rates that move weights.

Keras casts rates, betas and gradients to the dtype of the weight and keeps the moments
in it; only the learning rate itself and the counter of updates are wider.
"""

import collections
from collections.abc import Iterator
from typing import Any

import keras

from tfamp.dtypes.in_force import IN_FORCE
from tfamp.keras_hooks import structure
from tfamp.numerics.lint.subject import Found, Part, Subject, rule
from tfamp.numerics.proof.causes import name_layers
from tfamp.records import formats
from tfamp.records.findings import Severity
from tfamp.records.formats import HALF

# The step that most recipes take: the rate of Adam, whose update is about its size.
_USUAL_RATE = 1e-3
_K = keras.optimizers
# Parts of the past that an optimizer keeps, if it has them.
_KEPT = ("beta_1", "beta_2", "momentum", "rho", "ema_momentum")
_SAFE = {"float16": 0.999, "bfloat16": 0.99}


@rule("late-policy")
def late_policy(subject: Subject) -> Iterator[Found]:
    """Layers that were made before the policy, and so in float32."""
    holders = _holders(subject)
    wanted = _wanted(subject, holders)
    late = [part for part in subject.parts if _is_late(part, subject, holders)]
    if wanted is None or not late:
        return
    computing = [part for part in subject.parts if part.weights]
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


def _wanted(subject: Subject, holders: collections.Counter[int]) -> str | None:
    """Returns the policy that layers should have followed, None if there is none."""
    if IN_FORCE.settings is not None and IN_FORCE.settings.is_half:
        return str(IN_FORCE.settings.policy.name)
    present = keras.config.dtype_policy()
    if getattr(present, "compute_dtype", "") in HALF:
        return str(present.name)
    # The policy was taken back, but part of the model follows it.
    for part in subject.parts:
        if part.record is not None and part.record.settings.is_half:
            return str(part.record.settings.policy.name)
    shared = (
        part.layer.dtype_policy.name
        for part in subject.half()
        if part.weights and holders[id(part.layer.dtype_policy)] > 1
    )
    return next(shared, None)


def _is_late(part: Part, subject: Subject, holders: collections.Counter[int]) -> bool:
    """States whether a layer in float32 follows no decision but its making.

    A dtype given by name makes a policy of its own; layers without one share the
    global policy object of that time. Where that is still the global one, and tfamp
    manages nothing, the others were given half precision one by one.
    """
    if part.record is not None or part.dtype != "float32" or not part.weights:
        return False
    policy = part.layer.dtype_policy
    records = [each.record for each in subject.parts]
    is_managed = any(r is not None and r.settings.is_half for r in records)
    if policy is keras.config.dtype_policy() and not is_managed:
        return IN_FORCE.settings is not None
    return holders[id(policy)] > 1


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
        layers = [part.path for part in subject.stored_in(dtype)]
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


@rule("rounded-momentum", needs=("optimizer",))
def rounded_momentum(subject: Subject) -> Iterator[Found]:
    """Betas and momenta that are 1 in the dtype of the weights."""
    for inner, dtype, parts in subject.optimized():
        spacing = formats.FORMATS[dtype].epsilon
        for name in _KEPT:
            value = getattr(inner, name, None)
            if name == "ema_momentum" and not getattr(inner, "use_ema", False):
                continue
            # Below 1 numbers lie half as far apart, and a tie goes to 1.
            if not isinstance(value, (int, float)) or not 1 - spacing / 4 <= value < 1:
                continue
            severity, effect = _effect(inner, name)
            yield Found(
                severity,
                f"`{name}={value:g}` of {inner.name!r} is 1 in {dtype}, in which "
                f"{name_layers([part.path for part in parts])} are stored: {effect}.",
                f"Use the policy 'mixed_{dtype}', which keeps weights and moments in "
                f"float32, or pass `{name}={_SAFE[dtype]}`.",
                parts[0].path,
                value,
                {"dtype": dtype, "argument": name, "num_layers": len(parts)},
            )


def _effect(inner: Any, name: str) -> tuple[Severity, str]:
    """Returns severity and words of what a 1 in the place of a beta does."""
    if name == "beta_2" and isinstance(inner, (_K.Adam, _K.Lamb)):
        return "error", "its correction sqrt(1 - 1**t) is 0, and no weight ever moves"
    if name == "beta_2" and isinstance(inner, _K.Nadam):
        return "error", "it divides by 1 - 1**t, and every weight turns NaN"
    if name == "beta_1" and isinstance(inner, (_K.Adam, _K.Lamb, _K.Adamax)):
        return "error", "it divides by 1 - 1**t, and weights turn infinite or NaN"
    if name == "ema_momentum":
        return "warning", "the average stays what it was after the first update"
    if isinstance(inner, (_K.Nadam, _K.Lion)):
        return "warning", "new gradients do not count in its average"
    return "warning", "what it has gathered never decays"
