"""Whether `tfamp.tune` finds the layers that need float32, in how few evaluations.

Models are trained in float32 with layers that half precision spoils, at places drawn by
a seed. Each is tuned at its trained weights, by examples of its own. The plan is judged
on fresh examples, and on those of the same model trained from another seed. The saving
it keeps is held against that of the best plan: of models with at most 8 layers that may
move, all sets of them are tried, the cheapest first, until one holds on the fresh
examples; of larger ones the best is the one with just the guilty layers.

Bisection finds the shortest beginning of the list of layers, in the order of the model,
that has to be in float32, keeps its last layer, and begins again until the plan holds.
Greedy search begins with all in float32 and gives back one layer after the other, the
dearest first, in as many evaluations as `tune` took. Both ask what `tune` asks.

Time: about six minutes on two CPU cores.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

import tfamp
from benchmarks import _tuner_models
from tfamp.machine import cpus
from tfamp.numerics.sensitivity import sensitivity
from tfamp.plan import PrecisionPlan
from tfamp.tuning import ERROR_RATE
from tfamp.tuning.candidates import Candidates
from tfamp.tuning.search import Judge, upper_bound

MOST_EVALUATIONS = 12
MOST_SEARCHED = 8
MOST_BISECTIONS = 60
BATCH = 128
# The figures: what they are of, and what they have to reach.
REQUIRED = {
    "met": ("Tolerance met on fresh examples and from other seeds", 0.95),
    "evaluations": ("Evaluations of a search, at most", MOST_EVALUATIONS),
    "kept": ("Share of the best saving kept, where all plans were tried", 0.9),
    "fewer": ("Models with several guilty layers in fewer plans than bisection", 0.8),
}
FLAGS = (
    ("integer", "seeds", 1, "Places of the guilty layers of each model."),
    ("string", "only", "", "Part of a model's name."),
)
Holds = Callable[[Sequence[str]], bool]


class Tried:
    """Plans of one model, each judged once."""

    def __init__(self, judge: Any, candidates: Candidates, tolerance: float) -> None:
        self._judge, self._tolerance = judge, tolerance
        self._plan = candidates.plan
        self._known: dict[tuple[frozenset[str], int], bool] = {}

    def holds(self, float32: Sequence[str]) -> bool:
        """Returns whether the metric holds by the bound that `tune` uses."""
        return self._answer(float32, 0)

    def holds_in_truth(self, float32: Sequence[str]) -> bool:
        """Returns whether it holds on the fresh examples, as they are."""
        return self._answer(float32, 1)

    def _answer(self, float32: Sequence[str], half: int) -> bool:
        key = frozenset(float32), half
        if key not in self._known:
            worse = self._judge.worsening(self._plan(float32), half)
            if half:
                found = float(np.mean(worse))
            else:
                rate = ERROR_RATE / 2 / MOST_EVALUATIONS
                found = upper_bound(worse, rate, is_rate=self._judge.is_rate)
            self._known[key] = found <= self._tolerance
        return self._known[key]


def by_cost(savings: dict[str, float]) -> Iterator[tuple[str, ...]]:
    """Yields all sets of layers, the one that costs the least saving first."""
    sets = itertools.chain.from_iterable(
        itertools.combinations(savings, number) for number in range(len(savings) + 1)
    )
    yield from sorted(sets, key=lambda paths: sum(savings[path] for path in paths))


def bisect(paths: Sequence[str], holds: Holds, most: int) -> int | None:
    """Returns how many plans bisection tries; None where more than `most`."""
    asked, found = 0, list[str]()

    def ask(number: int) -> bool:
        nonlocal asked
        asked += 1
        return holds([*found, *(p for p in paths[:number] if p not in found)])

    while asked <= most:
        if ask(0):
            return asked if asked <= most else None
        low, high = 0, len(paths)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if ask(middle) else (middle, high)
        if paths[high - 1] in found:
            return None  # not even all of them would do
        found.append(paths[high - 1])
    return None


def give_back(savings: dict[str, float], holds: Holds, most: int) -> list[str]:
    """Returns what greedy search has left in float32 after so many plans."""
    kept = list(savings)
    for path in sorted(savings, key=lambda path: -savings[path])[:most]:
        rest = [each for each in kept if each != path]
        if holds(rest):
            kept = rest
    return kept


def measure_run(case: _tuner_models.Case, places: int, *, epochs: int) -> dict:
    """Returns what was found of one model with its guilty layers at some places."""
    seed = 10 * places
    model, guilty, weights = case.trained(places, (seed, seed + 1), epochs=epochs)
    model.set_weights(weights[0])
    examples = [
        batches(*case.examples(own, 2048)) for own in (seed + 5000, seed + 6000)
    ]
    began = time.perf_counter()
    plan = tfamp.tune(
        model,
        case.examples(seed, 4096),
        policy=case.policy,
        tolerance=case.tolerance,
        metric=case.metric,
        max_evaluations=MOST_EVALUATIONS,
        validation=joined(examples[0]),
        batch_size=BATCH,
    )
    seconds = time.perf_counter() - began
    tuning = plan.evidence["tuning"]

    halves = examples[0][::2], examples[1]
    judge = Judge(model, halves, case.metric)
    tfamp.apply(model, "float32")
    dtype = keras.DTypePolicy(case.policy).compute_dtype
    found = sensitivity(model, case.examples(seed, 4096), dtype=dtype)
    saved = {layer["path"]: layer["saving"] for layer in tuning["layers"]}
    candidates = Candidates(model, case.policy, found, saved)
    savings = {suspect.path: suspect.saving for suspect in candidates.suspects}
    tried = Tried(judge, candidates, case.tolerance)
    fresh = float(np.mean(judge.worsening(plan, 1)))

    total = sum(savings.values())
    best = total - saving_lost(savings, guilty)
    is_searched = len(savings) <= MOST_SEARCHED
    if is_searched:
        held = next((s for s in by_cost(savings) if tried.holds_in_truth(s)), savings)
        best = total - sum(savings[path] for path in held)
    asked = len(tuning["evaluations"])
    greedy = give_back(savings, tried.holds, asked)
    steps = bisect(list(savings), tried.holds, MOST_BISECTIONS)
    is_known = tried.holds_in_truth(sorted(guilty))
    needed = [not tried.holds_in_truth(sorted(guilty - {path})) for path in guilty]

    def share(saving: float) -> float:
        return round(saving / best, 4) if best > 0 else 1.0

    model.set_weights(weights[1])
    other = batches(*case.examples(seed + 7000, 2048))
    again = Judge(model, (other, other), case.metric)
    elsewhere = float(np.mean(again.worsening(plan, 0)))
    return {
        "places": places,
        "layers": len(savings),
        "guilty": sorted(guilty),
        "guilty_suffice": is_known,
        "guilty_needed": sum(needed),
        "evaluations": asked + (tuning["confirmed"] is not None),
        "fresh": round(fresh, 5),
        "other_weights": round(elsewhere, 5),
        "met": [value <= case.tolerance for value in (fresh, elsewhere)],
        "float32": sorted(plan_float32(plan, savings)),
        "is_float32": plan.policy == "float32",
        "searched": is_searched,
        "kept": share(total - sum(savings[p] for p in plan_float32(plan, savings))),
        "greedy_kept": share(total - saving_lost(savings, greedy)),
        "bisection": None if steps is None else steps + 1,
        "seconds": round(seconds, 2),
    }


def plan_float32(plan: PrecisionPlan, paths: Any) -> set[str]:
    """Returns which of the layers and operations a plan has in float32."""
    if plan.policy == "float32":
        return set(paths)
    own = {operation.path for operation in plan.operations}
    return {p for p in paths if plan.layers.get(p) == "float32" or p in own}


def saving_lost(savings: dict[str, float], float32: Any) -> float:
    """Returns what layers in float32 cost, with what is inside them."""
    chosen = set(float32)
    return sum(
        saving
        for path, saving in savings.items()
        if any(path == each or path.startswith(f"{each}/") for each in chosen)
    )


def batches(x: np.ndarray, y: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns arrays in batches."""
    starts = range(0, len(x), BATCH)
    return [(x[start : start + BATCH], y[start : start + BATCH]) for start in starts]


def joined(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Returns batches as arrays."""
    return tuple(np.concatenate(each) for each in zip(*parts, strict=True))


def figures(cases: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Returns each figure that is required, and what was reached."""
    runs = [run for own in cases.values() for run in own]
    searched = [run["kept"] for run in runs if run["searched"]]
    several = [run for run in runs if len(run["guilty"]) > 1]
    fewer = [
        run["bisection"] is None or run["evaluations"] < run["bisection"]
        for run in several
    ]
    reached = {
        "met": mean([met for run in runs for met in run["met"]]),
        "evaluations": max(run["evaluations"] for run in runs),
        "kept": mean(searched),
        "fewer": mean(fewer),
    }
    found = {}
    for name, (what, required) in REQUIRED.items():
        own = reached[name]
        over = own is not None and (own - required) * (
            -1 if name == "evaluations" else 1
        )
        met = own is not None and over >= 0
        found[name] = {"what": what, "required": required, "reached": own, "met": met}
    return found


def mean(values: Sequence[Any]) -> float | None:
    """Returns the mean, None of nothing."""
    return round(statistics.fmean(values), 4) if values else None


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    cpus.avoid_broken_amx()  # ahead of the first product
    seeds, epochs = settings.seeds, 3
    if settings.smoke:
        seeds, epochs, settings.only = 1, 1, "MLP, differences"
    found = {
        case.name: [
            {**measure_run(case, place, epochs=epochs), "policy": case.policy}
            for place in range(seeds)
        ]
        for case in _tuner_models.CASES
        if settings.only in case.name
    }
    return {"seeds": seeds, "cases": found, "goals": figures(found)}
