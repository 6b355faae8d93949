"""How `tfamp.sensitivity` and `tfamp.triage` judge models with known faults.

A model counts as found where verdict and guilty layers are exactly right; whatever is
said of a healthy one is an alarm. A failing step counts where the cause is right, and
the layer where there is one to name.

Time: about five minutes on two CPU cores.
"""

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


def sensitivities(cases: Sequence[Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Yields what is said of each model, in each dtype of which the truth is known."""
    for case in cases:
        for seed in range(seeds):
            for dtype, guilty in case.guilty.items():

                def judge(
                    case: Any = case, seed: int = seed, dtype: str = dtype
                ) -> Any:
                    model, batches = case.build(seed)
                    arrays = map(np.concatenate, zip(*batches, strict=True))
                    size = len(batches[0][0])
                    found = tfamp.sensitivity(
                        model, tuple(arrays), dtype=dtype, batch_size=size
                    )
                    return found.verdict, found.guilty

                row = {"case": case.name, "dtype": dtype, "seed": seed}
                row |= {"expected": case.verdict_in(dtype), "wanted": sorted(guilty)}
                yield _judged(row | {"healthy": case.is_healthy}, judge)


def triages(failures: Sequence[Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Yields what is said of each failing step."""
    for failure in failures:
        for seed in range(seeds):

            def judge(failure: Any = failure, seed: int = seed) -> Any:
                found = tfamp.triage(*failure.build(seed))
                return found.cause, [found.layer] if failure.layer else []

            row = {"case": failure.name, "seed": seed, "expected": failure.cause}
            wanted = [failure.layer] if failure.layer else []
            yield _judged(row | {"wanted": wanted}, judge)


def _part(rows: Sequence[dict[str, Any]]) -> list[int]:
    return [sum(row["right"] and row["layers_right"] for row in rows), len(rows)]


def measure(settings: Any) -> dict[str, Any]:
    """Returns how many were found, and each that was not."""
    cpus.avoid_broken_amx()
    warnings.simplefilter("ignore", UserWarning)

    def chosen(all_of_them: Sequence[Any]) -> list[Any]:
        if settings.smoke:
            return [each for each in all_of_them if each.name in SMOKE]
        return [each for each in all_of_them if settings.only in each.name]

    rows = list(sensitivities(chosen(fault_cases.CASES), settings.seeds))
    steps = list(triages(chosen(fault_steps.FAILURES), settings.seeds))
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
