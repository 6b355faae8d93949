"""Finds what a network with a layer that overflows has to compute in, and trains so.

Data: scikit-learn's 1,797 digits (8x8, uint8), a fifth for test; no network needed.
Command: python recipes/tune_precision.py         (measures what is fastest here first)
         python recipes/tune_precision.py --policy=mixed_float16 --plan=plan.json
         python recipes/tune_precision.py --policy=plan.json,float32 --compare=5
Time: about 30 s on 2 CPU cores. In float16 a CPU is slow: the plan is for a GPU then.
Expect: test accuracy of 0.97, at least 0.95. In float16 the layer 'overflow' is found
and kept in float32; in bfloat16, which has float32's range, nothing has to be.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
from absl import flags  # noqa: E402

import datasets  # noqa: E402  (TensorFlow reads its log level when it is imported)
import injecting  # noqa: E402
import reporting  # noqa: E402
import tfamp  # noqa: E402
from progress import TrainingProgress  # noqa: E402

TITLE = "Tuned precision"
COLUMNS = {
    "accuracy": ("accuracy", ".4f"),
    "float32_accuracy": ("float32", ".4f"),
    "num_kept": ("kept", "d"),
    "evaluations": ("plans", "d"),
    "seconds": ("seconds", ".1f"),
}


def define_flags() -> flags.FlagValues:
    """Returns the recipe's flags with their defaults."""
    values = flags.FlagValues()
    reporting.define_common_flags(values)
    flags.DEFINE_integer("epochs", 15, "Passes over the data.", flag_values=values)
    flags.DEFINE_integer("batch_size", 64, "Images in a batch.", flag_values=values)
    flags.DEFINE_float("learning_rate", 2e-3, "Of Adam.", flag_values=values)
    flags.DEFINE_float(
        "tolerance", 0.02, "Part by which the loss may grow.", flag_values=values
    )
    flags.DEFINE_string(
        "plan", None, "File that gets the plan, for later runs.", flag_values=values
    )
    return values


def build_model(learning_rate: float = 2e-3) -> keras.Model:
    """Returns the compiled network; one of its layers goes beyond 65504 on its way."""
    images = keras.Input((8, 8, 1), dtype="uint8")
    x = keras.layers.Rescaling(1 / 255)(images)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(128, activation="relu", name="before")(x)
    x = injecting.layer("overflow_layer", x)
    x = keras.layers.Dense(128, activation="relu", name="behind")(x)
    outputs = keras.layers.Dense(10, activation="softmax")(x)
    model = keras.Model(images, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def load(settings: Any) -> tuple[Any, Any]:
    """Returns the training and test pipelines."""
    if settings.smoke:
        rng = np.random.default_rng(settings.seed)
        images = rng.integers(0, 256, (2 * settings.batch_size, 8, 8, 1), np.uint8)
        labels = rng.integers(0, 10, len(images))
        arrays = tfamp.data.Pipeline.from_arrays(images, labels)
        return arrays, arrays
    builder = datasets.find("digits")
    return tuple(
        tfamp.data.Pipeline.from_tfds(builder, split) for split in ("train", "test")
    )


def build(
    settings: Any = None, *, seed: int | None = None, epochs: int | None = None
) -> tuple[keras.Model, Any, Any]:
    """Returns the compiled model, training and test data, as `tfamp tune` asks.

    Args:
        settings: Values of the flags; None takes their defaults.
        seed: Instead of that of the settings; it decides weights and order.
        epochs: Likewise, but for this model they change nothing.
    """
    settings = reporting.resolve(define_flags, settings, seed=seed, epochs=epochs)
    keras.utils.set_random_seed(settings.seed)
    train_images, test_images = load(settings)
    train_data = (
        train_images.cache("memory")
        .shuffle(seed=settings.seed)
        .batch(settings.batch_size, drop_remainder=True)
        .prefetch()
        .build()
    )
    # Several batches: some to choose a plan by, the others to judge it by.
    test_data = test_images.cache("memory").batch(settings.batch_size).build()
    model = build_model(settings.learning_rate)
    model.jit_compile = settings.jit_compile
    return model, train_data, test_data


def fit(settings: Any, title: str) -> tuple[keras.Model, list[float], dict[str, float]]:
    """Trains under what is in force: the model, seconds of epochs, test metrics."""
    model, train_data, test_data = build(settings)
    progress = TrainingProgress(title)
    model.fit(
        train_data,
        epochs=settings.epochs,
        shuffle=False,
        verbose=0,
        callbacks=[progress],
    )
    metrics = model.evaluate(test_data, verbose=0, return_dict=True)
    return model, progress.epoch_seconds, metrics


def decide(settings: Any, model: keras.Model) -> tuple[Any, str, int]:
    """Returns what to train under, why, and how many plans were tried.

    Args:
        settings: Values of the flags.
        model: Trained in float32.
    """
    policy = settings.policy[0]
    _, train_data, test_data = build(settings)
    if policy == "auto":
        measured = tfamp.measure_policies(
            model,
            train_data,
            budget_seconds=3 if settings.smoke else 20,
            jit_compile=settings.jit_compile,
            use_cache=not settings.smoke,
        )
        print(measured)
        policy = measured.best.policy
        if policy == "float32":
            return policy, measured.reason, 0
    elif policy == "float32":
        return policy, "you asked for it", 0
    plan = tfamp.tune(
        model,
        train_data,
        policy=policy,
        tolerance=settings.tolerance,
        validation=test_data,
    )
    print(plan)
    if settings.plan is not None:
        plan.to_json(settings.plan)
        print(f"Train under it: tfamp.enable(policy={settings.plan!r})")
    tuning = plan.evidence["tuning"]
    return plan, tuning["reason"], len(tuning["evaluations"])


def train(flag_values: flags.FlagValues) -> dict[str, Any]:
    """Trains in float32, decides, trains under the plan; returns what came of it."""
    settings = reporting.resolve(define_flags, flag_values)
    if settings.keep_float32 != ["default"]:
        raise ValueError(
            f"`--keep_float32` is {settings.keep_float32!r}; expected 'default', as "
            "what stays in float32 is found here. Leave it out."
        )
    started = time.perf_counter()
    with tfamp.scope("float32"):
        model, _, float32 = fit(settings, "digits float32")
        chosen, reason, evaluations = decide(settings, model)
    status = tfamp.enable(policy=chosen)
    model, epoch_seconds, metrics = fit(settings, f"digits {status.policy}")
    plan = tfamp.PrecisionPlan.from_model(model)
    num_steps = int(build(settings)[1].cardinality())
    return {
        "recipe": "tune_precision",
        "asked": settings.policy[0],
        "policy": status.policy,
        "reason": reason,
        "accuracy": round(metrics["accuracy"], 4),
        "loss": round(metrics["loss"], 4),
        "float32_accuracy": round(float32["accuracy"], 4),
        "kept": plan.kept,
        "num_kept": sum(rule == "tune" for rule in plan.kept.values()),
        "evaluations": evaluations,
        **reporting.speed(epoch_seconds, num_steps * settings.batch_size, num_steps),
        "seconds": round(time.perf_counter() - started, 2),
        "finite": reporting.is_finite(model, *metrics.values()),
        "versions": reporting.versions(),
    }


def main(argv: Sequence[str]) -> int:
    """Tunes and trains once, or once for each policy, and prints the result."""
    return reporting.run_recipe(TITLE, define_flags(), argv, train, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
