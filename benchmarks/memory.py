"""The memory that `tfamp.estimate_memory` predicts, over what a step takes.

Prints, for an MLP, a CNN with BatchNormalization, ResNet50, a transformer and an LSTM,
in float32 and mixed_bfloat16, the memory above what model and optimizer hold: predicted
from the traced graph, measured in a run of `fit`, and their ratio. The goal is a ratio
within 15 % of 1. Further rows do so for `predict` and for `tfamp.remat`.

Time: about a quarter of an hour on two CPU cores.

Each case runs in a process of its own. The peak is that of the resident memory, reset
ahead of a step; the C library is told to give back at once what is freed. The first
step, which traces, is left out.
"""

import ctypes
from typing import Any

import tensorflow as tf

import tfamp
from benchmarks import _models, _runner
from tfamp.machine import memory as process_memory

GOAL = 0.15
STEPS = 3
POLICIES = ("float32", "mixed_bfloat16")
# Batch sizes at which the step outweighs the interpreter's own ups and downs.
CASES = {"MLP": 1024, "CNN": 256, "ResNet50": 32, "transformer": 64, "LSTM": 256}
OTHERS = {
    "MLP, predict": {"training": False},
    "MLP, remat": {"is_again": True},
    "transformer, remat": {"is_again": True},
}
SMOKE = {"MLP of 2 blocks": 16}


def measure_side(
    case: str, policy: str, batch: int, training: bool = True, is_again: bool = False
) -> dict[str, Any]:
    """Predicts and measures one case in this process."""
    model = _models.compiled_family(case, policy)
    if is_again:
        tfamp.remat(model)
    predicted = tfamp.estimate_memory(model, batch, training=training)
    data = tf.data.Dataset.from_tensors(_models.random_batch(model, batch))
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


def measure_case(**side: Any) -> Any:
    """Measures a case in a fresh process, and says how near the prediction came."""
    found = _runner.in_a_process("memory", side, **_runner.FREED_AT_ONCE)
    middle = found["measured"][len(found["measured"]) // 2]
    found["ratio"] = round(found["predicted"] / max(1, middle), 3)
    found["batch"] = side["batch"]
    return found


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    rows = [(case, batch, {}) for case, batch in CASES.items()]
    rows += [(case, CASES[case.split(",")[0]], how) for case, how in OTHERS.items()]
    policies = POLICIES
    if settings.smoke:
        rows, policies = [(*SMOKE, *SMOKE.values(), {})], POLICIES[:1]
    cases = {
        case: {
            policy: measure_case(case=case, policy=policy, batch=batch, **how)
            for policy in policies
        }
        for case, batch, how in rows
    }
    return {"goal": GOAL, "cases": cases}
