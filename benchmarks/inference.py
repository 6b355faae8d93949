"""How much smaller and faster exported models are, in every runtime, and how right.

Trains an MLP, a CNN, a transformer and an LSTM on the digits of scikit-learn, exports
each to every format, dtype and scheme whose packages are installed, and prints size,
accuracy, predictions that flip, and the speed at batch 1 and 64 over the signature of
a float32 SavedModel; so does what TensorFlow alone can do. `auto` then chooses among
the candidates. A trained ResNet50 and a random BERT are exported to int8 and asked
whether they answer the same. Then outlier channels are planted in small models, and
int8 exports of them counted that pass the gate.

Time: about twenty minutes on two CPU cores. Use an idle machine. The sides live in one
process and take turns.
"""

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp
from benchmarks import _inference_models as models
from benchmarks._inference_models import CASES, LARGE, Digits, mlp, trained
from benchmarks._runner import ratio, take_turns, timed
from tfamp.records.checks import short_error
from tfamp.serving.exports.exporter import median, raced
from tfamp.serving.exports.tracing import float32_copy
from tfamp.serving.exports.writers import POSSIBLE, missing
from tfamp.serving.gate import classes_of
from tfamp.serving.runtimes.signature import LoadedModel

BASE = "SavedModel"
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
AGREEMENT, NUM_LARGE, LARGE_EPOCHS, RACE = 0.99, 200, 8, 5.0
# A choice is right within 5 % of the fastest, and so many of them have to be.
NEAR, PART = 1 / 1.05, 0.95
MAX_KEPT, MAX_SECONDS = 2, 10.0
FLAGS = (
    ("integer", "turns", 9, "Turns of each side."),
    ("integer", "planted", 30, "Models with a planted outlier channel."),
    ("list", "models", [*CASES], 'Those to export, "" for none.'),
    ("list", "large", [*LARGE], 'Large ones, to compare predictions; "" for none.'),
    ("integer", "tries", 5, "Choices of `auto` for each model."),
)
_TURN_SECONDS = 0.2


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
    case: str, data: Digits, settings: Any, epochs: int, width: int | None
) -> dict[str, Any]:
    """Returns the figures of one model by candidate."""
    keras.utils.set_random_seed(0)
    model = trained(CASES[case](*([] if width is None else [width])), data, epochs)
    exact = classes_of(model.predict(data.x_test, verbose=0))
    found: dict[str, Any] = {}
    stock_figures: dict[str, Any] = {}
    loaded: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        keras_bytes = _keras_bytes(model, Path(folder))
        for number, (format, dtype, scheme) in enumerate(candidates()):
            name = " ".join(filter(None, (format, dtype, scheme)))
            try:
                how = {"format": format, "dtype": dtype, "scheme": scheme}
                how["calibration"] = data.x[:128] if scheme == "static" else None
                export = tfamp.export(model, Path(folder, str(number)), **how)
                loaded[name] = export.load()
            except (ImportError, RuntimeError, ValueError) as error:
                found[name] = {"failed": short_error(error)}
                continue
            answers = classes_of(np.asarray(loaded[name].predict(data.x_test)))
            found[name] = {
                "size": round(export.size_bytes / keras_bytes, 3),
                "accuracy": round(float(np.mean(answers == data.y_test)), 4),
                "flipped": int(np.sum(answers != exact)),
                "over_weights": round(export.size_bytes / export.float32_bytes, 3),
            }
        stock = {
            BASE: _plain(loaded["saved_model float32"]),
            "predict": _Predict(model),
            "frozen": tfamp.load_exported(tfamp.freeze(model)),
            "loaded": tfamp.load_exported(model),
        }
        for size in SIZES:
            batch = np.resize(data.x_test, (size, *data.x_test.shape[1:]))
            seconds = _seconds(loaded | stock, batch, settings.turns)
            for name, taken in seconds.items():
                own = found if name in found else stock_figures
                own.setdefault(name, {})[str(size)] = ratio(seconds[BASE], taken)
        tries = _tries(found, loaded, data, settings.tries)
    return {
        "accuracy": round(float(np.mean(exact == data.y_test)), 4),
        **{"candidates": found, "stock": stock_figures},
        **{"best": _best(case, found), "tries": tries},
    }


class _Predict:
    """A Keras model by its own `predict`."""

    def __init__(self, model: keras.Model) -> None:
        self.predict = functools.partial(model.predict, verbose=0)


def _plain(model: LoadedModel) -> LoadedModel:
    """Returns a SavedModel by its signature, as TensorFlow loads it."""
    holder = tf.saved_model.load(str(model.path))
    function = holder.signatures["serving_default"]

    def call(given: Mapping[str, Any], owner: Any = holder) -> dict[str, Any]:
        found = function(**{name: tf.constant(x) for name, x in given.items()})
        return {name: x.numpy() for name, x in found.items()}

    return LoadedModel("keras", model.path, model.signature, call)


def _tries(
    found: Mapping[str, Any], loaded: Mapping[str, Any], data: Digits, number: int
) -> list[dict[str, Any]]:
    """Returns what races as those of `format="auto"` choose, and how near it is.

    Each choice is compared with the fastest by the turns of this benchmark, as the
    geometric mean over batch sizes.
    """

    def speed(name: str) -> float:
        return float(np.sqrt(np.prod([found[name][str(n)]["ratio"] for n in SIZES])))

    fastest = max(loaded, key=speed)
    tries = []
    for _ in range(number):
        inputs = loaded[fastest].prepared(data.x_test[:5])
        turns = raced(loaded, inputs, SIZES, seconds=RACE)
        paces = {n: [median(turns[n, size]) for size in SIZES] for n in loaded}
        chosen = min(loaded, key=lambda name: float(np.prod(paces[name])))
        part = round(speed(chosen) / speed(fastest), 3)
        tries.append({"chosen": chosen, "fastest": fastest, "speed": part})
    return tries


def measure_large(case: str, number: int, data: Digits) -> dict[str, Any]:
    """Returns how many answers of a large model stay the same in int8.

    ResNet50 is trained, calibrated and static; BERT has random weights and is dynamic.
    """
    keras.utils.set_random_seed(0)
    model = LARGE[case]()
    is_trained = case == "ResNet50"
    if is_trained:
        x, calibration = (models.images(x) for x in (data.x_test[:number], data.x[:64]))
        colored = dataclasses.replace(data, x=models.images(data.x))
        model = trained(model, colored, LARGE_EPOCHS)
    else:
        shape = (number + 32, *model.input_shape[1:])
        inputs = np.random.default_rng(0).integers(0, 30522, shape).astype("int32")
        model = models.centered(model, inputs[number:])
        x, calibration = inputs[:number], inputs[number:]
    exact = classes_of(model.predict(x, batch_size=16, verbose=0))
    format, scheme = ("onnx", "static" if is_trained else "dynamic")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        keras_bytes = _keras_bytes(model, Path(folder))
        how = {"format": format, "dtype": "int8", "scheme": scheme}
        how["calibration"] = calibration
        export = tfamp.export(model, Path(folder, "model"), **how)
        seconds = time.perf_counter() - began
        loaded = export.load()
        answers = np.concatenate(
            [classes_of(loaded.predict(x[at : at + 16])) for at in range(0, number, 16)]
        )
    return {
        **{"exported": f"{format} int8 {scheme}", "number": number},
        "weights": "trained on digits" if is_trained else "random weights",
        "agree": round(float(np.mean(answers == exact)), 4),
        "answers": len({*exact.tolist()}),
        "size": round(export.size_bytes / keras_bytes, 3),
        "export_seconds": round(seconds, 1),
        "required": AGREEMENT,
    }


def _keras_bytes(model: keras.Model, folder: Path) -> int:
    plain = float32_copy(model)  # without the optimizer's state
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
        model = mlp(64, depth=5) if case == "MLP" else models.cnn(8)
        trained(model, data, epochs)
        taker, _ = models.plant(model, random)
        # ONNX Runtime's dynamic way leaves convolutions in float32.
        scheme = "dynamic" if case == "MLP" and seed % 4 == 0 else "static"
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            how = {"format": format, "dtype": "int8", "scheme": scheme}
            how |= {"calibration": data.x[:64], "validation": (data.x, data.y)}
            how |= {"write_failed": True, "budget_seconds": 1.0}
            export = tfamp.export(model, Path(folder, "model"), **how)
            seconds = time.perf_counter() - began
        kept = [path for path, why in export.kept.items() if "head" not in why]
        told = {"case": f"{case} {scheme}", "planted": taker, "kept": kept}
        told |= {"found": taker in kept, "seconds": round(seconds, 2)}
        is_passed = export.verdict != "worse"
        found.append(told | {"passed": is_passed, "verdict": export.verdict})
    return found


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    number, epochs, width = settings.planted, 20, None
    data, cases, large = Digits.load(), settings.models, settings.large
    if settings.smoke:
        settings.turns, settings.tries, number, epochs, width = 2, 1, 1, 1, 8
        data, cases, large = Digits.load(150), ["MLP"], []
    found = {
        case: measure_case(case, data, settings, epochs, width)
        for case in filter(None, cases)
    }
    tries = [each for case in found.values() for each in case["tries"]]
    near = sum(each["speed"] >= NEAR for each in tries)
    large = {case: measure_large(case, NUM_LARGE, data) for case in filter(None, large)}
    return {
        **{"turns": settings.turns, "cases": found, "large": large},
        "auto": {"number": len(tries), "near": near, "required": PART},
        "planted": planted_figures(measure_planted(number, data, epochs)),
    }


def planted_figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how many planted models passed within all limits, and each of them."""
    within = [
        run["passed"] and len(run["kept"]) <= MAX_KEPT and run["seconds"] <= MAX_SECONDS
        for run in runs
    ]
    return {"runs": runs, "passed": sum(within), "number": len(runs), "required": PART}
