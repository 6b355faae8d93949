"""`tfamp.tune`: the cheapest plan of a model that is as good as float32."""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from absl import logging

import tfamp
from tfamp.dtypes.settings import make_settings
from tfamp.machine import cpus, devices
from tfamp.models import put_under
from tfamp.numerics.sensitivity.result import Sensitivity
from tfamp.numerics.sensitivity.search import sensitivity
from tfamp.plan import PrecisionPlan, read_plan
from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.records.formats import HALF
from tfamp.records.versions import installed_versions
from tfamp.stepping.arguments import build, dataset_of, first_batch
from tfamp.stepping.unchanged import unchanged
from tfamp.tuning import measurement
from tfamp.tuning.candidates import Candidates, Objective, savings_of
from tfamp.tuning.judges import (
    ERROR_RATE,
    FixedWeights,
    ShortTrainings,
    evaluated,
)
from tfamp.tuning.measured_policies import model_of
from tfamp.tuning.policy_steps import put_back
from tfamp.tuning.search import Checkpoint, Evaluation, Search

POLICIES = ("mixed_float16", "mixed_bfloat16")
OBJECTIVES = ("time", "memory", "size")
# Below this share of a step no clock sees a gain.
MIN_SAVING = 0.005
# Of validation data without end so much is used.
_MAX_BATCHES = 1000


def tune(
    build_model_or_model: Callable[[], keras.Model] | keras.Model,
    data: Any,
    *,
    policy: str | os.PathLike[str] | PrecisionPlan,
    tolerance: float,
    metric: Any = None,
    max_evaluations: int = 12,
    validation: Any = None,
    objective: Objective = "time",
    relax_rules: bool = False,
    training: bool = True,
    batch_size: int = 32,
    num_batches: int = 3,
    seeds: int = 3,
    num_steps: int = 50,
    checkpoint: str | os.PathLike[str] | None = None,
) -> PrecisionPlan:
    """Finds which layers have to stay in float32 for a metric to stay what it is.

    One pass in which each layer runs alone in half precision ranks the layers. The
    default rules and the guilty ones make the first plan; then layers are given back to
    half precision, or taken from it, for as long as the metric holds. What is chosen is
    judged once more on examples that the choice has not seen. Where nothing in half
    precision holds, the plan is float32 and says why.

    Args:
        build_model_or_model: A trained, compiled model: plans are compared by what it
            gives for each example. Or a function without arguments that returns a
            compiled model: then short trainings of equal seeds are compared.
        data: As `fit` takes it. Ranks the layers, and trains what the function builds.
        policy: "mixed_float16" or "mixed_bfloat16"; or a plan, or its file, to start
            from.
        tolerance: By how much the metric may be worse: of accuracies and the like as
            it is, 0.005 for half a percent; of losses and errors relative to float32.
        metric: None for the model's loss; the name of a metric of Keras that is a mean
            over examples; or a function of targets and outputs that returns a value
            for each example, any change of which counts as worse.
        max_evaluations: Plans that are tried, the judgement on fresh data included.
        validation: Examples that the metric is taken of, as `fit` takes them; None
            takes `data`. Every second batch is left for the judgement at the end; of
            more than 1,000 the first are used.
        objective: What half precision is to save: "time", "memory" or "size".
        relax_rules: Whether layers that default rules keep may go to half precision
            where that is measured to do no harm.
        training: Whether the plan is to train; else gradients do not count.
        batch_size: Examples in a batch of arrays.
        num_batches: Batches of the pass that ranks.
        seeds: Trainings a plan, where a function is given.
        num_steps: Steps of each of them.
        checkpoint: A file in which evaluations are kept as they come; a later call
            with the same arguments goes on from there.

    Returns:
        The `PrecisionPlan`; `.evidence["tuning"]` has the path of the search.

    Raises:
        TypeError: It is neither a model nor a function that returns one.
        ValueError: The data is empty, the metric is missing or not finite in float32,
            the function builds another model each time, the plan is another model's,
            or there are fewer examples than could show the tolerance.

    Example:
        >>> import numpy as np
        >>> keras.utils.set_random_seed(0)
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> model.compile("sgd", "mse")
        >>> x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
        >>> plan = tune(model, (x, x[:, :2]), policy="mixed_bfloat16", tolerance=0.05)
        >>> plan.policy
        'mixed_bfloat16'
    """
    checks.positive("tolerance", tolerance)
    checks.positive_int("max_evaluations", max_evaluations, minimum=2)
    checks.choice("objective", objective, OBJECTIVES)
    start = read_plan(policy)
    name = (
        start.policy if start is not None else checks.choice("policy", policy, POLICIES)
    )
    if keras.DTypePolicy(name).compute_dtype not in HALF:
        raise ValueError(
            f"The plan to start from has policy {name!r}; expected one of {POLICIES}. "
            "There is nothing to tune in float32."
        )
    cpus.avoid_broken_amx()
    is_model = isinstance(build_model_or_model, keras.Model)
    model = model_of(build_model_or_model)
    dataset = dataset_of(data, batch_size)
    build(model, first_batch(dataset))
    if start is not None:
        start.check(model)
    held_out = dataset if validation is None else dataset_of(validation, batch_size)
    examples = list(held_out.take(_MAX_BATCHES))
    halves = examples[::2], examples[1::2]
    if not halves[1]:
        raise ValueError(
            f"The examples make {len(examples)} batches of {batch_size}; expected at "
            "least two: one to choose by, one to judge by. Pass a smaller "
            "`batch_size`, or more examples as `validation`."
        )
    judge: Any
    if is_model:
        judge = FixedWeights(model, halves, metric, tolerance)
    else:
        judge = ShortTrainings(
            build_model_or_model, dataset, halves, metric, seeds, num_steps
        )
    return _Tuning(
        model=model,
        dataset=dataset,
        policy=name,
        start=start,
        judge=judge,
        tolerance=tolerance,
        max_evaluations=max_evaluations,
        objective=objective,
        relax_rules=relax_rules,
        training=training,
        num_batches=num_batches,
        checkpoint=checkpoint,
    ).run()


@dataclasses.dataclass
class _Tuning:
    """One call of `tune`, by whose arguments its own are named."""

    model: keras.Model
    dataset: Any
    policy: str
    start: PrecisionPlan | None
    judge: Any
    tolerance: float
    max_evaluations: int
    objective: Objective
    relax_rules: bool
    training: bool
    num_batches: int
    checkpoint: str | os.PathLike[str] | None

    def __post_init__(self) -> None:
        self._began = time.perf_counter()
        self._confirmed: Evaluation | None = None

    def run(self) -> PrecisionPlan:
        dtype = keras.DTypePolicy(self.policy).compute_dtype
        found = sensitivity(
            self.model, self.dataset, dtype=dtype, num_batches=self.num_batches
        )
        base = self._base_plan()
        with unchanged(self.model), put_back(self.model):
            put_under(self.model, make_settings("float32"))
            saved = savings_of(
                self.model,
                self.dataset,
                dtype,
                objective=self.objective,
                training=self.training,
            )
        self._candidates = Candidates(
            self.model,
            base,
            found,
            saved,
            relax_rules=self.relax_rules,
            training=self.training,
            judges_gradients=isinstance(self.judge, ShortTrainings),
        )
        self._evaluations = Checkpoint(self.checkpoint, self._identity())
        with progress("Trying plans", self.max_evaluations, unit="plans") as self._done:
            search = Search(
                self._candidates.suspects,
                self._evaluate,
                max_evaluations=self.max_evaluations - 1,
                min_saving=MIN_SAVING,
            )
            self._search = search
            best = search.run()
        plan, reason = self._concluded(best, found)
        return self._with_evidence(plan, reason, search, found, saved)

    def _base_plan(self) -> PrecisionPlan:
        """Returns the plan to start from: that given, or the default rules."""
        if self.start is not None:
            return self.start
        with put_back(self.model):
            put_under(self.model, make_settings(self.policy))
            return PrecisionPlan.from_model(self.model)

    def _evaluate(self, float32: tuple[str, ...]) -> Evaluation:
        known = self._evaluations.get(float32)
        if known is None:
            known = self._judged(
                float32, half=0, rate=ERROR_RATE / 2 / self.max_evaluations
            )
            self._evaluations.add(known)
        self._done(len(self._search.tried) + 1)
        return known

    def _judged(self, float32: Sequence[str], *, half: int, rate: float) -> Evaluation:
        plan = self._candidates.plan(float32)
        return evaluated(self.judge, plan, float32, half, rate, self.tolerance)

    def _concluded(
        self, best: Evaluation | None, found: Sensitivity
    ) -> tuple[PrecisionPlan, str]:
        """Judges the best plan on fresh examples; float32 where it does not hold."""
        if best is None:
            return self._float32(), (
                "no plan in half precision kept the metric within the tolerance in "
                f"{len(self._search.tried)} evaluations ({found.verdict}: "
                f"{found.advice})"
            )
        try:
            self._confirmed = self._judged(best.float32, half=1, rate=ERROR_RATE / 2)
        except KeyboardInterrupt:
            return self._candidates.plan(best.float32), (
                f"worse by {best.worsening:.3g}, at most {best.bound:.3g}; interrupted "
                "before it was judged on fresh examples"
            )
        if not self._confirmed.holds:
            return self._float32(), (
                "the best plan did not keep the metric within the tolerance on fresh "
                f"examples: worse by {self._confirmed.worsening:.3g}, at most "
                f"{self._confirmed.bound:.3g}"
            )
        number = len(best.float32)
        kept = {0: "no layer is", 1: "1 layer is"}.get(number, f"{number} layers are")
        return self._candidates.plan(best.float32), (
            f"worse by {self._confirmed.worsening:.3g}, at most "
            f"{self._confirmed.bound:.3g}, on fresh examples; {kept} in "
            "float32 beyond those that rules keep"
        )

    def _float32(self) -> PrecisionPlan:
        with put_back(self.model):
            put_under(self.model, make_settings("float32"))
            return PrecisionPlan.from_model(self.model)

    def _with_evidence(
        self,
        plan: PrecisionPlan,
        reason: str,
        search: Search,
        found: Sensitivity,
        saved: dict[str, float],
    ) -> PrecisionPlan:
        logging.info("Plan for %r: %s.", self.model.name, reason)
        tuning = {
            "reason": reason,
            "policy": self.policy,
            "tolerance": self.tolerance,
            "metric": self.judge.score.name,
            "float32_metric": self.judge.reference,
            "judged_by": self.judge.kind,
            "objective": self.objective,
            "evaluations": [each.to_dict() for each in search.tried],
            "confirmed": None if self._confirmed is None else self._confirmed.to_dict(),
            "layers": [
                {
                    "path": layer.path,
                    "forward_error": _finite(layer.forward_error),
                    "backward_error": _finite(layer.backward_error),
                    "saving": saved.get(layer.path, 0.0),
                    "is_guilty": layer.is_guilty,
                }
                for layer in found.layers
            ],
            "seconds": time.perf_counter() - self._began,
        }
        evidence = {
            "devices": [device.name for device in devices.devices()],
            "versions": {**installed_versions(), "tfamp": tfamp.__version__},
            "model": measurement.model_digest(self.model),
            "tuning": tuning,
        }
        return plan.replace(evidence=evidence)

    def _identity(self) -> list[Any]:
        return [
            measurement.model_digest(self.model),
            self.policy,
            self.judge.score.name,
            self.judge.reference,
            self.tolerance,
        ]


def _finite(value: float) -> Any:
    return value if np.isfinite(value) else str(value)
