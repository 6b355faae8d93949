"""How `tfamp.sensitivity` and `tfamp.triage` judge models with known faults.

The models of benchmarks/faults were made, and their truth proven, before the thresholds
were set; one half was used to set them ("develop"), the other half is only run to
report ("final"). A case counts as found where verdict and layers are right exactly.
There are two sets, each in halves: the first models, and further ones with dropout
inside, losses that layers add, fine heads, embeddings and masks (`--set=further`).

Time: about five minutes on two CPU cores, two for the further models.
"""

import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.table import Table

import tfamp
from benchmarks import faults

SETS = {
    "first": (faults.FIRST_CASES, faults.FIRST_FAILURES, "guilty_layers"),
    "further": (faults.FURTHER_CASES, faults.FURTHER_FAILURES, "guilty_layers_further"),
}
DTYPES = ("float16", "bfloat16")
SPLITS = ("develop", "final")
# One of each half, and of each set.
_SMOKE = ("mlp", "normalization_far_inside", "nan_in_y", "cube")
FLAGS = (
    ("enum", "set", "first", list(SETS), "Models."),
    ("list", "splits", list(SPLITS), "Which half."),
    ("integer", "seeds", 2, "Models of each case."),
    ("string", "only", "", "Part of a case's name."),
    ("bool", "all", False, "Show what is right too."),
)


def sensitivities(cases: Sequence[faults.Case], seeds: int) -> Iterator[dict[str, Any]]:
    """Yields what was found of each precision case, in each dtype and for each seed."""
    for case in cases:
        for seed in range(seeds):
            for dtype in DTYPES:
                row = {
                    "case": case.name,
                    "kind": case.kind,
                    "dtype": dtype,
                    "seed": seed,
                    "depth": case.depth,
                    "style": case.style,
                    "expected": case.verdict[dtype],
                }
                began = time.perf_counter()
                try:
                    model, batches = case.build(seed)
                    found = tfamp.sensitivity(model, _dataset(batches), dtype=dtype)
                    guilty = frozenset(found.guilty)
                    is_right = (
                        found.verdict == case.verdict[dtype]
                        and guilty in case.guilty[dtype]
                    )
                    reasons = {each.reason for each in found.layers if each.is_guilty}
                    row |= {
                        "found": found.verdict,
                        "guilty": sorted(guilty),
                        "right": is_right,
                        "reasons": sorted(reasons),
                        "reason_wanted": sorted(case.reasons[dtype]),
                        "reason_right": not case.reasons[dtype]
                        or bool(reasons & case.reasons[dtype]),
                        "is_control": not any(case.guilty[dtype] - {frozenset()})
                        and case.verdict[dtype] == "safe",
                    }
                except Exception as error:  # a tool that fails has not found it
                    traceback.print_exc()
                    text = f"{type(error).__name__}: {error}"[:200]
                    row |= {"found": text, "guilty": [], "right": False}
                row["wanted"] = [sorted(paths) for paths in case.guilty[dtype]][:3]
                row["seconds"] = round(time.perf_counter() - began, 2)
                yield row


def triages(failures: Sequence[faults.Failure], seeds: int) -> Iterator[dict[str, Any]]:
    """Yields what was found of each failing step, for each seed."""
    for failure in failures:
        for seed in range(seeds):
            row = {
                "case": failure.name,
                "kind": failure.cause,
                "seed": seed,
                "expected": failure.cause,
                "wanted": sorted(failure.layers),
            }
            try:
                model, batch = failure.build(seed)
                found = tfamp.triage(model, batch)
                row |= {
                    "found": found.cause,
                    "guilty": [] if found.layer is None else [found.layer],
                    "right": found.cause == failure.cause,
                    "layer_right": not failure.layers or found.layer in failure.layers,
                }
            except Exception as error:  # a tool that fails has not found it
                traceback.print_exc()
                text = f"{type(error).__name__}: {error}"[:200]
                row |= {"found": text, "guilty": [], "right": False}
            yield row


def _dataset(batches: Any) -> Any:
    """Returns batches as a dataset; they may differ in shape."""
    if isinstance(batches, tf.data.Dataset):
        return batches
    first, *rest = (tf.data.Dataset.from_tensors(batch) for batch in batches)
    for each in rest:
        first = first.concatenate(each)
    return first


def show(title: str, rows: Sequence[dict[str, Any]], *, everything: bool) -> None:
    """Prints what was not found, and how many were."""
    table = Table(title=title, title_justify="left")
    for column in ("case", "kind", "expected", "found", "wanted", "named"):
        table.add_column(column, overflow="fold")
    for row in rows:
        if everything or not (
            row["right"]
            and row.get("layer_right", True)
            and row.get("reason_right", True)
        ):
            name = f"{row['case']} {row.get('dtype', '')} {row['seed']}"
            table.add_row(
                name,
                row["kind"],
                row["expected"],
                row["found"],
                str(row["wanted"]),
                " ".join(
                    str(row.get(key, ""))
                    for key in ("guilty", "reasons", "reason_wanted")
                ),
            )
    Console(width=150).print(table)
    print(f"{title}: {sum(row['right'] for row in rows)} of {len(rows)} right")


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns how many of the cases were found, by dtype or of all."""
    if not rows:
        return {}
    if "dtype" not in rows[0]:
        named = [row for row in rows if row["wanted"]]
        return {
            "causes": _part(rows, "right"),
            "layers": _part(named, "layer_right"),
        }
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        own = [row for row in rows if row["dtype"] == dtype]
        faulty = [row for row in own if not row.get("is_control")]
        controls = [row for row in own if row.get("is_control")]
        found[dtype] = {
            "found": _part(faulty, "right"),
            "reasons": _part([r for r in faulty if r["right"]], "reason_right"),
            "alarms": [sum(not row["right"] for row in controls), len(controls)],
        }
    return found


def _part(rows: Sequence[dict[str, Any]], key: str) -> list[int]:
    return [sum(bool(row.get(key)) for row in rows), len(rows)]


def record_name(settings: Any) -> str:
    """Returns the name of the file that keeps the figures."""
    return SETS[settings.set][2]


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures, and prints what was missed."""
    warnings.simplefilter("ignore", UserWarning)
    if settings.smoke:
        settings.seeds = 1

    def chosen(name: str) -> bool:
        return name in _SMOKE if settings.smoke else settings.only in name

    cases, failures, _ = SETS[settings.set]
    result: dict[str, Any] = {"seeds": settings.seeds}
    for split in settings.splits:
        own = [c for c in cases if c.split == split and chosen(c.name)]
        layers = list(sensitivities(own, settings.seeds))
        failing = [f for f in failures if f.split == split and chosen(f.name)]
        steps = list(triages(failing, settings.seeds))
        show(f"{split}, sensitivity", layers, everything=settings["all"].value)
        show(f"{split}, triage", steps, everything=settings["all"].value)
        result[split] = {
            "sensitivity": summary(layers),
            "triage": summary(steps),
            "missed": [
                row
                for row in (*layers, *steps)
                if not (row["right"] and row.get("layer_right", True))
            ],
        }
    return result
