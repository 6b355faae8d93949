"""`tfamp.compare`: float32 against a policy, measured, judged and written up."""

import contextlib
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tfamp
from tfamp.comparison.result import Comparison, conclude
from tfamp.comparison.verdict import Better, choose_metric, direction
from tfamp.machine import devices
from tfamp.plan import PrecisionPlan
from tfamp.records import checks, versions
from tfamp.trials import parcel
from tfamp.trials.run_records import Context, Run, Task
from tfamp.trials.runner import run_all
from tfamp.trials.scores import differences
from tfamp.trials.variant import Variant, plan_file


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
    directory: str | os.PathLike[str] | None = None,
    resume: bool = False,
    command: str = "",
    on_run: Callable[[Run], None] = lambda run: None,
) -> Comparison:
    """Trains a model under several policies, and says which are as good and faster.

    Each policy and seed is trained by `fit` in a fresh process from the same weights,
    the policies of a seed after one another. Ctrl-C ends it with the runs there are. On
    a GPU use it from a process that has not used the GPU yet, which would leave no
    memory to the runs; `tfamp compare` does so.

    Args:
        build_model: Returns a compiled model, or (model, train, validation) where no
            data is passed. Called in each process once its policy is set, with `seed`
            and `epochs` where it has such arguments. Or its name, "module:function".
        train: A function that returns training data, or what `fit` takes; the elements
            of a dataset are written down once and keep their order.
        validation: Likewise; without it the metric is that of the training data.
        policies: At least two of "float32", "auto", "mixed_bfloat16" and so on, or
            plans or their files. A prefix "keras:" leaves out tfamp, a suffix "+xla"
            compiles with XLA. The fastest float32 is what the others are held against.
        seeds: How many, or which. Two are needed for a verdict, three for a good one.
        epochs: Passes over the training data.
        tolerance: The loss of the metric that counts as none: absolute where more is
            better, else a part of its mean. None is 0.005 for metrics in [0, 1] of
            which more is better, such as accuracies, and 5 % of every other one.
        metric: What quality is judged by; None takes the first compiled metric.
        better: "max" or "min"; None goes by the metric's name, where that is known.
        batch_size: For arrays; None takes 32.
        directory: Where records and logs of the runs are kept; None keeps none.
        resume: Take the finished runs of `directory`, and do what is missing.
        command: How to repeat it from a shell, for the report.
        on_run: Gets each run as it ends.

    Raises:
        RuntimeError: The first run failed; the end of its log is in the message.
        TypeError: An argument has the wrong type, or cannot go to another process.
        ValueError: An argument is unknown, or `directory` has other runs.

    Example:
        >>> result = compare(build_model, train, validation)  # doctest: +SKIP
        >>> result.verdict  # doctest: +SKIP
        'equivalent and faster'
        >>> result.ratio("examples_per_second", "auto")  # doctest: +SKIP
        Interval(estimate=1.92, low=1.85, high=1.99)
    """
    name = parcel.name_of(build_model)
    if not isinstance(seeds, (list, tuple, range)):
        seeds = range(checks.positive_int("seeds", seeds))
    chosen = tuple(checks.positive_int("seeds", seed, minimum=0) for seed in seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"`seeds` is {seeds!r}; expected a number of seeds, or different ones. "
            "Pass for example 5."
        )
    checks.positive_int("epochs", epochs)
    if batch_size is not None:
        checks.positive_int("batch_size", batch_size)
    if tolerance is not None:
        tolerance = checks.positive("tolerance", tolerance)
    if better is not None:
        checks.choice("better", better, ("max", "min"))
    elif metric is not None:
        direction(metric.removeprefix("val_"))

    def check(run: Run) -> None:
        """Refuses what the metric of a run cannot be judged by, before other runs."""
        found = choose_metric([run], metric)
        if better is None:
            direction(found)

    with contextlib.ExitStack() as stack:
        if directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="tfamp-compare-")
            directory = stack.enter_context(temporary)
        folder = Path(directory).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        # Other processes read a plan as a file.
        given = [policies] if isinstance(policies, str) else policies
        words = tuple(str(Variant.named(plan_file(folder, each))) for each in given)
        if len(words) < 2 or len(set(words)) < len(words):
            raise ValueError(
                f"`policies` is {tuple(given)!r}; expected at least two different ones "
                "to compare. Pass for example ('float32', 'auto')."
            )
        task = Task("", epochs=epochs, batch_size=batch_size)
        job = folder / "job.json"  # what all runs share
        is_other = job.exists() and Task.from_json(job) != task
        if job.exists() and (is_other or not resume):
            what = "other settings" if is_other else "an earlier comparison"
            raise ValueError(
                f"`directory` is {str(folder)!r}, which has runs of {what}; expected "
                "an empty folder, or the same settings and `resume=True`. Pass another."
            )
        task.to_json(job)
        stack.callback(parcel.discard, folder)  # after Ctrl-C, too
        notes = parcel.pack(folder, build_model, train, validation)
        runs = run_all(folder, words, chosen, task, check=check, on_run=on_run)
        return conclude(
            runs,
            title=name,
            policies=words,
            seeds=chosen,
            metric=metric,
            better=better,
            tolerance=tolerance,
            context=Context(
                devices=devices.devices(),
                versions={"tfamp": tfamp.__version__, **versions.installed_versions()},
                system=f"{platform.platform()}, Python {platform.python_version()}",
                num_cores=os.cpu_count() or 1,
                command=command,
                date=time.strftime("%Y-%m-%d", time.gmtime()),
            ),
            notes=notes,
            examples=lambda pairs, metric: differences(folder, pairs, metric),
        )
