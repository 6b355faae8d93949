"""Models with known faults, to judge what finds them. Models are built when asked for.

`CASES` are models of which half precision spoils some layers, `FAILURES` steps that
went wrong. What is said of `CASES` is proven by `prove_truth.py`.
"""

from benchmarks.faults import (
    accumulation_cases,
    backward_cases,
    failure_cases,
    failure_precision,
    failure_training,
    healthy,
    precision_cases,
    range_cases,
)
from benchmarks.faults.records import Case, Failure, split

CASES: tuple[Case, ...] = split(
    (
        *range_cases.CASES,
        *precision_cases.CASES,
        *accumulation_cases.CASES,
        *backward_cases.CASES,
        *healthy.CASES,
    )
)
FAILURES: tuple[Failure, ...] = split(
    (
        *failure_cases.FAILURES,
        *failure_training.FAILURES,
        *failure_precision.FAILURES,
    )
)

__all__ = ["CASES", "FAILURES", "Case", "Failure"]
