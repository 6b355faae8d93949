"""The workers that train together, read from the variables that launchers set."""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from tfamp.machine.hosts import expanded_hosts, slurm_has_several, slurm_workers
from tfamp.records.record import TableRecord

# That of SageMaker's own training container, for workers that reduce among themselves.
_SAGEMAKER_PORT = 8890
_KUBERNETES_PORT = 2222
_INDEX, _HOSTS = "JOB_COMPLETION_INDEX", "TFAMP_HOSTS"
_ALONE = "pass `cluster=None` to `tfamp.distribute.strategy` to train alone"
# Characters of a variable, and workers of a large cluster, that are shown.
_MAX_TEXT, _MAX_SHOWN = 200, 8
_ADDRESS = re.compile(r"(\[[^\]]+\]|[^:\s]+):\d{1,5}")
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
            chief, *others = self.workers
            jobs = (
                {"chief": [chief], "worker": others} if others else {"chief": [chief]}
            )
            task["index"] -= 1
            if self.is_chief:
                task = {"type": "chief", "index": 0}
        return {"cluster": jobs, "task": task}

    def table(self) -> str:
        """Returns the cluster in one line."""
        if not self.workers:
            return "One process: no cluster is described in the environment"
        shown = list(self.workers[:_MAX_SHOWN])
        if self.index < _MAX_SHOWN:
            shown[self.index] += " (this process)"
        if (left := self.num_workers - _MAX_SHOWN) > 0:
            shown.append(f"and {left} more")
        line = (
            f"Worker {self.index} of {self.num_workers} (from 0), as {self.source} "
            f"says: {', '.join(shown)}"
        )
        if not self.passed_over:
            return line
        over = " and ".join(self.passed_over)
        return f"{line}; the variables of {over} are set too, and were not read"

    def _on_this_host(self) -> list[int]:
        hosts = [each.rpartition(":")[0] for each in self.workers]
        return [i for i, host in enumerate(hosts) if host == hosts[self.index]]


def cluster() -> Cluster:
    """Returns the cluster of this process, as its launcher describes it.

    The first that is set is read: `TF_CONFIG` (Ray Train, Vertex AI, TFJob, your own),
    SageMaker's `SM_HOSTS` and `SM_CURRENT_HOST`, the variables of a Slurm step (what
    `srun` sets), a Kubernetes indexed job's `JOB_COMPLETION_INDEX` with the hosts in
    `TFAMP_HOSTS`, as in "train-[0-3].train:2222". Without these its pods are no
    cluster. Nothing is asked over the network, and TensorFlow is not imported.

    Returns:
        The `Cluster`; its source is "none" where no launcher describes one.

    Raises:
        ValueError: A variable that belongs to a cluster is missing, or does not fit the
            others. The message names it.

    Example:
        >>> import os
        >>> os.environ["TF_CONFIG"] = (
        ...     '{"cluster": {"worker": ["a:2222", "b:2222"]},'
        ...     ' "task": {"type": "worker", "index": 1}}'
        ... )
        >>> cluster().workers, cluster().index
        (('a:2222', 'b:2222'), 1)
        >>> del os.environ["TF_CONFIG"]
    """
    return cluster_of(os.environ)


def cluster_of(environ: Mapping[str, str]) -> Cluster:
    """As `cluster`, of given variables."""
    found = [name for name, (is_set, _) in _SOURCES.items() if is_set(environ)]
    if not found:
        return Cluster("none")
    workers, index, has_chief_job = _SOURCES[found[0]][1](environ)
    return Cluster(found[0], tuple(workers), index, has_chief_job, tuple(found[1:]))


# The addresses, the place of this process, whether the first is the job "chief".
Read = tuple[list[str], int, bool]


def _tf_config(environ: Mapping[str, str]) -> Read:
    text = environ["TF_CONFIG"]

    def error(found: str, remedy: str) -> ValueError:
        return ValueError(
            f"TF_CONFIG is {text[:_MAX_TEXT]!r}: {found}; expected JSON as in "
            '{"cluster": {"worker": ["a:2222", "b:2222"]}, '
            f'"task": {{"type": "worker", "index": 0}}}}. {remedy}'
        )

    try:
        config = json.loads(text)
    except json.JSONDecodeError as failure:
        raise error(f"it is not JSON ({failure})", "Correct it, or unset it.") from None
    if not isinstance(config, dict):
        raise error("it is no object", "Correct it, or unset it.")
    jobs, task = config.get("cluster"), config.get("task")
    if not jobs:
        raise error('it has no "cluster"', f"Add it, or unset TF_CONFIG, or {_ALONE}.")
    if not isinstance(jobs, dict) or not all(map(_is_addresses, jobs.values())):
        found = 'its "cluster" is no object of lists of "host:port"'
        raise error(found, "Correct the addresses.")
    if not isinstance(task, dict):
        raise error('it has no "task"', "Add which of the workers this process is.")
    kind, index = task.get("type"), task.get("index")
    if isinstance(index, str) and index.isdecimal():
        index = int(index)  # as some launchers write it
    if "ps" in jobs or kind == "ps":
        raise error(
            'it has a job "ps"',
            "Keras 3 cannot train with parameter servers: start workers alone.",
        )
    if kind == "evaluator":
        raise error(
            "this process is an evaluator, which does not train with the workers",
            f"Evaluate saved models in it, and {_ALONE}.",
        )
    trained = {name: jobs[name] for name in ("chief", "worker") if jobs.get(name)}
    if other := tuple(sorted(jobs.keys() - {"chief", "worker", "evaluator"})):
        raise error(f"it has the jobs {other!r}", 'Name them "chief" and "worker".')
    if kind not in trained:
        found = f'its task is {kind!r}, of which "cluster" has none'
        raise error(found, "Add its address, or correct the type of the task.")
    if isinstance(index, bool) or not isinstance(index, int):
        raise error(f'its task has the "index" {index!r}', "Pass a whole number.")
    if not 0 <= index < len(trained[kind]):
        found = f"its task is {kind} {index}, of {len(trained[kind])}"
        raise error(found, "Add its address, or correct the index; the first is 0.")
    chiefs = trained.get("chief", [])
    if len(chiefs) > 1:
        raise error(f"it has {len(chiefs)} chiefs", "Leave one, and add workers.")
    addresses = [*chiefs, *trained.get("worker", [])]
    if len(set(addresses)) < len(addresses):
        raise error("an address is there twice", "Give each its own port.")
    before = len(chiefs) if kind == "worker" else 0
    return addresses, before + index, bool(chiefs)


def _is_addresses(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(each, str) and _ADDRESS.fullmatch(each) for each in values
    )


def _sagemaker(environ: Mapping[str, str]) -> Read:
    text, own = environ.get("SM_HOSTS"), environ.get("SM_CURRENT_HOST")
    for name, value in (("SM_HOSTS", text), ("SM_CURRENT_HOST", own)):
        if not value:
            raise ValueError(
                f"{name} is not set, and the other of SM_HOSTS and SM_CURRENT_HOST is; "
                "expected both, as SageMaker's training toolkit sets them. Set it, or "
                "unset the other."
            )
    try:
        hosts = json.loads(str(text))
    except json.JSONDecodeError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(h, str) for h in hosts):
        raise ValueError(
            f"SM_HOSTS is {text!r}; expected a JSON list of names, as in "
            '["algo-1", "algo-2"]. Correct it, or unset it.'
        )
    if own not in hosts:
        raise ValueError(
            f"SM_CURRENT_HOST is {own!r}; expected one of SM_HOSTS, {tuple(hosts)!r}. "
            "Correct either."
        )
    # Each host may have them in another order.
    hosts = sorted(hosts, key=_by_numbers)
    return [f"{host}:{_SAGEMAKER_PORT}" for host in hosts], hosts.index(own), False


def _kubernetes(environ: Mapping[str, str]) -> Read:
    index, text = environ.get(_INDEX), environ[_HOSTS]
    if not index:
        raise ValueError(
            f"{_HOSTS} is {text!r}, and {_INDEX} is not set; expected the index of "
            "this pod, which Kubernetes sets where `completionMode: Indexed`. Set it "
            f"in the job, or unset {_HOSTS}."
        )
    hosts = expanded_hosts(_HOSTS, text)
    if not index.isdecimal() or int(index) >= len(hosts):
        raise ValueError(
            f"{_INDEX} is {index!r}; expected a number below {len(hosts)}, the number "
            f"of hosts in {_HOSTS} ({text!r}). Name as many hosts as the job has "
            "`completions`."
        )
    addresses = [h if ":" in h else f"{h}:{_KUBERNETES_PORT}" for h in hosts]
    if bad := [each for each in addresses if not _ADDRESS.fullmatch(each)]:
        raise ValueError(
            f"{_HOSTS} is {text!r}, with {bad[0]!r} in it; expected names of hosts, "
            "with a port or without. Correct it."
        )
    return addresses, int(index), False


def _slurm(environ: Mapping[str, str]) -> Read:
    addresses, index = slurm_workers(environ)
    return addresses, index, False


def _by_numbers(name: str) -> list[Any]:
    """Returns what sorts "algo-10" after "algo-9"."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if part.isdecimal() else part for part in parts]


# Whether a source is set, and the function that reads it.
_SOURCES: dict[
    Source,
    tuple[Callable[[Mapping[str, str]], bool], Callable[[Mapping[str, str]], Read]],
] = {
    "TF_CONFIG": (
        lambda e: e.get("TF_CONFIG", "").strip() not in ("", "{}"),
        _tf_config,
    ),
    "SageMaker": (
        lambda e: bool(e.get("SM_HOSTS") or e.get("SM_CURRENT_HOST")),
        _sagemaker,
    ),
    "Slurm": (slurm_has_several, _slurm),
    # An indexed job alone is none: its pods may each search, or predict a part.
    "Kubernetes": (lambda e: bool(e.get(_HOSTS)), _kubernetes),
}


def alone_in_job(environ: Mapping[str, str]) -> str | None:
    """Returns why a pod of an indexed job is in no cluster, None where it is none."""
    index = environ.get(_INDEX)
    if not index or _SOURCES["Kubernetes"][0](environ):
        return None
    return (
        f"{_INDEX} is {index!r} and {_HOSTS} is not set, so this pod trains alone. "
        f"Where all pods are to train together, set {_HOSTS} in the job's `env` to "
        "their names in the order of the index, as in train-[0-3].train."
    )
