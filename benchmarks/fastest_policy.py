"""Whether `tfamp.measure_policies` picks the fastest policy, and what it costs.

Networks of six kinds get sizes and batches drawn by a seed. Each is measured with the
default budget, and again with four times as much. The pick is right where that second
timing has it as the fastest, or within 3 % of it. Each core has a process for a part of
the tries. Last, ResNet50 at 96x96 is measured once, for what the measurement costs.

Time: about fifteen minutes on two CPU cores.
"""

import concurrent.futures
import os
import statistics
from typing import Any

import keras
import numpy as np
from keras import layers

import tfamp
from benchmarks import _models, _runner

KINDS = ("MLP", "CNN", "CNN with BatchNormalization", "transformer", "LSTM", "GRU")
REQUIRED_PART, REQUIRED_SECONDS = 0.95, 25.0
LENGTH, WORDS, SIZE = 24, 500, 16
# How much longer the second timing takes, which is held to be the truth.
LONGER, INDIFFERENCE = 4, 0.03
FLAGS = (("integer", "tries", 60, "Networks that are measured."),)


def network(kind: str, rng: np.random.Generator) -> tuple[keras.Model, Any]:
    """Returns a compiled network of a kind, and two batches of data for it."""
    width = int(2 ** rng.uniform(4, 8))
    depth = int(rng.integers(1, 4))
    batch = int(2 ** rng.integers(3, 8))
    if kind == "MLP":
        inputs = h = keras.Input((width,))
        for _ in range(depth):
            h = layers.Dense(4 * width, activation="relu")(h)
    elif kind.startswith("CNN"):
        inputs = h = keras.Input((SIZE, SIZE, 3))
        batch = min(batch, 32)
        for _ in range(depth):
            h = layers.Conv2D(min(width, 64), 3, padding="same")(h)
            if "BatchNormalization" in kind:
                h = layers.BatchNormalization()(h)
            h = layers.ReLU()(h)
        h = layers.GlobalAveragePooling2D()(h)
    else:
        inputs = keras.Input((LENGTH,), dtype="int32")
        h = layers.Embedding(WORDS, width)(inputs)
        if kind == "transformer":
            for _ in range(depth):
                normed = layers.LayerNormalization()(h)
                h = h + layers.MultiHeadAttention(2, max(width // 2, 1))(normed, normed)
                h = h + layers.Dense(width, activation="gelu")(h)
            h = layers.GlobalAveragePooling1D()(h)
        else:
            h = getattr(layers, kind)(width)(h)
    model = keras.Model(inputs, layers.Dense(10)(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    shape = (2 * batch, *inputs.shape[1:])
    is_text = inputs.dtype == "int32"
    x = rng.integers(0, WORDS, shape) if is_text else rng.normal(size=shape)
    data = x.astype(inputs.dtype), rng.integers(0, 10, 2 * batch)
    return model, (data, batch)


def measure_try(kind: str, number: int) -> dict[str, Any]:
    """Measures one network, and again several times."""
    rng = np.random.default_rng(number)
    keras.utils.set_random_seed(number)
    model, (data, batch) = network(kind, rng)
    found = tfamp.measure_policies(model, data, batch_size=batch)
    seconds: dict[str, list[float]] = {}
    for _ in range(LONGER):
        for each in tfamp.measure_policies(model, data, batch_size=batch).times:
            if each.step_seconds is not None:
                seconds.setdefault(each.name, []).append(each.step_seconds)
    truth = {name: statistics.median(values) for name, values in seconds.items()}
    fastest = min(truth, key=lambda name: truth[name])
    behind = truth[found.best.name] / truth[fastest]
    told = {"kind": kind, "parameters": model.count_params(), "batch": batch}
    keras.backend.clear_session()
    return told | {
        **{"picked": found.best.name, "fastest": fastest, "candidates": len(truth)},
        "behind": round(behind, 4),
        "gain": round(truth["float32"] / truth[fastest], 3),
        "right": behind <= 1 + INDIFFERENCE,
        "seconds": round(found.seconds, 2),
    }


def measure_side(core: int, numbers: list[int]) -> list[dict[str, Any]]:
    """Returns the tries of these numbers, on one core."""
    os.sched_setaffinity(0, {core})
    return [measure_try(KINDS[number % len(KINDS)], number) for number in numbers]


def measure(settings: Any) -> dict[str, Any]:
    """Returns the tries, and what measuring ResNet50 costs."""
    numbers = list(range(1 if settings.smoke else settings.tries))
    cores = sorted(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(len(cores)) as pool:
        sides = pool.map(
            lambda place: _runner.in_a_process(
                "fastest_policy",
                {"core": cores[place], "numbers": numbers[place :: len(cores)]},
            ),
            range(len(cores)),
        )
        tries = [each for side in sides for each in side]
    right = sum(each["right"] for each in tries) / len(tries)
    result: dict[str, Any] = {
        "tries": tries,
        "right": round(right, 4),
        "required": REQUIRED_PART,
        "met": right >= REQUIRED_PART,
        "longest_seconds": max(each["seconds"] for each in tries),
    }
    if not settings.smoke:
        model, data, _ = _models.resnet50()
        found = tfamp.measure_policies(model, data)
        seconds = {"seconds": round(found.seconds, 1), "required": REQUIRED_SECONDS}
        result["resnet50"] = seconds | {
            "met": found.seconds <= REQUIRED_SECONDS,
            **{"picked": found.best.name, "reason": found.reason},
        }
    return result
