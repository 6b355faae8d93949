"""Compares the memory that `tfamp.estimate_memory` predicts with what a step takes.

Prints, for an MLP, a CNN with BatchNormalization, ResNet50, a transformer and an LSTM,
in float32 and mixed_bfloat16, the memory above what model and optimizer hold: predicted
from the traced graph, measured in a run of `fit`, and their ratio. The goal is a ratio
within 15 % of 1. A second table does so for `predict`, for XLA, and for `tfamp.remat`.

Command: python benchmarks/memory.py [--json=FILE] [--glibc]
Time: about a quarter of an hour on two CPU cores.

Each case runs in a process of its own. The peak is that of the resident memory, reset
ahead of a step; the C library is told to give back at once what is freed, since what it
keeps for later depends on what ran before; `--glibc` leaves it as it is, to see how
much that comes to. The first step, which traces, is left out.
"""

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags

GOAL = 0.15
STEPS = 3
POLICIES = ("float32", "mixed_bfloat16")
# Batch sizes at which the step outweighs the interpreter's own ups and downs.
CASES = {
    "MLP": 1024,
    "CNN": 256,
    "ResNet50": 32,
    "transformer": 64,
    "LSTM": 256,
}
OTHERS = {
    "MLP, predict": {"training": False},
    "MLP, XLA": {"jit_compile": True},
    "MLP, remat": {"is_again": True},
    "transformer, remat": {"is_again": True},
}
SMOKE = {"MLP of 2 blocks": 16}


def define_flags() -> flags.FlagValues:
    """Returns the flags with their defaults."""
    values = flags.FlagValues()
    flags.DEFINE_string("json", "", "File to write the figures to.", flag_values=values)
    flags.DEFINE_string(
        "side", None, "JSON of one case, measured here.", flag_values=values
    )
    flags.DEFINE_boolean(
        "glibc", False, "Leave the C library's allocator as it is.", flag_values=values
    )
    flags.DEFINE_boolean(
        "smoke", False, "A small batch; the figures mean nothing.", flag_values=values
    )
    return values


def build(case: str) -> Any:
    """Returns a model of one family."""
    import keras

    layers = keras.layers
    if case.startswith("ResNet50"):
        return keras.applications.ResNet50(
            weights=None,
            input_shape=(96, 96, 3),
            classes=10,
            classifier_activation=None,
        )
    if case.startswith("MLP"):
        x = y = keras.Input((1024,))
        for _ in range(int(case.split()[2]) if " of " in case else 12):
            h = layers.Dense(2048, activation="gelu")(layers.LayerNormalization()(y))
            y = y + layers.Dropout(0.1)(layers.Dense(1024)(h))
    elif case.startswith("CNN"):
        x = y = keras.Input((32, 32, 3))
        for filters in (64, 128, 256):
            for _ in range(2):
                y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(y)
                y = layers.ReLU()(layers.BatchNormalization()(y))
            y = layers.MaxPooling2D()(y)
        y = layers.GlobalAveragePooling2D()(y)
    elif case.startswith("transformer"):
        x = keras.Input((128,), dtype="int32")
        y = layers.Embedding(1000, 256)(x)
        for _ in range(6):
            h = layers.LayerNormalization()(y)
            y = y + layers.MultiHeadAttention(8, 32, dropout=0.1)(h, h)
            h = layers.Dense(1024, activation="gelu")(layers.LayerNormalization()(y))
            y = y + layers.Dense(256)(h)
        y = layers.GlobalAveragePooling1D()(y)
    else:
        x = keras.Input((128,), dtype="int32")
        y = layers.Embedding(1000, 128)(x)
        y = layers.LSTM(256)(layers.LSTM(256, return_sequences=True)(y))
    return keras.Model(x, layers.Dense(10)(y))


def one_batch(model: Any, batch: int) -> Any:
    """Returns a dataset of one random batch of inputs and classes."""
    import numpy as np
    import tensorflow as tf

    spec = model.inputs[0]
    shape = (batch, *spec.shape[1:])
    rng = np.random.default_rng(0)
    if spec.dtype == "int32":
        x = rng.integers(0, 1000, shape, dtype=np.int32)
    else:
        x = rng.normal(size=shape).astype(np.float32)
    return tf.data.Dataset.from_tensors((x, rng.integers(0, 10, batch)))


def measure_side(
    case: str,
    policy: str,
    batch: int,
    training: bool = True,
    jit_compile: bool = False,
    is_again: bool = False,
) -> dict[str, Any]:
    """Predicts and measures one case in this process."""
    import keras

    import tfamp
    from tfamp.machine import amx
    from tfamp.machine import memory as process_memory

    amx.avoid()
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy):
        model = build(case)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=jit_compile)
    if is_again:
        tfamp.remat(model)
    predicted = tfamp.estimate_memory(model, batch, training=training)
    data = one_batch(model, batch)
    run = model.fit if training else model.predict
    libc = ctypes.CDLL(None)
    peaks = []
    for _ in range(1 + STEPS):
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        before = process_memory.process_bytes()
        process_memory.reset_peak()
        run(data, verbose=0)
        peaks.append(process_memory.peak_process_bytes() - before)
    # The batch itself is there beforehand.
    return {
        "predicted": predicted.step_bytes - predicted.by_kind["inputs"],
        "measured": sorted(peaks[1:]),
        "kinds": predicted.by_kind,
    }


def measure(allocator: dict[str, str], **side: Any) -> dict[str, Any]:
    """Measures a case in a fresh process, and says how near the prediction came."""
    import _figures

    found: dict[str, Any] = _figures.in_a_process(__file__, side, **allocator)
    middle = found["measured"][len(found["measured"]) // 2]
    found["ratio"] = round(found["predicted"] / max(1, middle), 3)
    found["batch"] = side["batch"]
    return found


def show(result: dict[str, Any]) -> None:
    """Prints the figures as a table."""
    from rich.console import Console
    from rich.table import Table

    from tfamp.records.units import format_bytes

    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    table = Table(title=f"tfamp.estimate_memory; {result['device']}; {versions}")
    for column in ("step", "policy", "batch", "predicted", "measured", "ratio"):
        table.add_column(column)
    for case, policies in result["cases"].items():
        for policy, found in policies.items():
            low, *_, high = found["measured"]
            table.add_row(
                case,
                policy,
                str(found["batch"]),
                format_bytes(found["predicted"]),
                f"{format_bytes(low)} to {format_bytes(high)}",
                str(found["ratio"]),
            )
    Console(width=120).print(table)


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table and a last line of JSON."""
    settings = define_flags()
    settings(argv)
    if settings.side:
        print(json.dumps(measure_side(**json.loads(settings.side))))
        return 0
    import _figures

    import tfamp

    device = tfamp.status().devices[0]
    policies = POLICIES[:1] if settings.smoke else POLICIES
    allocator = {} if settings.glibc else _figures.FREED_AT_ONCE
    cases: dict[str, dict[str, Any]] = {
        case: {
            p: measure(allocator, case=case, policy=p, batch=batch) for p in policies
        }
        for case, batch in (SMOKE if settings.smoke else CASES).items()
    }
    for case, options in () if settings.smoke else OTHERS.items():
        batch = CASES[case.split(",")[0]]
        cases[case] = {
            p: measure(allocator, case=case, policy=p, batch=batch, **options)
            for p in policies
        }
    result = {
        "benchmark": "memory",
        "device": f"{device.name}, {os.cpu_count()} cores",
        "versions": _figures.versions(),
        "goal": GOAL,
        "cases": cases,
    }
    show(result)
    _figures.finish(result, settings.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
