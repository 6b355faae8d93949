"""Which of several workers this is, and whether all of them found the same."""

from typing import Any

import tensorflow as tf


def place_of(strategy: Any) -> tuple[int, int]:
    """Returns the place of this worker, from 0, and the number of workers."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 0, 1
    resolver = strategy.cluster_resolver
    jobs = resolver.cluster_spec().as_dict()
    num_chiefs = len(jobs.get("chief", []))
    num_workers = num_chiefs + len(jobs.get("worker", []))
    if num_workers < 2:
        return 0, 1
    is_worker = resolver.task_type == "worker"
    return int(resolver.task_id) + (num_chiefs if is_worker else 0), num_workers


def check_same(strategy: Any, step: int, directory: str) -> None:
    """Raises unless all workers resume from the same step, -1 for the beginning.

    Raises:
        ValueError: They do not.
    """

    def added_up() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", tf.constant(step, tf.float64))

    total = strategy.experimental_local_results(strategy.run(added_up))[0]
    mean = float(total) / strategy.num_replicas_in_sync
    if mean != step:
        found = "no file of all" if step < 0 else f"step {step}"
        raise ValueError(
            f"`directory` is {directory!r}, in which this worker found {found}, and "
            "another one something else; expected a folder that all workers see. Pass "
            "one on a shared disk, or delete the files of the newest step."
        )
