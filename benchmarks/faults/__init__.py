"""Models with known faults, to judge what finds them. Models are built when asked for.

`CASES` are models of which half precision spoils some layers, `FAILURES` steps that
went wrong. What is said of `CASES` is proven by `prove_truth.py`.
"""

from benchmarks.faults import (
    accumulation_cases,
    backward_cases,
    embedding_cases,
    failure_cases,
    failure_further,
    failure_precision,
    failure_training,
    further_healthy,
    healthy,
    loss_cases,
    precision_cases,
    random_cases,
    range_cases,
)
from benchmarks.faults.records import Case, Failure, split

FIRST_CASES: tuple[Case, ...] = split(
    (
        *range_cases.CASES,
        *precision_cases.CASES,
        *accumulation_cases.CASES,
        *backward_cases.CASES,
        *healthy.CASES,
    )
)
# Split by themselves: the halves of the first ones stay what they were.
FURTHER_CASES: tuple[Case, ...] = split(
    (
        *random_cases.CASES,
        *loss_cases.CASES,
        *embedding_cases.CASES,
        *further_healthy.CASES,
    )
)
CASES = (*FIRST_CASES, *FURTHER_CASES)
FIRST_FAILURES: tuple[Failure, ...] = split(
    (
        *failure_cases.FAILURES,
        *failure_training.FAILURES,
        *failure_precision.FAILURES,
    )
)
FURTHER_FAILURES: tuple[Failure, ...] = split(failure_further.FAILURES)
FAILURES = (*FIRST_FAILURES, *FURTHER_FAILURES)

__all__ = [
    *("CASES", "FIRST_CASES", "FURTHER_CASES"),
    *("FAILURES", "FIRST_FAILURES", "FURTHER_FAILURES"),
    *("Case", "Failure"),
]
