"""Builds what a plan says, and explains it, from the same list of steps."""

from typing import Any

import rich.box
import tensorflow as tf

from tfamp.data._plan import Plan
from tfamp.data._sharding import shard_policy, without_length
from tfamp.records import console


def run(plan: Plan) -> tf.data.Dataset:
    """Returns the dataset of a plan, after every step's own checks."""
    policy = shard_policy(plan.source, plan.steps)
    dataset = plan.start()
    for step in plan.steps:
        step.check(dataset)
        dataset = step.apply(dataset, plan.settings)
    dataset = without_length(dataset, plan.steps)
    return dataset.with_options(_options(plan, policy))


def describe(plan: Plan, threads: tuple[str, str]) -> str:
    """Returns a table of a plan: stage, setting and reason in running order.

    Args:
        plan: What to describe.
        threads: Setting and reason of its last row, the parallelism.
    """
    dataset = plan.source.dataset(plan.settings)
    rows = [("source", *plan.source.explain(dataset))]
    dataset = plan.start()
    for step in plan.steps:
        rows.append((step.name, *step.explain(dataset, plan.settings)))
        dataset = step.preview(dataset, plan.settings)
    table = console.table(
        {"Stage": console.WHOLE, "Setting": {"max_width": 40}, "Reason": {}},
        [*rows, ("threads", *threads)],
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
    )
    lines = console.text_of(table).splitlines()
    return "\n".join(line for line in lines if line)


def _options(plan: Plan, policy: Any) -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = plan.settings.autotune
    if not plan.settings.autotune:
        options.threading.private_threadpool_size = plan.settings.num_threads
    options.experimental_distribute.auto_shard_policy = policy
    return options
