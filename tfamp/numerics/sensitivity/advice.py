"""What to do about what `tfamp.sensitivity` found, in a sentence or two."""

import contextlib
from collections.abc import Iterator, Sequence

import keras

from tfamp.dtypes import heads, hooks, layer_dtypes, model_dtypes, resolution
from tfamp.dtypes.settings import make_settings
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layer_record import Kind, record_of
from tfamp.numerics.sensitivity.result import Sensitivity
from tfamp.stepping.layer_calls import how_to_keep
from tfamp.stepping.taps import Site

# tfamp's first loss scale.
FIRST_SCALE = 2.0**15


def given_dtypes(model: keras.Model) -> dict[int, keras.DTypePolicy]:
    """Returns the policies of layers that a user made with a `dtype`, by id."""
    return {
        id(layer): layer.dtype_policy
        for _, layer, _ in structure.walk(model)
        if (record := record_of(layer)) is not None and record.kind is Kind.EXPLICIT
    }


@contextlib.contextmanager
def under_default_rules(
    model: keras.Model, dtype: str, given: dict[int, keras.DTypePolicy]
) -> Iterator[None]:
    """Has a model that is not managed compute as tfamp has it by default.

    The model is built; `given` is what `given_dtypes` found before.
    """
    layers = [layer for _, layer, _ in structure.walk(model)]
    settings = make_settings(f"mixed_{dtype}")
    hooks.hold(settings)
    with model_dtypes.restored(model):
        for layer in layers:
            if id(layer) in given:
                layer_dtypes.set_policy(layer, given[id(layer)])
                layer_dtypes.begin(layer, settings, is_explicit=True)
            else:
                layer_dtypes.begin_again(layer, settings)
        for layer in layers:
            layer_dtypes.decide(layer)
        resolution.resolve(model)
        yield


def rules_of(model: keras.Model, sites: list[Site]) -> dict[str, str]:
    """Returns what keeps layers and operations in float32, by path.

    The model has been called inside `under_default_rules`.
    """
    graph = heads.graph_heads(model)
    # The operations of a graph between a head and an output.
    wide = {
        id(made[0])
        for tensor in (graph.tensors if graph is not None else ())
        if tensor.dtype == "float32"
        and (made := structure.producer(tensor)) is not None
        and not isinstance(made[0], keras.layers.Layer)
    }
    found = {}
    for site in sites:
        is_layer = isinstance(site.layer, keras.layers.Layer)
        record = record_of(site.layer) if is_layer else None
        is_float32 = record is not None and site.layer.compute_dtype == "float32"
        if record is not None and (record.is_kept or is_float32):
            is_given = record.kind is Kind.EXPLICIT
            found[site.path] = "its own dtype" if is_given else record.rule
        elif id(site.layer) in wide:
            found[site.path] = "default: heads"
    return found


def advice_on(
    found: Sensitivity, left: Sequence[Site], *, unscaled: Sequence[str], failure: str
) -> str:
    """Returns what to do about what was found, still without advice.

    `left` are the guilty layers that no default rule keeps, `unscaled` the paths whose
    gradients suffer without a loss scale, `failure` is what the step raised, "" if
    nothing.
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
    if left:
        return how_to_keep(left)
    off = ", ".join(f"{what} by {e:.2g}" for what, e in found.errors_by_rules.items())
    rest = f" What is off then: {off}." if off else ""
    return f"`tfamp.enable` keeps them in float32 by its default rules.{rest}"
