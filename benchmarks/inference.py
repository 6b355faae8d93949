"""How much smaller and faster exported models are, in every runtime, and how right.

Trains an MLP, a CNN, a transformer and an LSTM on the digits of scikit-learn, exports
each to every format, dtype and scheme whose packages are installed, and prints size,
accuracy, predictions that flip, and the speed at batch 1 and 64 over the signature of
a float32 SavedModel. Then outlier channels are planted in small models, the function
unchanged, and int8 exports of them counted that pass the gate, with the layers kept.

Time: about half an hour on two CPU cores. Use an idle machine. The sides live in one
process and take turns.
"""

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfamp
from benchmarks._turns import ratio, take_turns, timed
from tfamp.records.checks import short_error
from tfamp.serving.exports.choosing import missing
from tfamp.serving.exports.request import POSSIBLE
from tfamp.serving.parity.answers import classes_of
from tfamp.serving.parity.timings import rows

L = keras.layers
BASE = "saved_model float32"
SIZES = (1, 64)
DTYPES = ("float32", "int8")
# Times the SavedModel of the best int8, at batch 1 and 64.
GOALS = {
    "MLP": (18.0, 3.2),
    "CNN": (4.5, 2.3),
    "transformer": (5.5, 2.3),
    "LSTM": (18.0, 3.3),
}
OVER_FLOAT32 = (1.15, 1.1)
OUTLIER, MAX_KEPT, MAX_TRIED, MAX_SECONDS = 1000.0, 2, 3, 10.0
FLAGS = (
    ("integer", "turns", 9, "Turns of each side."),
    ("integer", "planted", 30, "Models with a planted outlier channel."),
)
_TURN_SECONDS = 0.2


@dataclasses.dataclass
class Digits:
    """Images of 8 by 8, flat: (examples, 64) in [0, 1]."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @classmethod
    def load(cls, number: int | None = None) -> "Digits":
        """Returns four fifths to train on and one to test."""
        from sklearn.datasets import load_digits

        found = load_digits()
        order = np.random.default_rng(0).permutation(len(found.target))[:number]
        x = (found.data[order] / 16.0).astype("float32")
        y = found.target[order].astype("int64")
        split = len(order) * 4 // 5
        return cls(x[:split], y[:split], x[split:], y[split:])


def mlp(width: int = 2048, depth: int = 3) -> keras.Model:
    """Dense layers on the flat image."""
    hidden = [L.Dense(width, activation="relu") for _ in range(depth)]
    return keras.Sequential([keras.Input((64,)), *hidden, L.Dense(10, "softmax")])


def cnn(width: int = 64) -> keras.Model:
    """Convolutions with batch normalization."""
    x = keras.Input((64,))
    y = L.Reshape((8, 8, 1))(x)
    for filters in (width, 2 * width, 4 * width):
        for _ in range(2):
            y = L.Conv2D(filters, 3, padding="same", use_bias=False)(y)
            y = L.ReLU()(L.BatchNormalization()(y))
    return keras.Model(x, L.Dense(10, "softmax")(L.GlobalAveragePooling2D()(y)))


def transformer(width: int = 256) -> keras.Model:
    """Three blocks over the rows of the image."""
    x = keras.Input((64,))
    y = L.Dense(width)(L.Reshape((8, 8))(x))
    for _ in range(3):
        h = L.LayerNormalization()(y)
        y = y + L.MultiHeadAttention(4, width // 4)(h, h)
        h = L.Dense(4 * width, activation="gelu")(L.LayerNormalization()(y))
        y = y + L.Dense(width)(h)
    y = L.GlobalAveragePooling1D()(L.LayerNormalization()(y))
    return keras.Model(x, L.Dense(10, "softmax")(y))


def lstm(width: int = 256) -> keras.Model:
    """Two recurrent layers over the rows of the image."""
    x = keras.Input((64,))
    y = L.LSTM(width, return_sequences=True)(L.Reshape((8, 8))(x))
    return keras.Model(x, L.Dense(10, "softmax")(L.LSTM(width)(y)))


CASES: Mapping[str, Callable[..., keras.Model]] = {
    "MLP": mlp,
    "CNN": cnn,
    "transformer": transformer,
    "LSTM": lstm,
}


def trained(model: keras.Model, data: Digits, epochs: int) -> keras.Model:
    """Trains a model in place, with labels as numbers."""
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(data.x, data.y, batch_size=64, epochs=epochs, verbose=0)
    return model


def candidates() -> list[tuple[str, str, str | None]]:
    """Returns format, dtype and scheme of all that can be written here."""
    return [
        (format, dtype, scheme or None)
        for format in POSSIBLE
        if not missing(format)
        for dtype in DTYPES
        for scheme in POSSIBLE[format].get(dtype, ())
    ]


def measure_case(
    case: str, data: Digits, turns: int, epochs: int, width: int | None
) -> dict[str, Any]:
    """Returns the figures of one model by candidate."""
    keras.utils.set_random_seed(0)
    model = trained(CASES[case](*([] if width is None else [width])), data, epochs)
    exact = classes_of(model.predict(data.x_test, verbose=0))
    found: dict[str, Any] = {}
    loaded: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        keras_bytes = _keras_bytes(model, Path(folder))
        for number, (format, dtype, scheme) in enumerate(candidates()):
            name = " ".join(filter(None, (format, dtype, scheme)))
            try:
                export = tfamp.export(
                    *(model, Path(folder, str(number))),
                    format=format,
                    dtype=dtype,
                    scheme=scheme,
                    calibration=data.x[:128] if scheme == "static" else None,
                )
                loaded[name] = export.load()
            except (ImportError, RuntimeError, ValueError) as error:
                found[name] = {"failed": short_error(error)}
                continue
            answers = classes_of(np.asarray(loaded[name].predict(data.x_test)))
            found[name] = {
                "size": round(export.size_bytes / keras_bytes, 3),
                "accuracy": round(float(np.mean(answers == data.y_test)), 4),
                "flipped": int(np.sum(answers != exact)),
            }
        for size in SIZES:
            seconds = _seconds(loaded, rows(data.x_test, size), turns)
            for name, taken in seconds.items():
                found[name][str(size)] = ratio(seconds[BASE], taken)
    accuracy = round(float(np.mean(exact == data.y_test)), 4)
    return {"accuracy": accuracy, "candidates": found, "best": _best(case, found)}


def _keras_bytes(model: keras.Model, folder: Path) -> int:
    plain = keras.models.clone_model(model)  # without the optimizer's state
    plain.set_weights(model.get_weights())
    plain.save(folder / "model.keras")
    return (folder / "model.keras").stat().st_size


def _seconds(loaded: Mapping[str, Any], batch: Any, turns: int) -> dict[str, Any]:
    """Returns the seconds of a call by candidate, of shape (turns,)."""

    def side(model: Any) -> Callable[[], Any]:
        def call() -> Any:
            return model.predict(batch)

        call()
        once, _ = timed(call, 3)
        repeats = max(1, round(_TURN_SECONDS / max(once, 1e-6) / len(loaded)))
        return lambda: timed(call, repeats)

    found = take_turns([side(model) for model in loaded.values()], turns)[..., 0]
    return {name: found[:, at] for at, name in enumerate(loaded)}


def _best(case: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fastest float32 and int8 by batch, and whether goals are met."""
    best = {}
    for at, size in enumerate(map(str, SIZES)):
        fastest = {}
        for dtype in DTYPES:
            own = {
                name: figures[size]["ratio"]
                for name, figures in found.items()
                if f" {dtype}" in name and size in figures
            }
            fastest[dtype] = max(own, key=lambda name: own[name]) if own else None
        if fastest["int8"] is None:
            continue
        over = {d: found[name][size]["ratio"] for d, name in fastest.items()}
        goal = GOALS[case][at]
        gain = over["int8"] / over["float32"]
        best[size] = {
            **fastest,
            "over_saved_model": over["int8"],
            "goal": goal,
            "over_float32": round(gain, 3),
            "goal_over_float32": OVER_FLOAT32[at],
            "met": over["int8"] >= goal and gain >= OVER_FLOAT32[at],
        }
    return best


def plant(model: keras.Model, random: np.random.Generator) -> tuple[str, int]:
    """Has a channel between two layers be `OUTLIER` times as large.

    Returns the layer that takes it, and the channel. The function stays the same: what
    is ahead is linear, or a ReLU.
    """
    makers = [
        (maker, taker)
        for maker, taker in zip(model.layers, model.layers[1:], strict=False)
        if isinstance(maker, L.Dense) and isinstance(taker, L.Dense)
    ] or [
        (model.layers[at], taker)
        for at, layer in enumerate(model.layers)
        if isinstance(layer, L.ReLU)
        for taker in model.layers[at + 1 : at + 2]
        if isinstance(taker, L.Conv2D)
        for at in [at - 1]  # the normalization ahead of the ReLU
    ]
    maker, taker = makers[random.integers(len(makers))]
    shared = [w for w in maker.weights if w.name in ("kernel", "bias", "gamma", "beta")]
    channel = int(random.integers(shared[0].shape[-1]))
    for weight in shared:
        value = np.array(weight)
        value[..., channel] *= OUTLIER
        weight.assign(value)
    value = np.array(taker.kernel)
    value[..., channel, :] /= OUTLIER
    taker.kernel.assign(value)
    return taker.name, channel


def measure_planted(number: int, data: Digits, epochs: int) -> list[dict[str, Any]]:
    """Returns what became of int8 exports of models with planted outliers."""
    format = "onnx" if not missing("onnx") else "litert"
    if missing(format):
        return []
    found = []
    for seed in range(number):
        keras.utils.set_random_seed(seed)
        random = np.random.default_rng(seed)
        case = ("MLP", "CNN")[seed % 2]
        model = mlp(64, depth=5) if case == "MLP" else cnn(8)
        trained(model, data, epochs)
        taker, _ = plant(model, random)
        # ONNX Runtime's dynamic way leaves convolutions in float32.
        scheme = "dynamic" if case == "MLP" and seed % 4 == 0 else "static"
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            export = tfamp.export(
                *(model, Path(folder, "model")),
                format=format,
                dtype="int8",
                scheme=scheme,
                calibration=data.x[:64],
                validation=(data.x, data.y),
                write_failed=True,
            )
            seconds = time.perf_counter() - began
        search = export.int8
        kept = [] if search is None else list(search.layers)
        found.append(
            {
                "case": f"{case} {scheme}",
                "planted": taker,
                "kept": kept,
                "found": taker in kept,
                "tried": 0 if search is None else len(search.evaluations),
                "search_seconds": 0.0 if search is None else round(search.seconds, 2),
                "seconds": round(seconds, 2),
                "passed": export.verdict != "worse",
                "verdict": export.verdict,
            }
        )
    return found


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    turns, number, epochs, width = settings.turns, settings.planted, 20, None
    data, cases = Digits.load(), list(CASES)
    if settings.smoke:
        turns, number, epochs, width = 2, 1, 1, 8
        data, cases = Digits.load(150), ["MLP"]
    return {
        "turns": turns,
        "cases": {
            case: measure_case(case, data, turns, epochs, width) for case in cases
        },
        "planted": planted_figures(measure_planted(number, data, epochs)),
    }


def planted_figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how many planted models passed within all limits, and each of them."""
    within = [
        run["passed"]
        and len(run["kept"]) <= MAX_KEPT
        and run["tried"] <= MAX_TRIED
        and run["search_seconds"] <= MAX_SECONDS
        for run in runs
    ]
    return {"runs": runs, "passed": sum(within), "number": len(runs), "required": 0.95}
