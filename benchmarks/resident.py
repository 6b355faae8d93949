"""Compares the resident size that `tfamp.estimate_memory` predicts with what is seen.

Prints, for an MLP, a CNN with BatchNormalization, ResNet50, a transformer and an LSTM,
in float32 and mixed_bfloat16, the resident size of the whole process: as predicted
before a step has run, the peak that a run of `fit` shows, and their ratio. The goal is
a ratio within 15 % of 1. Beside it stands the ratio above what the process holds once
the model is built, where Python, TensorFlow and the weights help nothing.

Command: python benchmarks/resident.py [--json=FILE] [--malloc]
Time: about half an hour on two CPU cores.

Prediction and run are processes of their own, each with the allocator as it is:
TensorFlow's own where it uses oneDNN; `--malloc` takes that one away, so that the C
library allocates.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags

GOAL = 0.15
STEPS = 5
POLICIES = ("float32", "mixed_bfloat16")
MALLOC = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}


def define_flags() -> flags.FlagValues:
    """Returns the flags with their defaults."""
    values = flags.FlagValues()
    flags.DEFINE_string("json", "", "File to write the figures to.", flag_values=values)
    flags.DEFINE_string(
        "side", None, "JSON of one side, taken here.", flag_values=values
    )
    flags.DEFINE_boolean(
        "malloc", False, "Without TensorFlow's own allocator.", flag_values=values
    )
    flags.DEFINE_boolean(
        "smoke", False, "A small batch; the figures mean nothing.", flag_values=values
    )
    return values


def side(case: str, policy: str, batch: int, is_run: bool) -> dict[str, Any]:
    """Predicts or trains one case in this process."""
    import keras
    import memory

    import tfamp
    from tfamp.machine import amx
    from tfamp.machine import memory as process_memory

    amx.avoid()
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy):
        model = memory.build(case)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
    built = process_memory.process_bytes()
    if not is_run:
        found = tfamp.estimate_memory(model, batch)
        return {"bytes": found.resident_bytes, "allocator": found.allocator}
    data = memory.one_batch(model, batch)
    process_memory.reset_peak()
    model.fit(data.repeat(STEPS), verbose=0)
    return {"bytes": process_memory.peak_process_bytes(), "built": built}


def measure(variables: dict[str, str], **case: Any) -> dict[str, Any]:
    """Predicts and trains a case in fresh processes."""
    import _figures

    predicted, run = (
        _figures.in_a_process(__file__, {**case, "is_run": is_run}, **variables)
        for is_run in (False, True)
    )
    ratio = predicted["bytes"] / run["bytes"]
    above = (predicted["bytes"] - run["built"]) / (run["bytes"] - run["built"])
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


def show(result: dict[str, Any]) -> None:
    """Prints the figures as a table, and whether the goal is met."""
    from rich.console import Console
    from rich.table import Table

    from tfamp.records.units import format_bytes

    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    table = Table(title=f"Resident size; {result['device']}; {versions}")
    for column in ("step", "policy", "batch", "predicted", "measured", "ratio"):
        table.add_column(column)
    table.add_column("above built")
    missed = []
    for case, policies in result["cases"].items():
        for policy, found in policies.items():
            table.add_row(
                case,
                policy,
                str(found["batch"]),
                format_bytes(found["predicted"]),
                format_bytes(found["measured"]),
                str(found["ratio"]),
                str(found["ratio_above_built"]),
            )
            missed += [] if found["met"] else [f"{case}, {policy}"]
    Console(width=120).print(table)
    goal = f"Within {result['goal']:.0%}"
    print(f"{goal}: all." if not missed else f"{goal}: not {'; '.join(missed)}.")


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table and a last line of JSON."""
    settings = define_flags()
    settings(argv)
    if settings.side:
        print(json.dumps(side(**json.loads(settings.side))))
        return 0
    import _figures
    import memory

    import tfamp

    device = tfamp.status().devices[0]
    cases = memory.SMOKE if settings.smoke else memory.CASES
    policies = POLICIES[:1] if settings.smoke else POLICIES
    variables = MALLOC if settings.malloc else {}
    found: dict[str, dict[str, Any]] = {}
    for case, batch in cases.items():
        found[case] = {}
        for policy in policies:
            found[case][policy] = measure(
                variables, case=case, policy=policy, batch=batch
            )
            ratio = found[case][policy]["ratio"]
            print(f"{case}, {policy}: {ratio}", file=sys.stderr, flush=True)
    result = {
        "benchmark": "resident",
        "device": f"{device.name}, {os.cpu_count()} cores",
        "versions": _figures.versions(),
        "goal": GOAL,
        "steps": STEPS,
        "cases": found,
    }
    show(result)
    _figures.finish(result, settings.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
