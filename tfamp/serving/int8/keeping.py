"""The fewest layers that stay in float with which an int8 model passes the gate."""

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras

from tfamp.plan import PrecisionPlan
from tfamp.records.record import Record
from tfamp.serving.int8.ranking import LayerError, Mode, Ranking, rank
from tfamp.serving.parity.result import Parity
from tfamp.tuning.search import Evaluation, Search, Suspect

MAX_EVALUATIONS = 3
# The entry of a plan's evidence.
_EVIDENCE = "int8"


@dataclasses.dataclass(frozen=True)
class Kept(Record):
    """What the search for layers that int8 spoils came to.

    Args:
        layers: Layers that stay in float, each with the reason.
        ranking: What each layer came to alone.
        evaluations: The exports that were tried, in order.
        holds: Whether the last of `layers` passed; where none did, the layers are those
            of the attempt that was least worse.
        seconds: For ranking and evaluations.
    """

    layers: dict[str, str]
    ranking: Ranking
    evaluations: tuple[Evaluation, ...]
    holds: bool
    seconds: float


def keep_guilty(
    model: keras.Model,
    inputs: Any,
    evaluate: Callable[[tuple[str, ...]], Parity],
    *,
    mode: Mode = "dynamic",
    per_channel: bool = True,
    fixed: Collection[str] = (),
    max_evaluations: int = MAX_EVALUATIONS,
) -> Kept:
    """Finds the layers that have to stay in float for an int8 export to pass.

    One simulated pass ranks the layers; exports that keep the first of them are tried
    until one passes, and fewer then. Most models need none: where the ranking finds
    nobody guilty, int8 everywhere is tried first.

    Args:
        model: The float32 model.
        inputs: A batch as the model takes it.
        evaluate: Exports with these layers in float, by path, and compares; it need not
            time anything.
        mode: As for `rank`. In "static" a kept layer's outlier is rounded by the layer
            that gives it, so that stays in float with it.
        per_channel: As for `rank`.
        fixed: Layers that stay in float in any case, such as heads; `evaluate` is not
            told of them.
        max_evaluations: Exports that may be tried.

    Returns:
        The layers and the reasons.
    """
    began = time.perf_counter()
    ranking = rank(model, inputs, mode=mode, per_channel=per_channel)
    by_path = {layer.path: layer for layer in ranking.layers}

    def with_all(paths: Sequence[str]) -> tuple[str, ...]:
        needed = with_producers(paths, by_path, mode)
        return tuple(path for path in needed if path not in fixed)

    def evaluated(paths: tuple[str, ...]) -> Evaluation:
        since = time.perf_counter()
        parity = evaluate(with_all(paths))
        return _evaluation(paths, parity, time.perf_counter() - since)

    # What stays anyway may need the layer that gives its outlier to stay, too.
    free = [layer for layer in ranking.layers if with_all([layer.path])]
    search = Search(_suspects(free), evaluated, max_evaluations=max_evaluations)
    best = search.run()
    chosen = best or min(search.tried, key=lambda each: each.worsening)
    return Kept(
        reasons(with_all(chosen.float32), by_path),
        ranking,
        tuple(search.tried),
        best is not None,
        time.perf_counter() - began,
    )


def passes(parity: Parity) -> bool:
    """States whether an int8 export may stand: nothing seen is beyond the tolerance.

    An "undecided" for want of examples is no reason to keep layers in float.
    """
    within = all(each.worsening <= each.tolerance for each in parity.metrics)
    return parity.is_as_good or (parity.verdict == "undecided" and within)


def with_producers(
    paths: Sequence[str], by_path: Mapping[str, LayerError], mode: Mode
) -> tuple[str, ...]:
    """Returns layers, with those that give their outlier channels in static int8.

    Example:
        >>> spoilt = LayerError("b", "Dense", 1.4, 0.1, 900.0, producers=("a",))
        >>> with_producers(["b"], {"b": spoilt}, "static")
        ('b', 'a')
    """
    found = list(paths)
    if mode == "static":
        found += [each for path in paths for each in by_path[path].producers]
    return tuple(dict.fromkeys(found))


def reasons(paths: Sequence[str], by_path: Mapping[str, LayerError]) -> dict[str, str]:
    """Returns why each layer stays in float."""
    takers = {
        producer: layer.path
        for layer in by_path.values()
        for producer in layer.producers
    }
    found = {}
    for path in paths:
        why = by_path[path].reason if path in by_path else ""
        if not why and path in takers:
            why = f"it gives the outlier channel of {takers[path]!r}"
        found[path] = why or "the gate needs it, as the next in the ranking"
    return found


def plan_of(model: keras.Model, kept: Kept) -> PrecisionPlan:
    """Returns the plan of a float32 model, with what int8 leaves in float and why.

    `kept_in` reads it: training under the plan is not changed by it.
    """
    plan = PrecisionPlan.from_model(model)
    return plan.replace(evidence={**plan.evidence, _EVIDENCE: kept.to_dict()})


def kept_in(plan: PrecisionPlan) -> Kept | None:
    """Returns what a plan says of int8, None where it says nothing."""
    found = plan.evidence.get(_EVIDENCE)
    return None if found is None else Kept.from_dict(found)


def _suspects(layers: Sequence[LayerError]) -> list[Suspect]:
    # A share of the kernels would do; what counts is that few layers are kept.
    share = 1.0 / max(len(layers), 1)
    return [
        Suspect(layer.path, layer.error, share, layer.is_guilty) for layer in layers
    ]


def _evaluation(paths: tuple[str, ...], parity: Parity, seconds: float) -> Evaluation:
    worst = max(parity.metrics, key=lambda each: each.worsening - each.tolerance)
    return Evaluation(
        paths,
        worst.worsening,
        worst.bound,
        passes(parity),
        parity.num_examples,
        seconds,
    )
