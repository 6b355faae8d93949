"""Measures the memory and the time of a training step whose activations are remade.

Prints, for a residual MLP of 12 blocks and a transformer of 6, in float32 and
mixed_bfloat16: the peak of memory above what model and optimizer hold, without and with
`tfamp.remat`, their ratio, that of the steps' times, and how far the losses differ. The
goal is a ratio of memory of 0.4 with equal losses.

Command: python benchmarks/remat.py [--json=FILE]
Time: about a quarter of an hour on two CPU cores. Use an idle machine.

Each side is trained in a process of its own. The peak is that of the resident memory,
reset ahead of the steps: once where freed blocks go back to the system at once, so that
it is what the step holds; and once with glibc's allocator as it is, which keeps freed
blocks that lie between others, and runs faster. Times are from there.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags

GOAL = 0.4
STEPS = 3
POLICIES = ("float32", "mixed_bfloat16")
# Batch sizes at which activations outweigh all else.
CASES = {"MLP of 12 blocks": 3072, "transformer of 6 blocks": 96}
SMOKE = {"MLP of 3 blocks": 16}


def define_flags() -> flags.FlagValues:
    """Returns the flags with their defaults."""
    values = flags.FlagValues()
    flags.DEFINE_string("json", "", "File to write the figures to.", flag_values=values)
    flags.DEFINE_string(
        "side", None, "JSON of one side, measured here.", flag_values=values
    )
    flags.DEFINE_boolean(
        "smoke",
        False,
        "A small batch; the figures mean nothing.",
        flag_values=values,
    )
    return values


def build(case: str) -> Any:
    """Returns a model and the shape and dtype of its inputs."""
    import keras

    layers = keras.layers
    if case.startswith("MLP"):
        x = y = keras.Input((1024,))
        for _ in range(int(case.split()[2])):
            h = layers.Dense(2048, activation="gelu")(layers.LayerNormalization()(y))
            y = y + layers.Dropout(0.1)(layers.Dense(1024)(h))
        return keras.Model(x, layers.Dense(10)(y))
    x = keras.Input((128,), dtype="int32")
    y = layers.Embedding(1000, 256)(x)
    for _ in range(6):
        h = layers.LayerNormalization()(y)
        y = y + layers.MultiHeadAttention(8, 32, dropout=0.1)(h, h)
        h = layers.Dense(1024, activation="gelu")(layers.LayerNormalization()(y))
        y = y + layers.Dense(256)(h)
    return keras.Model(x, layers.Dense(10)(layers.GlobalAveragePooling1D()(y)))


def measure_side(case: str, policy: str, is_again: bool, batch: int) -> dict[str, Any]:
    """Trains a few steps in this process and returns what they took."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfamp
    from tfamp.machine import amx
    from tfamp.machine import memory as process_memory

    amx.avoid()
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy):
        model = build(case)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-2, momentum=0.9), loss)
    if is_again:
        tfamp.remat(model)
    rng = np.random.default_rng(0)
    spec = model.inputs[0]
    shape = (batch, *spec.shape[1:])
    if spec.dtype == "int32":
        x = rng.integers(0, 1000, shape, dtype=np.int32)
    else:
        x = rng.normal(size=shape).astype(np.float32)
    y = rng.integers(0, 10, batch)
    small, data = (
        tf.data.Dataset.from_tensor_slices((x[:n], y[:n])).batch(batch)
        for n in (2, batch)
    )
    model.fit(small, verbose=0)  # slots are made, the step is traced for any batch
    before = process_memory.process_bytes()
    process_memory.reset_peak()
    losses, times = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        losses += model.fit(data, verbose=0).history["loss"]
        times.append(time.perf_counter() - start)
    return {
        "bytes": process_memory.peak_process_bytes() - before,
        "seconds": min(times),
        "losses": losses,
    }


def measure(case: str, policy: str, batch: int) -> dict[str, Any]:
    """Returns the figures of one model under one policy."""
    import _figures

    side = {"case": case, "policy": policy, "batch": batch}
    (held_plain, held_again), (plain, again) = (
        [
            _figures.in_a_process(__file__, {**side, "is_again": is_again}, **allocator)
            for is_again in (False, True)
        ]
        for allocator in (_figures.FREED_AT_ONCE, {})
    )
    pairs = zip(plain["losses"], again["losses"], strict=True)
    return {
        "batch": batch,
        "plain_bytes": held_plain["bytes"],
        "remat_bytes": held_again["bytes"],
        "memory": round(held_again["bytes"] / max(1, held_plain["bytes"]), 3),
        "memory_with_glibc": round(again["bytes"] / max(1, plain["bytes"]), 3),
        "time": round(again["seconds"] / plain["seconds"], 2),
        "off": max(abs(a - b) / abs(a) for a, b in pairs),
    }


def show(result: dict[str, Any]) -> None:
    """Prints the figures as a table."""
    from rich.console import Console
    from rich.table import Table

    from tfamp.records.units import format_bytes

    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    table = Table(title=f"tfamp.remat; {result['device']}; {versions}")
    memory = ("plain", "remat", "memory", "with glibc")
    for column in ("model", "policy", *memory, "time", "loss off"):
        table.add_column(column)
    for case, policies in result["cases"].items():
        for policy, found in policies.items():
            sizes = (format_bytes(found[f"{s}_bytes"]) for s in ("plain", "remat"))
            ratios = (
                str(found[measure])
                for measure in ("memory", "memory_with_glibc", "time")
            )
            table.add_row(case, policy, *sizes, *ratios, f"{found['off']:.1e}")
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
    result = {
        "benchmark": "remat",
        "device": f"{device.name}, {os.cpu_count()} cores",
        "versions": _figures.versions(),
        "goal": GOAL,
        "cases": {
            case: {policy: measure(case, policy, batch) for policy in policies}
            for case, batch in (SMOKE if settings.smoke else CASES).items()
        },
    }
    show(result)
    _figures.finish(result, settings.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
