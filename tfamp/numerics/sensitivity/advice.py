"""What to do about what `tfamp.sensitivity` found, in a sentence or two."""

from collections.abc import Sequence

from tfamp.numerics.sensitivity.result import Sensitivity
from tfamp.stepping.layer_units import how_to_keep
from tfamp.stepping.taps import Site

# tfamp's first loss scale.
FIRST_SCALE = 2.0**15


def advice_on(
    found: Sensitivity, left: Sequence[Site], *, unscaled: Sequence[str], failure: str
) -> str:
    """Returns what to do.

    Args:
        found: What was found, still without advice.
        left: The guilty layers and operations that no default rule keeps.
        unscaled: Paths of the layers whose gradients suffer without a loss scale.
        failure: What the model's step raised, "" if nothing.
    """
    model, dtype, scale = found.model, found.dtype, found.loss_scale
    if found.verdict == "safe":
        first = (
            f" A loss scale of {scale:g} suits it: with a dynamic one that begins "
            f"at {FIRST_SCALE:g} the first steps are skipped."
        )
        return (
            f"Nothing of {model!r} is spoiled by {dtype}: its "
            f"gradients are off by {found.whole_error:.2g} times their size."
            + (first if 1 < scale < FIRST_SCALE else "")
        )
    if found.verdict == "loss scale" and scale == FIRST_SCALE:
        paths = ", ".join(map(repr, unscaled[:3]))
        return (
            f"It needs a loss scale, and tfamp's first one, {scale:g}, does: "
            f"without one the gradients of {paths} are spoiled. Under "
            "`tfamp.enable` it is there."
        )
    if found.verdict == "loss scale":
        return (
            f"Gradients fit {dtype} at a loss scale of {scale:g}, not at "
            f"{FIRST_SCALE:g}: pass `loss_scale_options={{'initial_scale': "
            f"{scale:g}}}` to `tfamp.enable`."
        )
    if found.verdict == "cannot run":
        return (
            f"The step of {model!r} raises in {dtype}: "
            f"{failure}. `tfamp.enable` keeps a layer in float32 whose "
            "`call` does; a `train_step` is to cast to the dtype of the outputs."
        )
    if found.verdict == "amplification":
        return (
            f"Each layer is fine alone, but the model as a whole turns rounding to "
            f"{dtype} into gradients that are off by {found.whole_error:.2g} times "
            "their size: keeping single layers does not help. Train it in float32, or "
            "normalize between its layers."
        )
    return how_to_keep(left) if left else _kept_already(found)


def _kept_already(found: Sensitivity) -> str:
    off = ", ".join(f"{what} by {e:.2g}" for what, e in found.errors_by_rules.items())
    rest = f" What is off then: {off}." if off else ""
    return f"`tfamp.enable` keeps them in float32 by its default rules.{rest}"
