"""`tfamp.compare`: float32 against a policy, measured, judged and written up."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from tfamp.comparison.judgement import (
    Better,
    choose_metric,
    direction,
)
from tfamp.comparison.result import Comparison, conclude
from tfamp.plan import PrecisionPlan
from tfamp.records import checks
from tfamp.trials import parcel, tasks
from tfamp.trials.examples import differences
from tfamp.trials.run_records import Context, Run
from tfamp.trials.runner import run_all
from tfamp.trials.tasks import Task, checked_policies, checked_seeds


@checks.knows_other_names
def compare(
    build_model: Callable[..., Any] | str,
    train: Any = None,
    validation: Any = None,
    *,
    policies: Sequence[str | PrecisionPlan] = ("float32", "auto"),
    seeds: int | Sequence[int] = 3,
    epochs: int = 1,
    tolerance: float | None = None,
    metric: str | None = None,
    better: Better | None = None,
    batch_size: int | None = None,
    latency_batch_sizes: Sequence[int] = (1, 8, 32),
    directory: str | os.PathLike[str] | None = None,
    resume: bool = False,
    timeout_seconds: float | None = None,
    command: str = "",
    on_run: Callable[[Run], None] | None = None,
) -> Comparison:
    """Trains a model under several policies, and says which are as good and faster.

    Each policy and seed is trained by `fit` in a fresh process, so that memory peaks,
    traced functions and random states are its own. The policies of a seed follow one
    another, so that a machine that gets slower slows all of them, and start from the
    same weights. Quality is judged by an equivalence test on the differences of pairs,
    speed by an interval of their ratios. Ctrl-C ends it with the runs there are.

    On a GPU use it from a process that has not used the GPU yet: TensorFlow takes all
    of its memory and would leave none to the runs. `tfamp compare` does so.

    Args:
        build_model: Returns a compiled model, or (model, train, validation) where no
            data is passed. Called in each process once its policy is set, with `seed`
            and `epochs` where it has arguments of these names. Or its name, as
            "module:function".
        train: A function that returns training data, a `tf.data.Dataset` of batches,
            a `Pipeline`, a `PyDataset`, or arrays, (x, y) or (x, y, sample_weight).
            The elements of a dataset are written down once and keep their order.
        validation: Likewise; without it the metric is that of the training data.
        policies: At least two of "float32", "auto", "mixed_bfloat16" and so on, or
            plans or their files. A prefix "keras:" leaves out tfamp, a suffix "+xla"
            compiles with XLA. The fastest float32 is what the others are held against.
        seeds: How many, or which. Two are needed for a verdict, three for a good one.
        epochs: Passes over the training data.
        tolerance: The loss of the metric that counts as none: absolute where more is
            better, else a part of its mean. None is 0.005 for accuracies and other
            metrics in [0, 1] of which more is better, and 5 % of every other metric.
        metric: What quality is judged by; None takes the first compiled metric.
        better: "max" or "min"; None goes by the metric's name, where that is known.
        batch_size: For arrays; None takes 32.
        latency_batch_sizes: Sizes of the timed calls of the trained model, besides the
            size of a training batch.
        directory: Where records and logs of the runs are kept; None keeps none.
        resume: Take the finished runs of `directory`, of the same settings, and do
            what is missing.
        timeout_seconds: The most that a run may take; None for no end.
        command: How to repeat it from a shell, for the report.
        on_run: Gets each run as it ends.

    Raises:
        RuntimeError: The first run failed; the end of its log is in the message.
        TypeError: An argument has the wrong type, or cannot go to another process.
        ValueError: An argument is unknown, `directory` has runs that are none of this
            comparison's, or a metric of unknown direction has no `better`.

    Example:
        >>> result = compare(build_model, train, validation)  # doctest: +SKIP
        >>> result.verdict  # doctest: +SKIP
        'equivalent and faster'
        >>> result.ratio("examples_per_second", "auto")  # doctest: +SKIP
        Interval(estimate=1.92, low=1.85, high=1.99)
    """
    name = parcel.name_of(build_model)
    chosen = checked_seeds(seeds)
    checks.positive_int("epochs", epochs)
    for size in (*latency_batch_sizes, 1 if batch_size is None else batch_size):
        checks.positive_int("batch_size", size)
    if tolerance is not None:
        tolerance = checks.positive("tolerance", tolerance)
    if better is not None:
        checks.choice("better", better, ("max", "min"))
    elif metric is not None:
        direction(metric.removeprefix("val_"))
    if resume and directory is None:
        raise ValueError(
            "`resume` is True without a `directory`; expected the folder that has the "
            "finished runs. Pass it, and keep it from the first call on."
        )
    if timeout_seconds is not None:
        timeout_seconds = checks.positive("timeout_seconds", timeout_seconds)
    for module in ("cloudpickle", "psutil"):
        checks.require(module, extra="report", purpose="`tfamp.compare`")
    given = [policies] if isinstance(policies, str) else policies
    with tasks.opened(directory) as folder:
        # Other processes read a plan as a file.
        words = checked_policies([tasks.plan_file(folder, each) for each in given])
        task = Task(
            "",
            epochs=epochs,
            batch_size=batch_size,
            latency_batch_sizes=tuple(latency_batch_sizes),
        )
        tasks.begin(folder, task, resume=resume)
        notes = parcel.pack(folder, build_model, train, validation)
        runs = run_all(
            folder,
            words,
            chosen,
            dataclasses.replace(task, command=command),
            check=functools.partial(_check_metric, metric=metric, better=better),
            on_run=on_run or (lambda run: None),
            timeout_seconds=timeout_seconds,
        )
        context = folder / tasks.CONTEXT
        comparison = conclude(
            runs,
            title=name,
            policies=words,
            seeds=chosen,
            metric=metric,
            better=better,
            tolerance=tolerance,
            context=Context.from_json(context) if context.is_file() else None,
            notes=notes,
            examples=functools.partial(differences, folder),
        )
        parcel.discard(folder)
    return comparison


def _check_metric(run: Run, *, metric: str | None, better: Better | None) -> None:
    """Refuses what the metric of a run cannot be judged by, before the other runs."""
    found = choose_metric([run], metric)
    if better is None:
        direction(found)
