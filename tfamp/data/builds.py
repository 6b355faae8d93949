"""What one build of a pipeline is: a dataset, and the stages that count in it.

tf.distribute lets every worker run the whole pipeline and keep each n-th batch of it,
so all of them have to bring the elements in one order. `.shard` divides the source
instead: then a worker reads and shuffles nothing but its own.
"""

from collections.abc import Sequence
from typing import Any, Literal

import rich.box
import tensorflow as tf

from tfamp.data._elements import of_unknown_length
from tfamp.data.plan import PipelinePlan, Role, has_role, make_plan
from tfamp.data.sources import Source
from tfamp.data.stages import Settings, Stage
from tfamp.data.stages.cache import FileCache
from tfamp.data.stages.workers import Shard
from tfamp.machine.cpus import num_usable_cpus
from tfamp.records import console

Autotune = bool | Literal["auto"]

_Policy = tf.data.experimental.AutoShardPolicy
_WORKER_JOBS = ("worker", "chief")


class Build:
    """A dataset of a pipeline, and copies of its stages with counts of their own."""

    def __init__(
        self, source: Source, stages: Sequence[Stage], autotune: Autotune
    ) -> None:
        self.stages = tuple(stage.for_build() for stage in stages)
        self._plan = make_plan(source, self.stages, settings_of(autotune))

    def dataset(self) -> tf.data.Dataset:
        """Returns the dataset, after every step's own checks."""
        plan = self._plan
        policy = shard_policy(plan)
        for stage in self.stages:
            if isinstance(stage, Shard):
                stage.check_workers(num_workers())
        dataset = plan.start()
        for step in plan.steps:
            step.check(dataset)
            dataset = step.apply(dataset, plan.settings)
        if num_workers() > 1 and any(step.name == "shard" for step in plan.steps):
            # A part of one of n workers has an n-th of the batches. tf.distribute cuts
            # these into n, so there are n times as many steps; `fit` would stop after
            # the length, which is therefore made unknown.
            dataset = of_unknown_length(dataset)
        options = tf.data.Options()
        options.deterministic = True
        options.autotune.enabled = plan.settings.autotune
        if not plan.settings.autotune:
            options.threading.private_threadpool_size = plan.settings.num_threads
        options.experimental_distribute.auto_shard_policy = policy
        return dataset.with_options(options)


def counted(stages: Sequence[Stage], builds: Sequence[Build]) -> list[Stage]:
    """Returns stages with what all builds of them have counted."""
    return [
        stage.with_counts_of([build.stages[number] for build in builds])
        for number, stage in enumerate(stages)
    ]


def describe(source: Source, stages: Sequence[Stage], autotune: Autotune) -> str:
    """Returns a table: stage, setting and reason in running order."""
    plan = make_plan(source, stages, settings_of(autotune))
    rows = [("source", *plan.source.explain(plan.source.dataset(plan.settings)))]
    dataset = plan.start()
    for step in plan.steps:
        rows.append((step.name, *step.explain(dataset, plan.settings)))
        dataset = step.preview(dataset, plan.settings)
    if plan.settings.autotune:
        threads = ("tf.data chooses", "autotune=True: may stall an epoch's end")
    else:
        off = "autotune=False" if autotune is False else "autotune could stall"
        threads = (str(plan.settings.num_threads), f"one for each core; {off}")
    table = console.table(
        {"Stage": console.WHOLE, "Setting": {"max_width": 40}, "Reason": {}},
        [*rows, ("threads", *threads)],
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
    )
    lines = console.text_of(table).splitlines()
    return "\n".join(line for line in lines if line)


def settings_of(autotune: Autotune) -> Settings:
    """Returns how parallel a dataset runs here."""
    if not isinstance(autotune, bool) and autotune != "auto":
        raise ValueError(
            f"`autotune` is {autotune!r}; expected 'auto', True or False. Leave it "
            "out for fixed parallelism."
        )
    return Settings(num_usable_cpus(), autotune is True)


def num_workers(device_names: Sequence[str] | None = None) -> int:
    """Returns how many worker processes train together with this one, itself included.

    Under a parameter server it is 1: there every worker brings elements of its own.
    TensorFlow knows the devices of other processes once a strategy was made.
    """
    if device_names is None:
        device_names = [device.name for device in tf.config.list_logical_devices()]
    specs = [tf.DeviceSpec.from_string(name) for name in device_names]
    if any(spec.job == "ps" for spec in specs):
        return 1
    tasks = {(spec.job, spec.task) for spec in specs if spec.job in _WORKER_JOBS}
    return max(1, len(tasks))


def shard_policy(plan: PipelinePlan) -> Any:
    """Returns how tf.distribute is to divide what comes out of a plan.

    Raises where elements would be lost or doubled, in these processes or in any.
    """
    policy = plan.source.shard_policy
    # These count on all elements of the source.
    counting = [
        step.name
        for step in plan.steps
        if has_role(step, Role.CUTS, Role.DRAWS) or isinstance(step, FileCache)
    ]
    if policy == _Policy.FILE and counting:
        raise ValueError(
            f"`dataset` has the option `auto_shard_policy` FILE, and `.{counting[0]}` "
            "came with it; expected elements of all files there. Leave the option as "
            "it was: tf.distribute then divides the elements that come out."
        )
    if policy == _Policy.OFF or any(step.name == "shard" for step in plan.steps):
        return _Policy.OFF
    workers = num_workers()
    if workers > 1 and any(step.name == "service" for step in plan.steps):
        raise ValueError(
            f"`.service` brings elements in the order in which they are ready, and "
            f"{workers} worker processes train together; expected a part for each, "
            "since shares by position would come twice, or never. Add "
            "`.shard('auto')`."
        )
    loose = [
        step.name
        for step in plan.steps
        if has_role(step, Role.SEEDED) and getattr(step, "seed", 0) is None
    ]
    if workers > 1 and loose:
        raise ValueError(
            f"`.{loose[0]}` has no seed, and {workers} worker processes train "
            "together; expected one order in all of them, since each takes its share "
            "by position: some elements would come twice, others never. Pass the same "
            f"`seed=` everywhere, or add `.shard('auto')`."
        )
    return policy
