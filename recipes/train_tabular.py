"""Trains a small network on tables with missing values and outliers, in two ways.

Once as `tfamp.data` treats such data: statistics of the damaged training part become
the model's first layer, which fills, clips and scales, so a served model treats raw
rows as training did. Once naively: NaN becomes 0, nothing is clipped.
Data: scikit-learn's 569 biopsies (30 numbers each, malignant or not) or 442 diabetes
patients (10 numbers, the disease a year later), a third for validation, damaged by
flags; no network needed.
Command: python recipes/train_tabular.py
         python recipes/train_tabular.py --dataset=diabetes --policy=auto,float32
         python recipes/train_tabular.py --impute=knn --missing=0.2 --outliers=0.05
         python recipes/train_tabular.py --compare=5    (is it as good, and faster?)
Time: about 15 s on 2 CPU cores in float32 and mixed_bfloat16, 4 s of it training.
Expect: on damaged rows an accuracy of 0.94 to 0.96, naively 0.76 to 0.80; diabetes
R2 of 0.32 to 0.36, naively 0.0. With --missing=0 --outliers=0 both ways are alike.
"""

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
from absl import flags  # noqa: E402

import fitting_in_memory  # noqa: E402  (TensorFlow reads its log level on import)
import guarding  # noqa: E402
import injecting  # noqa: E402
import reporting  # noqa: E402
import tfamp  # noqa: E402
from progress import TrainingProgress  # noqa: E402

TITLE = "Accuracy (breast_cancer) or R2 (diabetes) on clean and damaged rows"
COLUMNS = {
    "score_clean": ("clean", ".3f"),
    "score_damaged": ("damaged", ".3f"),
    "naive_clean": ("naive: clean", ".3f"),
    "naive_damaged": ("damaged", ".3f"),
    "num_train": ("rows", ",d"),
    "seconds": ("seconds", ".1f"),
}
# What the model's first layer fills in where the pipeline fills or drops: a served
# model meets missing values too.
FILLS = {"drop": "median", "knn": "median"}
# Limits beyond which values are set to the limit.
CLIPS = {"iqr": ("iqr", 3.0), "quantile": ("quantile", 0.05, 0.95), "none": None}
WAYS = ("treated", "naive")


@dataclasses.dataclass(frozen=True)
class Table:
    """A split table.

    Attributes:
        train: Inputs `(rows, columns)`, float32, and targets `(rows,)`.
        validation: Likewise.
        is_classes: Whether targets are 0 and 1; else they are numbers.
    """

    train: tuple[np.ndarray, np.ndarray]
    validation: tuple[np.ndarray, np.ndarray]
    is_classes: bool


def define_flags() -> flags.FlagValues:
    """Returns the recipe's flags with their defaults."""
    values = flags.FlagValues()
    reporting.define_common_flags(values)
    injecting.define_flags(values)
    guarding.define_flags(values)
    fitting_in_memory.define_flags(values)
    flags.DEFINE_enum(
        "dataset",
        "breast_cancer",
        ["breast_cancer", "diabetes"],
        "Two classes, or a number to predict.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "missing", 0.1, "Share of values set to NaN.", 0, 1, flag_values=values
    )
    flags.DEFINE_float(
        "outliers", 0.02, "Share of values in a wrong unit.", 0, 1, flag_values=values
    )
    flags.DEFINE_enum(
        "impute",
        "median",
        ["mean", "median", "mode", "drop", "knn"],
        "mean, median and mode fill in the model; drop leaves rows out of training, "
        "and knn fills them beforehand, while the model fills with the median.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "clip", "iqr", sorted(CLIPS), "What counts as outlier.", flag_values=values
    )
    flags.DEFINE_integer("epochs", 40, "Passes over the data.", flag_values=values)
    flags.DEFINE_integer("batch_size", 32, "Rows in a batch.", flag_values=values)
    flags.DEFINE_float("learning_rate", 2e-3, "Of Adam.", flag_values=values)
    return values


def damage(
    rows: np.ndarray, missing: float, outliers: float, rng: np.random.Generator
) -> np.ndarray:
    """Returns rows of which some values are 100 times too large, and some NaN.

    A hundredfold is what metres taken for centimetres make.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> damage(np.ones((1, 3)), missing=0.0, outliers=1.0, rng=rng)
        array([[100., 100., 100.]])
    """
    rows = rows.copy()
    rows[rng.random(rows.shape) < outliers] *= 100
    rows[rng.random(rows.shape) < missing] = np.nan
    return rows


def load_damaged(settings: Any) -> tuple[Table, Table]:
    """Returns the table as it is, and damaged as the flags say."""
    table = load(settings)
    rng = np.random.default_rng(settings.seed)
    damaged = (
        (damage(x, settings.missing, settings.outliers, rng), y)
        for x, y in (table.train, table.validation)
    )
    return table, Table(*damaged, table.is_classes)


def load(settings: Any) -> Table:
    """Returns the table, undamaged; numbers to predict get mean 0 and deviation 1."""
    is_classes = settings.smoke or settings.dataset == "breast_cancer"
    if settings.smoke:
        rng = np.random.default_rng(settings.seed)
        x = rng.normal(5.0, 1.0, (3 * settings.batch_size, 4)).astype(np.float32)
        y = (x[:, 0] > 5.0).astype(np.float32)
        half = 2 * settings.batch_size
        return Table((x[:half], y[:half]), (x[half:], y[half:]), is_classes)
    from sklearn import datasets, model_selection

    if is_classes:
        x, y = datasets.load_breast_cancer(return_X_y=True)
    else:
        x, y = datasets.load_diabetes(return_X_y=True, scaled=False)
    x_train, x_validation, y_train, y_validation = model_selection.train_test_split(
        x.astype(np.float32),
        y.astype(np.float32),
        test_size=1 / 3,
        stratify=y if is_classes else None,
        random_state=settings.seed,
    )
    if not is_classes:
        mean, deviation = y_train.mean(), y_train.std()
        y_train = (y_train - mean) / deviation
        y_validation = (y_validation - mean) / deviation
    return Table((x_train, y_train), (x_validation, y_validation), is_classes)


def batches(
    rows: tuple[np.ndarray, np.ndarray],
    impute: str,
    statistics: Any,
    settings: Any,
) -> Any:
    """Returns training batches, rows dropped or filled as `--impute` says."""
    pipeline = tfamp.data.Pipeline.from_arrays(*rows)
    if impute == "drop":
        pipeline = pipeline.filter(missing="drop")
    elif impute == "knn":
        from sklearn.impute import KNNImputer

        # Outliers first: a neighbour is near in all values, or it is none.
        if settings.clip != "none":
            pipeline = pipeline.filter(
                outliers=CLIPS[settings.clip],
                outlier_action="clip",
                statistics=statistics,
            )
        clipped = [row for row, _ in pipeline.build().as_numpy_iterator()]
        filled = KNNImputer().fit_transform(np.stack(clipped))
        pipeline = tfamp.data.Pipeline.from_arrays(filled, rows[1])
    pipeline = pipeline.cache("memory").shuffle(seed=settings.seed)
    return pipeline.batch(settings.batch_size).prefetch().build()


def build_model(
    first: keras.layers.Layer,
    num_columns: int,
    table: Table,
    learning_rate: float,
    inject: str | None = None,
    accumulation_steps: int = 1,
) -> keras.Model:
    """Returns the compiled network, which begins with the layer that treats rows."""
    rows = keras.Input((num_columns,), dtype="float32")
    x = first(rows)
    for width in (64, 32):
        x = keras.layers.Dense(width, activation="relu")(x)
        x = keras.layers.Dropout(0.3)(x)
    x = injecting.layer(inject, x)
    model = keras.Model(rows, keras.layers.Dense(1)(x))
    if table.is_classes:
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        metric = keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)
    else:
        loss, metric = "mse", keras.metrics.R2Score(name="R2")
    optimizer = fitting_in_memory.accumulating(
        keras.optimizers.Adam(learning_rate), accumulation_steps
    )
    model.compile(optimizer, loss, metrics=[metric])
    return model


def score(model: keras.Model, table: Table) -> float:
    """Returns the share of right classes, or of the targets' variance explained."""
    rows, targets = table.validation
    found = model.predict(rows, verbose=0)[:, 0].astype(np.float64)
    if table.is_classes:
        return float(np.mean((found > 0) == (targets > 0.5)))
    return float(1 - np.mean((found - targets) ** 2) / np.var(targets))


def survives_saving(model: keras.Model, rows: np.ndarray) -> bool:
    """Whether the model, saved and loaded, predicts the same bits on raw rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        loaded = tfamp.load_model(path)
    before, after = (one.predict(rows, verbose=0) for one in (model, loaded))
    return before.tobytes() == after.tobytes()


def make(way: str, damaged: Table, settings: Any) -> tuple[keras.Model, Any]:
    """Returns the compiled model and the training batches of one of the `WAYS`."""
    statistics = tfamp.data.fit_statistics(damaged.train)
    if way == "treated":
        impute = settings.impute
        fill = FILLS.get(impute, impute)
        first = statistics.as_layer(missing=fill, clip=CLIPS[settings.clip])
    else:
        impute = "in the model"
        first = statistics.as_layer(missing=0.0, clip=None)
    # It decides the order of the batches too, beside the seed of their shuffle.
    keras.utils.set_random_seed(settings.seed)
    data = batches(damaged.train, impute, statistics, settings)
    num_columns = damaged.train[0].shape[1]
    rate = injecting.learning_rate(settings)
    model = build_model(
        first,
        num_columns,
        damaged,
        rate,
        settings.inject,
        settings.accumulation_steps,
    )
    model.jit_compile = settings.jit_compile
    return model, injecting.batches(settings.inject, data)


def build(
    settings: Any = None, *, seed: int | None = None, epochs: int | None = None
) -> tuple[keras.Model, Any, Any]:
    """Returns the model that treats damage, and damaged data, for `tfamp.compare`.

    Args:
        settings: Values of the flags; None takes their defaults.
        seed: Instead of that of the settings; it decides split, damage and weights.
        epochs: Likewise, but for this model they change nothing.
    """
    settings = reporting.resolve(define_flags, settings, seed=seed, epochs=epochs)
    _, damaged = load_damaged(settings)
    model, data = make("treated", damaged, settings)
    validation = tfamp.data.Pipeline.from_arrays(*damaged.validation).batch(256)
    return model, data, validation.prefetch().build()


def train(flag_values: flags.FlagValues) -> dict[str, Any]:
    """Trains twice under one policy and returns what came of it."""
    settings = reporting.resolve(define_flags, flag_values)
    status = reporting.enable(settings)
    injecting.announce(settings)
    settings, memory = fitting_in_memory.fitted(settings, build)
    table, damaged = load_damaged(settings)
    findings = tfamp.data.check(
        damaged.train, damaged.validation, compute_dtype=status.policy
    )
    print(findings)
    results: dict[str, Any] = {}
    models, seconds = {}, 0.0
    for way in WAYS:
        model, data = make(way, damaged, settings)
        sizes = [len(targets) for _, targets, *_ in data]
        progress = TrainingProgress(f"{way} {status.policy}")
        started = time.perf_counter()
        guard = guarding.Guard(settings, way)
        model.fit(
            data,
            epochs=settings.epochs,
            shuffle=False,
            verbose=0,
            callbacks=[*guard.callbacks, progress],
        )
        seconds += time.perf_counter() - started
        key = "score" if way == "treated" else way
        for name, rows in {"clean": table, "damaged": damaged}.items():
            results[f"{key}_{name}"] = round(score(model, rows), 4)
        if way == "treated":
            results |= guard.report()
            results["num_train"] = sum(sizes)
            results |= reporting.speed(progress.epoch_seconds, sum(sizes), len(sizes))
        models[way] = model
    model = models["treated"]
    loss, _ = model.evaluate(*damaged.validation, verbose=0)
    return {
        "recipe": "train_tabular",
        "asked": settings.policy[0],
        "policy": status.policy,
        "reason": status.reason,
        "metric": "accuracy" if table.is_classes else "R2",
        **results,
        "loss": round(loss, 4),
        "findings": [finding.rule for finding in findings],
        "same_bits_after_loading": survives_saving(model, damaged.validation[0]),
        "seconds": round(seconds, 2),
        **memory,
        "finite": reporting.is_finite(
            model, loss, results["score_clean"], results["score_damaged"]
        ),
        "versions": reporting.versions(),
    }


def main(argv: Sequence[str]) -> int:
    """Trains once, or once for each policy, and prints the result."""
    return reporting.run_recipe(TITLE, define_flags(), argv, train, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
