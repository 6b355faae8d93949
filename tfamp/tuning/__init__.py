"""Chooses policies and layers' dtypes by measuring the user's own model."""

import math
import time
from collections.abc import Callable
from typing import Any, Literal

import keras
from absl import logging

from tfamp.dtypes.settings import IN_FORCE, make_settings
from tfamp.machine import cpus, devices
from tfamp.models import put_under
from tfamp.numerics.sensitivity import sensitivity
from tfamp.plan import PrecisionPlan
from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.stepping.arguments import build, dataset_of, first_batch
from tfamp.stepping.unchanged import seeds_put_back, unchanged
from tfamp.tuning.candidates import Candidates, savings_of
from tfamp.tuning.measured_policies import evidence_here, model_of, put_back
from tfamp.tuning.search import Evaluation, Judge, Search

POLICIES = ("mixed_float16", "mixed_bfloat16")
# Chance that a plan is taken whose metric is worse than the tolerance allows: half of
# it for all evaluations of a search together, half for the one on fresh data.
ERROR_RATE = 0.05
# Below this share of a step no clock sees a gain.
MIN_SAVING = 0.005
# Of validation data without end so much is used.
_MAX_BATCHES = 1000


def tune(
    build_model_or_model: Callable[[], keras.Model] | keras.Model,
    data: Any,
    *,
    policy: Literal["auto", "mixed_float16", "mixed_bfloat16"] = "auto",
    tolerance: float = 0.005,
    metric: Any = None,
    max_evaluations: int = 12,
    validation: Any = None,
    batch_size: int = 32,
    num_steps: int = 50,
) -> PrecisionPlan:
    """Finds which layers have to stay in float32 for a metric to stay what it is.

    A pass in which each layer runs alone in half precision ranks them. The default
    rules and the guilty layers make the first plan; then layers are given back to half
    precision, or taken from it, while the metric holds. What is chosen is judged once
    more on fresh examples. Where nothing holds, the plan is float32 and says why, in
    `.evidence["tuning"]`.

    Args:
        build_model_or_model: A trained, compiled model; or a function that returns a
            compiled one, which is trained for a moment in float32 first.
        data: As `fit` takes it. Ranks the layers, and trains what the function builds.
        policy: "mixed_float16" or "mixed_bfloat16"; "auto" takes what is enabled, or
            else suits the devices here, "mixed_bfloat16" where that is float32.
        tolerance: By how much the metric may be worse: of accuracies and the like as
            it is, 0.005 for half a percent; of losses and errors relative to float32.
        metric: None for the model's loss; the name of a metric of Keras that is a mean
            over examples; or a function of targets and outputs that returns a value
            for each example, any change of which counts as worse.
        max_evaluations: Plans that are tried, the judgment on fresh data included.
        validation: Examples that the metric is taken of; None takes `data`. Every
            second batch of the first 1,000 is left for the judgment at the end.
        batch_size: Examples in a batch of arrays.
        num_steps: Steps that a model is trained for which a function returned.

    Raises:
        TypeError: It is no model and returns none.
        ValueError: The metric is missing or not finite in float32, or there are fewer
            examples than could show the tolerance.

    Example:
        >>> plan = tune(model, (x, y), metric="accuracy")  # doctest: +SKIP
        >>> plan.to_json("plan.json")  # doctest: +SKIP
    """
    checks.positive("tolerance", tolerance)
    checks.positive_int("max_evaluations", max_evaluations, minimum=2)
    checks.positive_int("num_steps", num_steps)
    name = checks.choice("policy", policy, ("auto", *POLICIES))
    if name == "auto":
        settings = IN_FORCE.settings
        here = [] if settings is None else [settings.policy.name]
        here.append(devices.recommend(devices.devices()).policy)
        name = next((str(each) for each in here if each in POLICIES), POLICIES[1])
    dtype = keras.DTypePolicy(name).compute_dtype
    with seeds_put_back():
        cpus.avoid_broken_amx()
        began = time.perf_counter()
        model = model_of(build_model_or_model)
        dataset = dataset_of(data, batch_size)
        build(model, first_batch(dataset))
        held_out = dataset if validation is None else dataset_of(validation, batch_size)
        examples = list(held_out.take(_MAX_BATCHES))
        if len(examples) < 2:
            raise ValueError(
                f"The examples make {len(examples)} batches; expected two or more: one "
                "to choose by, one to judge by. Pass a smaller `batch_size`."
            )
        if model is not build_model_or_model:
            with put_back(model):
                put_under(model, make_settings("float32"))
                model.fit(dataset.repeat().take(num_steps), shuffle=False, verbose=0)
        judge = Judge(model, (examples[::2], examples[1::2]), metric)
        needed = 1
        if judge.is_rate and tolerance < 1:
            # So many can show a rate to be below the tolerance, at best.
            needed = math.ceil(math.log(ERROR_RATE / 2) / math.log1p(-tolerance))
        if judge.fewest < needed:
            raise ValueError(
                f"`tolerance` {tolerance} is below what {judge.fewest} examples in "
                f"each half can show; expected at least {needed}. Pass more of them."
            )
        found = sensitivity(model, dataset, dtype=dtype)
        with unchanged(model), put_back(model):
            put_under(model, make_settings("float32"))
            exact = PrecisionPlan.from_model(model)
            saved = savings_of(model, dataset, dtype)
        candidates = Candidates(model, name, found, saved)

        def evaluate(float32: tuple[str, ...], half: int = 0) -> Evaluation:
            done(len(search.tried))
            plan, rate = candidates.plan(float32), ERROR_RATE / 2
            how = {"rate": rate if half else rate / max_evaluations}
            return judge.evaluate(plan, float32, half, tolerance=tolerance, **how)

        with progress("Trying plans", max_evaluations, unit="plans") as done:
            search = Search(
                candidates.suspects,
                evaluate,
                max_evaluations=max_evaluations - 1,
                min_saving=MIN_SAVING,
            )
            best = search.run()
            confirmed = None if best is None else evaluate(best.float32, 1)
        plan = exact
        reason = (
            "no plan in half precision kept the metric within the tolerance in "
            f"{len(search.tried)} evaluations ({found.verdict}: {found.advice})"
        )
        if confirmed is not None:
            worse = f"worse by {confirmed.worsening:.3g}, at most {confirmed.bound:.3g}"
            reason = "the best plan did not keep the metric within the tolerance"
            if confirmed.holds:
                plan = candidates.plan(confirmed.float32)
                kept = ", ".join(map(repr, confirmed.float32)) or "none"
                reason = f"in float32 beyond what rules keep: {kept}"
            reason = f"{worse}, on fresh examples; {reason}"
        logging.info("Plan for %r: %s.", model.name, reason)
        tuning = {
            "reason": reason,
            "policy": name,
            "tolerance": tolerance,
            "metric": judge.score.name,
            "float32_metric": judge.reference,
            "evaluations": [each.to_dict() for each in search.tried],
            "confirmed": None if confirmed is None else confirmed.to_dict(),
            "layers": [
                {**layer.to_dict(), "saving": saved.get(layer.path, 0.0)}
                for layer in found.layers
            ],
            "seconds": time.perf_counter() - began,
        }
        return plan.replace(evidence={**evidence_here(), "tuning": tuning})
