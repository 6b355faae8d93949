"""Proves by brute force what the cases say of their models, and lists what it cannot.

Command: python benchmarks/faults/prove_truth.py                 (all, seeds 0, 1, 2)
         python benchmarks/faults/prove_truth.py --only=clock --seeds=0,1
Time: about 15 s a case and seed, most of it float16 on a CPU.
The last line is JSON: how many truths were proven, and the cases of which not.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).parents[2]))

from absl import flags  # noqa: E402

from tfamp.machine import cpus  # noqa: E402

cpus.avoid_broken_amx()

from benchmarks import faults  # noqa: E402  (it starts TensorFlow)
from benchmarks.faults.lowering import Subject  # noqa: E402
from benchmarks.faults.truth import Truth, prove  # noqa: E402

DTYPES = ("float16", "bfloat16")


def define_flags() -> flags.FlagValues:
    """Returns the flags with their defaults."""
    values = flags.FlagValues()
    flags.DEFINE_string(
        "only", "", "Cases whose name has this in it.", flag_values=values
    )
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.", flag_values=values)
    return values


def holds(case: faults.Case, dtype: str, truth: Truth) -> bool:
    """Whether what a case says is what the runs prove."""
    return truth.verdict == case.verdict[dtype] and truth.guilty in case.guilty[dtype]


def main(argv: Sequence[str]) -> int:
    """Proves the chosen cases; 1 where one does not hold."""
    settings = define_flags()
    settings(list(argv))
    proven, doubtful = 0, {}
    for case in faults.CASES:
        if settings.only not in case.name:
            continue
        for seed in map(int, settings.seeds):
            subject = Subject(*case.build(seed))
            for dtype in DTYPES:
                truth = prove(subject, dtype)
                is_right = holds(case, dtype, truth)
                proven += is_right
                if not is_right:
                    key = f"{case.name}, {dtype}, seed {seed}"
                    doubtful[key] = f"{truth.verdict} {sorted(truth.guilty)}"
                word = "proven" if is_right else "NOT PROVEN"
                print(
                    f"{word}: {case.name}, {dtype}, seed {seed}: {truth.verdict} "
                    f"{sorted(truth.guilty)} ({truth.why})",
                    flush=True,
                )
    print(json.dumps({"proven": proven, "not_proven": doubtful}))
    return int(bool(doubtful))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
