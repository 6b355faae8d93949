"""How often reports of `tfamp.compare` tell a policy from itself.

Small models are trained by `compare` itself under float32 with the default rules and
without them, which keep nothing in float32 where all is float32 already: both train the
same model in the same way, and what a report calls better or worse is false.

Time: about a minute for each report on two CPU cores.
"""

import collections
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfamp
from tfamp.comparison.evidence import Evidence
from tfamp.comparison.report.rows import rows

POLICIES = ("float32", "float32+no_rules")
SEEDS = 3
MOST_FALSE, FEWEST = 0.05, 40
FLAGS = (
    ("integer", "reports", 40, "How many."),
    ("string", "folder", "", "Folder to keep them in, and go on with."),
    ("integer", "epochs", 8, "Of each run."),
)
Arrays = tuple[np.ndarray, np.ndarray]


def dense() -> Any:
    """Returns a compiled classifier of 32 numbers."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((32,)),
            layers.Dense(128, activation="relu"),
            layers.LayerNormalization(),
            layers.Dropout(0.2),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def convolution() -> Any:
    """Returns a compiled classifier of images of 8x8 pixels."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(16, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def regression() -> Any:
    """Returns a compiled regression, which has no metric but its loss."""
    layers = keras.layers
    hidden = [layers.Dense(64, activation="tanh") for _ in range(2)]
    model = keras.Sequential([keras.Input((16,)), *hidden, layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def vectors(rng: np.random.Generator, count: int) -> Arrays:
    """Returns noise, and which of ten directions it points to most."""
    x = rng.normal(size=(count, 32)).astype("float32")
    directions = np.random.default_rng(1).normal(size=(32, 10))
    return x, np.argmax(x @ directions, axis=1)


def images(rng: np.random.Generator, count: int) -> Arrays:
    """Returns noise with brighter rows, in every row or every second to fourth one."""
    x = rng.normal(size=(count, 8, 8, 1)).astype("float32")
    y = rng.integers(4, size=count)
    for index, each in enumerate(y):
        x[index, :: each + 1] += 1.0
    return x, y


def smooth(rng: np.random.Generator, count: int) -> Arrays:
    """Returns numbers, and a smooth function of them with noise."""
    x = rng.normal(size=(count, 16)).astype("float32")
    y = np.sin(x[:, :4]).sum(axis=1) + 0.1 * rng.normal(size=count)
    return x, y[:, None].astype("float32")


KINDS: dict[str, tuple[Callable[[], Any], Callable[..., Arrays]]] = {
    "dense": (dense, vectors),
    "convolution": (convolution, images),
    "regression": (regression, smooth),
}


def reports(
    number: int, folder: Path, *, seeds: int = SEEDS, epochs: int = 8
) -> Iterator[tuple[str, tfamp.Comparison]]:
    """Yields the kind of model and the report of each comparison, kinds in turns.

    Args:
        number: How many.
        folder: Where the reports are kept, as JSON; those it has are not made again.
        seeds: Of each report; no two reports share one.
        epochs: Of each run.
    """
    for index in range(number):
        kind = list(KINDS)[index % len(KINDS)]
        path = folder / f"{index:03}_{kind}.json"
        if path.is_file():
            yield kind, tfamp.Comparison.from_json(path)
            continue
        build_model, make = KINDS[kind]
        rng = np.random.default_rng(index)
        found = tfamp.compare(
            f"{__name__}:{build_model.__name__}",
            make(rng, 4096),
            make(rng, 512),
            policies=POLICIES,
            seeds=range(index * seeds, (index + 1) * seeds),
            epochs=epochs,
            title=kind,
        )
        found.to_json(path)
        yield kind, found


def effects_of(found: Evidence) -> dict[str, str]:
    """Returns what a report says of each measure that it judges."""
    return {
        row.name or "metric": cell.effect
        for row in rows(found)
        for cell in row.cells
        if cell.effect
    }


def judge(number: int, folder: Path, epochs: int = 8) -> dict[str, Any]:
    """Returns how many reports tell equal policies apart, and prints each report.

    Args:
        number: Of reports.
        folder: Where they are kept.
        epochs: Of each run.
    """
    told: list[dict[str, Any]] = []
    answers: collections.Counter[str] = collections.Counter()
    counts: dict[str, collections.Counter[str]] = {}
    for index, (kind, found) in enumerate(reports(number, folder, epochs=epochs)):
        effects = effects_of(found)
        for name, effect in effects.items():
            counts.setdefault(name, collections.Counter())[effect] += 1
        apart = {name: e for name, e in effects.items() if e in ("better", "worse")}
        if apart:
            told.append({"report": index, "kind": kind, "measures": apart})
        answers[found.verdict] += 1
        print(f"report {index}, {kind}: {found.verdict}; told apart: {apart}")
    return {
        "seeds": SEEDS,
        "reports": number,
        "kinds": list(KINDS),
        "policies": list(POLICIES),
        "told_apart": told,
        "rate": len(told) / number,
        "answers": dict(answers),
        "measures": {name: dict(effects) for name, effects in counts.items()},
        "met": number >= FEWEST and len(told) <= MOST_FALSE * number,
    }


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    number, epochs = settings.reports, settings.epochs
    if settings.smoke:
        number, epochs = 1, 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(settings.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return judge(number, folder, epochs)
