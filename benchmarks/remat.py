"""The memory and the time of a training step whose activations are made again.

Prints, for a residual MLP of 12 blocks and a transformer of 6, in float32 and
mixed_bfloat16: the peak of memory above what model and optimizer hold, without and with
`tfamp.remat`, their ratio, that of the steps' times, and how far the losses differ. The
goal is a ratio of memory of 0.4 with equal losses.

Time: about a quarter of an hour on two CPU cores. Use an idle machine.

Each side is trained in a process of its own. The peak is that of the resident memory,
reset ahead of the steps: where freed blocks go back to the system at once, and with
glibc's allocator as it is, which keeps some and is faster. Times are from there.
"""

from typing import Any

import keras
import tensorflow as tf

import tfamp
from benchmarks import _models, _runner
from benchmarks._runner import timed
from tfamp.machine import memory as process_memory

GOAL = 0.4
STEPS = 3
POLICIES = ("float32", "mixed_bfloat16")
# Batch sizes at which activations outweigh all else.
CASES = {"MLP of 12 blocks": 3072, "transformer of 6 blocks": 96}
SMOKE = {"MLP of 3 blocks": 16}


def measure_side(case: str, policy: str, is_again: bool, batch: int) -> dict[str, Any]:
    """Trains a few steps in this process and returns what they took."""
    optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
    model = _models.compiled_family(case, policy, optimizer, jit_compile="auto")
    if is_again:
        tfamp.remat(model)
    x, y = _models.random_batch(model, batch)
    small, data = (
        tf.data.Dataset.from_tensor_slices((x[:n], y[:n])).batch(batch)
        for n in (2, batch)
    )
    model.fit(small, verbose=0)  # slots are made, the step is traced for any batch
    before = process_memory.process_bytes()
    process_memory.reset_peak()
    losses: list[float] = []

    def step() -> None:
        losses.extend(model.fit(data, verbose=0).history["loss"])

    seconds = min(timed(step)[0] for _ in range(STEPS))
    held = process_memory.peak_process_bytes() - before
    return {"bytes": held, "seconds": seconds, "losses": losses}


def measure_case(case: str, policy: str, batch: int) -> dict[str, Any]:
    """Returns the figures of one model under one policy."""
    side = {"case": case, "policy": policy, "batch": batch}
    (held_plain, held_again), (plain, again) = (
        [
            _runner.in_a_process("remat", {**side, "is_again": is_again}, **allocator)
            for is_again in (False, True)
        ]
        for allocator in (_runner.FREED_AT_ONCE, {})
    )
    pairs = zip(plain["losses"], again["losses"], strict=True)
    own = {"plain_bytes": held_plain["bytes"], "remat_bytes": held_again["bytes"]}
    return {
        **{"batch": batch, **own},
        "memory": round(own["remat_bytes"] / max(1, own["plain_bytes"]), 3),
        "memory_with_glibc": round(again["bytes"] / max(1, plain["bytes"]), 3),
        "time": round(again["seconds"] / plain["seconds"], 2),
        "off": max(abs(a - b) / abs(a) for a, b in pairs),
    }


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    cases, policies = CASES, POLICIES
    if settings.smoke:
        cases, policies = SMOKE, ("float32",)
    found = {
        case: {policy: measure_case(case, policy, batch) for policy in policies}
        for case, batch in cases.items()
    }
    return {"goal": GOAL, "cases": found}
