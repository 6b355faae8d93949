"""The resident size that `tfamp.estimate_memory` predicts, over what is seen.

Prints, for an MLP, a CNN with BatchNormalization, ResNet50, a transformer and an LSTM,
in float32 and mixed_bfloat16, the resident size of the whole process: as predicted
before a step has run, the peak that a run of `fit` shows, and their ratio. The goal is
a ratio within 15 % of 1. Beside it stands the ratio above what the process holds once
the model is built, where Python, TensorFlow and the weights help nothing.

Time: about half an hour on two CPU cores.

Prediction and run are processes of their own, each with the allocator as it is:
TensorFlow's own where it uses oneDNN; `--malloc` takes that one away, so that the C
library allocates.
"""

import sys
from typing import Any

import tensorflow as tf

import tfamp
from benchmarks import _models, _runner
from benchmarks.memory import CASES, POLICIES, SMOKE
from tfamp.machine import memory as process_memory

GOAL = 0.15
STEPS = 5
MALLOC = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}
FLAGS = (("bool", "malloc", False, "Without TensorFlow's own allocator."),)


def measure_side(case: str, policy: str, batch: int, is_run: bool) -> dict[str, Any]:
    """Predicts or trains one case in this process."""
    model = _models.compiled_family(case, policy)
    built = process_memory.process_bytes()
    if not is_run:
        found = tfamp.estimate_memory(model, batch)
        return {"bytes": found.resident_bytes, "allocator": found.allocator}
    data = tf.data.Dataset.from_tensors(_models.random_batch(model, batch))
    process_memory.reset_peak()
    model.fit(data.repeat(STEPS), verbose=0)
    return {"bytes": process_memory.peak_process_bytes(), "built": built}


def measure_case(variables: dict[str, str], **case: Any) -> dict[str, Any]:
    """Predicts and trains a case in fresh processes."""
    predicted, run = (
        _runner.in_a_process("resident", {**case, "is_run": is_run}, **variables)
        for is_run in (False, True)
    )
    ratio = predicted["bytes"] / run["bytes"]
    above = (predicted["bytes"] - run["built"]) / (run["bytes"] - run["built"])
    print(f"{case['case']}, {case['policy']}: {ratio:.3f}", file=sys.stderr, flush=True)
    return {
        "batch": case["batch"],
        "allocator": predicted["allocator"],
        "predicted": predicted["bytes"],
        "measured": run["bytes"],
        "built": run["built"],
        "ratio": round(ratio, 3),
        "ratio_above_built": round(above, 3),
        "met": abs(ratio - 1) <= GOAL,
    }


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    cases, policies = CASES, POLICIES
    if settings.smoke:
        cases, policies = SMOKE, ("float32",)
    variables = MALLOC if settings.malloc else {}
    found = {
        case: {
            p: measure_case(variables, case=case, policy=p, batch=b) for p in policies
        }
        for case, b in cases.items()
    }
    return {"goal": GOAL, "steps": STEPS, "cases": found}
