"""Which of several workers this is, whether all found the same, and who was lost."""

import re
from typing import Any

import tensorflow as tf

# What workers get whose reductions TensorFlow aborts, as another one does not answer.
_ABORTS = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError)
_TASK = re.compile(r"/job:(chief|worker)/replica:\d+/task:(\d+)")


def place_of(strategy: Any) -> tuple[int, int]:
    """Returns the place of this worker, from 0, and the number of workers."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 0, 1
    resolver = strategy.cluster_resolver
    addresses = _addresses(strategy)
    if len(addresses) < 2:
        return 0, 1
    place = list(addresses).index((resolver.task_type, int(resolver.task_id)))
    return place, len(addresses)


def lost(strategy: Any, error: BaseException | None) -> str | None:
    """Returns which worker does not answer any more, where that ended training.

    TensorFlow's workers send each other heartbeats: ten seconds after the last one it
    aborts the reductions of the others. Its error names who was lost, but for the first
    worker, to which all send theirs.

    Args:
        strategy: In which a model was trained.
        error: What ended the training.
    """
    place, num_workers = place_of(strategy)
    text = str(error)
    if num_workers < 2 or not isinstance(error, _ABORTS) or "ollective" not in text:
        return None
    addresses = _addresses(strategy)
    named = {(job, int(task)) for job, task in _TASK.findall(text)}
    places = [i for i, task in enumerate(addresses) if task in named and i != place]
    if not places and "CoordinationService" in text and place:
        places = [0]
    if not places:
        return "Another worker"
    hosts = list(addresses.values())
    names = " and ".join(f"{i} ({hosts[i]!r})" for i in places)
    return f"Worker {names} of {num_workers}"


def _addresses(strategy: Any) -> dict[tuple[str, int], str]:
    """Returns the addresses of all workers by job and task, the chief first."""
    jobs = strategy.cluster_resolver.cluster_spec().as_dict()
    return {
        (job, task): address
        for job in ("chief", "worker")
        for task, address in enumerate(jobs.get(job, []))
    }


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
