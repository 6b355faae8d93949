"""How `tfamp.sensitivity` and `tfamp.triage` judge models with known faults.

A model counts as found where verdict and guilty layers are exactly right; whatever is
said of a healthy one is an alarm. A failing step counts where the cause is right, and
the layer where there is one to name.

Time: about five minutes on two CPU cores.
"""

import functools
import itertools
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import tfamp
from tests.wild import fault_cases, fault_steps
from tfamp.machine import cpus

FLAGS = (
    ("integer", "seeds", 1, "Models of each case."),
    ("string", "only", "", "Part of a case's name."),
)
# Of `--smoke`: one of each kind.
SMOKE = {"cube, subclassed", "transformer", "NaN in the targets, float32", "cube"}


def _judged(row: dict[str, Any], judge: Callable[[], Any]) -> dict[str, Any]:
    """Returns the row with what a tool says: verdict and sorted layers."""
    try:
        found, named = judge()
    except Exception as error:  # a tool that fails has not found it
        traceback.print_exc()
        found, named = f"{type(error).__name__}: {error}"[:200], []
    row |= {"found": found, "named": sorted(named)}
    row["right"] = found == row["expected"]
    row["layers_right"] = row["named"] == row["wanted"]
    return row


def sensitivity(case: Any, seed: int, dtype: str) -> tuple[str, Any]:
    """Returns what is said of a model in a dtype."""
    model, batches = case.build(seed)
    arrays = tuple(map(np.concatenate, zip(*batches, strict=True)))
    size = len(batches[0][0])
    found = tfamp.sensitivity(model, arrays, dtype=dtype, batch_size=size)
    return found.verdict, found.guilty


def sensitivities(cases: Sequence[Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Yields what is said of each model, in each dtype of which the truth is known."""
    for case, seed in itertools.product(cases, range(seeds)):
        for dtype, guilty in case.guilty.items():
            row = {"case": case.name, "dtype": dtype, "seed": seed}
            row |= {"expected": case.verdict_in(dtype), "wanted": sorted(guilty)}
            judge = functools.partial(sensitivity, case, seed, dtype)
            yield _judged(row | {"healthy": case.is_healthy}, judge)


def triage(failure: Any, seed: int) -> tuple[str, list[str]]:
    """Returns what is said of a failing step."""
    found = tfamp.triage(*failure.build(seed))
    return found.cause, [found.layer] if failure.layer else []


def triages(failures: Sequence[Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Yields what is said of each failing step."""
    for failure, seed in itertools.product(failures, range(seeds)):
        row = {"case": failure.name, "seed": seed, "expected": failure.cause}
        wanted = [failure.layer] if failure.layer else []
        yield _judged(
            row | {"wanted": wanted}, functools.partial(triage, failure, seed)
        )


def _part(rows: Sequence[dict[str, Any]]) -> list[int]:
    return [sum(row["right"] and row["layers_right"] for row in rows), len(rows)]


def measure(settings: Any) -> dict[str, Any]:
    """Returns how many were found, and each that was not."""
    cpus.avoid_broken_amx()
    warnings.simplefilter("ignore", UserWarning)
    only = settings.only
    cases, failures = (
        [e for e in every if (e.name in SMOKE if settings.smoke else only in e.name)]
        for every in (fault_cases.CASES, fault_steps.FAILURES)
    )
    rows = list(sensitivities(cases, settings.seeds))
    steps = list(triages(failures, settings.seeds))
    found = {}
    for dtype in fault_cases.BOTH:
        own = [row for row in rows if row["dtype"] == dtype]
        healthy = _part([row for row in own if row["healthy"]])
        found[dtype] = {
            "found": _part([row for row in own if not row["healthy"]]),
            "alarms": [healthy[1] - healthy[0], healthy[1]],
        }
    return {
        "seeds": settings.seeds,
        "sensitivity": found,
        "triage": _part(steps),
        "missed": [
            row for row in (*rows, *steps) if not (row["right"] and row["layers_right"])
        ],
    }
