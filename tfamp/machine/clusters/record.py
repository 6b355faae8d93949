"""`Cluster`: the workers that train together, and which of them this process is."""

import dataclasses
from typing import Any, Literal

from tfamp.records.record import TableRecord

Source = Literal["none", "TF_CONFIG", "Slurm", "SageMaker", "Kubernetes"]


@dataclasses.dataclass(frozen=True)
class Cluster(TableRecord):
    """The workers that train together, and which of them this process is.

    Args:
        source: What told: "TF_CONFIG" (of Ray, Vertex AI, TFJob, or set by hand),
            "Slurm", "SageMaker", "Kubernetes", or "none" where there is no cluster.
        workers: Addresses "host:port", the chief's first; none where there is no
            cluster.
        index: Place of this process in `workers`, from 0.
        has_chief_job: Whether `TF_CONFIG` names the first of them as the job "chief".
        passed_over: Other sources whose variables are set too, and were not read.

    Example:
        >>> found = Cluster("Slurm", ("n1:15000", "n2:15000"), index=1)
        >>> found.num_workers, found.is_chief, found.local_index
        (2, False, 0)
        >>> print(found)
        Worker 1 of 2 (from 0), as Slurm says: n1:15000, n2:15000 (this process)
        >>> found.to_tf_config()["task"]
        {'type': 'worker', 'index': 1}
    """

    source: Source
    workers: tuple[str, ...] = ()
    index: int = 0
    has_chief_job: bool = False
    passed_over: tuple[str, ...] = ()

    @property
    def num_workers(self) -> int:
        """Number of processes that train together, 1 without a cluster."""
        return max(1, len(self.workers))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what only one of them may write."""
        return self.index == 0

    @property
    def address(self) -> str | None:
        """The address of this process, None without a cluster."""
        return self.workers[self.index] if self.workers else None

    @property
    def local_workers(self) -> int:
        """Number of workers on the host of this process."""
        return max(1, len(self._on_this_host()))

    @property
    def local_index(self) -> int:
        """Place of this process among the workers on its host, from 0."""
        return self._on_this_host().index(self.index) if self.workers else 0

    def to_tf_config(self) -> dict[str, Any]:
        """Returns what `TF_CONFIG` would hold, to be written with `json.dumps`.

        It is empty without a cluster.
        """
        if not self.workers:
            return {}
        jobs: dict[str, list[str]] = {"worker": list(self.workers)}
        task: dict[str, Any] = {"type": "worker", "index": self.index}
        if self.has_chief_job:
            jobs = {"chief": list(self.workers[:1]), "worker": list(self.workers[1:])}
            if not jobs["worker"]:
                del jobs["worker"]
            task["index"] = self.index - 1
            if self.is_chief:
                task = {"type": "chief", "index": 0}
        return {"cluster": jobs, "task": task}

    def table(self) -> str:
        """Returns the cluster in one line."""
        if not self.workers:
            return "One process: no cluster is described in the environment"
        shown = [
            f"{each} (this process)" if i == self.index else each
            for i, each in enumerate(self.workers)
        ]
        if len(shown) > _MAX_SHOWN:
            left = len(shown) - _MAX_SHOWN
            shown = [*shown[:_MAX_SHOWN], f"and {left} more"]
        over = " and ".join(self.passed_over)
        more = f"; the variables of {over} are set too, and were not read"
        return (
            f"Worker {self.index} of {self.num_workers} (from 0), as {self.source} "
            f"says: {', '.join(shown)}{more if over else ''}"
        )

    def _on_this_host(self) -> list[int]:
        hosts = [each.rpartition(":")[0] for each in self.workers]
        return [i for i, host in enumerate(hosts) if host == hosts[self.index]]


# Of a large cluster.
_MAX_SHOWN = 8
