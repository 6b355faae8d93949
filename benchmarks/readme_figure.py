"""README's figure: what a head tells the layers below it when it is wrong.

Measures d loss / d logit of a sigmoid and of a two-class softmax head, both written
the usual way (`Dense(..., activation=...)` and a loss on probabilities), over how far
the logit is off: in float32, under stock mixed_float16, and under tfamp.

Time: about half a minute on a CPU. The figures do not depend on the device.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp

POLICY = "mixed_float16"
SIDES = {
    "float32": {"color": "#333333", "linestyle": "-"},
    "mixed_float16, stock Keras": {"color": "#c0392b", "marker": "x", "linestyle": ":"},
    "mixed_float16, tfamp": {
        "color": "#1f77b4",
        "marker": "o",
        "linestyle": "",
        "mfc": "none",
    },
}
FLAGS = (("string", "output", "docs/head_gradient.png", "The picture."),)


def sigmoid_gradient(error: float) -> float:
    """Returns d loss / d logit where the label is 0 and the logit is `error`."""
    head = keras.layers.Dense(1, activation="sigmoid", kernel_initializer="ones")
    return _gradient(head, "binary_crossentropy", [[error]], [[0.0]], index=0)


def softmax_gradient(error: float) -> float:
    """Returns d loss / d wrong logit where it leads the right one by `error`."""
    head = keras.layers.Dense(2, activation="softmax", kernel_initializer="identity")
    loss = "sparse_categorical_crossentropy"
    return _gradient(head, loss, [[0.0, error]], [0], index=1)


def _gradient(
    head: keras.layers.Layer,
    loss: str,
    logits: list[list[float]],
    labels: list[list[float]] | list[int],
    *,
    index: int,
) -> float:
    model = keras.Sequential([keras.Input((len(logits[0]),)), head])
    model.compile(loss=loss)
    with tf.GradientTape() as tape:
        predictions = model(tf.constant(logits), training=True)
        value = model.compute_loss(y=tf.constant(labels), y_pred=predictions)
    return float(tape.gradient(value, head.bias)[index])


def gradients(
    gradient: Callable[[float], float], errors: Sequence[float]
) -> dict[str, list[float]]:
    """Returns the gradients over `errors` for each of `SIDES`."""
    exact = [gradient(error) for error in errors]
    keras.config.set_dtype_policy(POLICY)
    try:
        stock = [gradient(error) for error in errors]
    finally:
        keras.config.set_dtype_policy("float32")
    with warnings.catch_warnings():
        # float16 is slow on a CPU, which does not matter for a figure.
        warnings.simplefilter("ignore")
        with tfamp.scope(POLICY):
            ours = [gradient(error) for error in errors]
    return dict(zip(SIDES, (exact, stock, ours), strict=True))


def _json_number(value: float) -> float | str:
    # JSON has no inf and no NaN.
    return value if np.isfinite(value) else str(value)


def draw(
    results: dict[str, dict[str, list[float]]], errors: Sequence[float], output: str
) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(results), figsize=(9, 3.2), sharey=True, layout="constrained"
    )
    for axis, (head, measured) in zip(axes, results.items(), strict=True):
        for side, values in measured.items():
            style = {"markersize": 5, **SIDES[side]}
            axis.plot(errors, values, label=side, **style)
        lost = [
            e
            for e, v in zip(errors, measured[list(SIDES)[1]], strict=True)
            if not np.isfinite(v)
        ]
        if lost:
            axis.axvspan(lost[0] - 0.5, errors[-1], color="#c0392b", alpha=0.12, lw=0)
            axis.text(lost[0] - 0.3, 0.5, "inf or NaN in\nstock Keras", color="#c0392b")
        axis.set(title=f"{head} head", xlabel="the logit is wrong by")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("gradient of the loss")
    axes[0].legend(frameon=False, fontsize=8)
    if os.path.dirname(output):
        os.makedirs(os.path.dirname(output), exist_ok=True)
    figure.savefig(output, dpi=130, metadata={"Software": None})


def measure(settings: Any) -> dict[str, Any]:
    """Measures, draws, and returns the figures at 9 and 12."""
    errors = [0.0, 9.0, 12.0] if settings.smoke else list(np.arange(0.0, 15.5, 0.5))
    results = {
        "sigmoid": gradients(sigmoid_gradient, errors),
        "softmax": gradients(softmax_gradient, errors),
    }
    draw(results, errors, settings.output)
    print(settings.output)
    points = {
        f"{head}, wrong by {error:g}": {
            side: _json_number(values[errors.index(error)])
            for side, values in measured.items()
        }
        for head, measured in results.items()
        for error in (9.0, 12.0)
    }
    return {"gradients": points}
