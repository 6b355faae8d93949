"""README's figure: what a head tells the layers below it when it is wrong.

Measures d loss / d logit of a sigmoid and of a two-class softmax head, both written
the usual way (`Dense(..., activation=...)` and a loss on probabilities), over how far
the logit is off: in float32, under stock mixed_float16, and under tfamp.

Time: about half a minute on a CPU. The figures do not depend on the device.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
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
        **{"color": "#1f77b4", "marker": "o", "linestyle": "", "mfc": "none"}
    },
}
FLAGS = (("string", "output", "docs/head_gradient.png", "The picture."),)


# Units, kernel and loss of a head, the logits but the wrong one, and the label.
HEADS: dict[str, tuple[int, str, str, list[float], Any]] = {
    "sigmoid": (1, "ones", "binary_crossentropy", [], [0.0]),
    "softmax": (2, "identity", "sparse_categorical_crossentropy", [0.0], 0),
}


def gradient(name: str, error: float) -> float:
    """Returns d loss / d wrong logit, which is off by `error`."""
    units, kernel, loss, others, label = HEADS[name]
    head = keras.layers.Dense(units, activation=name, kernel_initializer=kernel)
    model = keras.Sequential([keras.Input((units,)), head])
    model.compile(loss=loss)
    with tf.GradientTape() as tape:
        predictions = model(tf.constant([[*others, error]]), training=True)
        value = model.compute_loss(y=tf.constant([label]), y_pred=predictions)
    return float(tape.gradient(value, head.bias)[-1])


def gradients(name: str, errors: Sequence[float]) -> dict[str, list[float]]:
    """Returns the gradients over `errors` for each of `SIDES`."""
    exact = [gradient(name, error) for error in errors]
    keras.config.set_dtype_policy(POLICY)
    try:
        stock = [gradient(name, error) for error in errors]
    finally:
        keras.config.set_dtype_policy("float32")
    with warnings.catch_warnings():
        # float16 is slow on a CPU, which does not matter for a figure.
        warnings.simplefilter("ignore")
        with tfamp.scope(POLICY):
            ours = [gradient(name, error) for error in errors]
    return dict(zip(SIDES, (exact, stock, ours), strict=True))


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
        lost = np.array(errors)[~np.isfinite(measured[list(SIDES)[1]])]
        if lost.size:
            axis.axvspan(lost[0] - 0.5, errors[-1], color="#c0392b", alpha=0.12, lw=0)
            axis.text(lost[0] - 0.3, 0.5, "inf or NaN in\nstock Keras", color="#c0392b")
        axis.set(title=f"{head} head", xlabel="the logit is wrong by")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("gradient of the loss")
    axes[0].legend(frameon=False, fontsize=8)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130, metadata={"Software": None})


def measure(settings: Any) -> dict[str, Any]:
    """Measures, draws, and returns the figures at 9 and 12."""
    errors = [0.0, 9.0, 12.0] if settings.smoke else list(np.arange(0.0, 15.5, 0.5))
    results = {name: gradients(name, errors) for name in HEADS}
    draw(results, errors, settings.output)
    print(settings.output)
    points: dict[str, dict[str, float | str]] = {}
    for head, measured in results.items():
        for error in (9.0, 12.0):
            found = {side: v[errors.index(error)] for side, v in measured.items()}
            # JSON has no inf and no NaN.
            points[f"{head}, wrong by {error:g}"] = {
                side: value if np.isfinite(value) else str(value)
                for side, value in found.items()
            }
    return {"gradients": points}
