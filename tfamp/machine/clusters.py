"""The workers that train together, read from the variables that launchers set.

TensorFlow's `SlurmClusterResolver` asks nvidia-smi and sorts the hosts by name, so that
with n9 and n10 the tasks stand at each other's addresses: Slurm's are read here.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from tfamp.records.record import TableRecord

_SAGEMAKER_PORT, _KUBERNETES_PORT = 8890, 2222
# Below the ports that systems give out on their own, and for each job some of its own.
_FIRST_PORT, _NUM_PORTS, _PORTS_A_JOB = 15000, 16000, 8
_INDEX, _HOSTS = "JOB_COMPLETION_INDEX", "TFAMP_HOSTS"
_ALONE = "pass `cluster=None` to `tfamp.distribute.strategy` to train alone"
_WITHOUT_SRUN = f"Start the program with `srun`, or {_ALONE}."
_NODES, _COUNTS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
_TASKS, _RANK = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"
_MAX_SHOWN = 8
_ADDRESS = re.compile(r"(\[[^\]]+\]|[^:\s]+):\d{1,5}")
_FORM = (
    'JSON as in {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": '
    '{"type": "worker", "index": 0}}'
)
Source = Literal["none", "TF_CONFIG", "Slurm", "SageMaker", "Kubernetes"]


@dataclasses.dataclass(frozen=True)
class Cluster(TableRecord):
    """The workers that train together, and which of them this process is.

    Args:
        source: What told: "TF_CONFIG" (of Ray, Vertex AI, TFJob, or set by hand),
            "Slurm", "SageMaker", "Kubernetes", or "none" where there is no cluster.
        workers: Addresses "host:port", the chief's first.
        index: Place of this process in `workers`, from 0.
        has_chief_job: Whether `TF_CONFIG` names the first of them as the job "chief".

    Example:
        >>> found = Cluster("Slurm", ("n1:15000", "n2:15000"), index=1)
        >>> found.num_workers, found.is_chief
        (2, False)
        >>> print(found)
        Worker 1 of 2 (from 0), as Slurm says: n1:15000, n2:15000 (this process)
    """

    source: Source
    workers: tuple[str, ...] = ()
    index: int = 0
    has_chief_job: bool = False

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
        hosts = [each.rpartition(":")[0] for each in self.workers]
        return hosts.count(hosts[self.index]) if hosts else 1

    def to_tf_config(self) -> dict[str, Any]:
        """Returns what `TF_CONFIG` would hold as JSON; empty without a cluster."""
        if not self.workers:
            return {}
        first = int(self.has_chief_job)
        jobs = {"chief": self.workers[:first], "worker": self.workers[first:]}
        is_chief = self.has_chief_job and self.is_chief
        kind, index = ("chief", 0) if is_chief else ("worker", self.index - first)
        cluster = {name: [*each] for name, each in jobs.items() if each}
        return {"cluster": cluster, "task": {"type": kind, "index": index}}

    def table(self) -> str:
        """Returns the cluster in one line."""
        if not self.workers:
            return "One process: no cluster is described in the environment"
        shown = list(self.workers[:_MAX_SHOWN])
        if self.index < _MAX_SHOWN:
            shown[self.index] += " (this process)"
        if (left := self.num_workers - _MAX_SHOWN) > 0:
            shown.append(f"and {left} more")
        return (
            f"Worker {self.index} of {self.num_workers} (from 0), as {self.source} "
            f"says: {', '.join(shown)}"
        )


def cluster() -> Cluster:
    """Returns the cluster of this process, as its launcher describes it.

    The first that is set is read: `TF_CONFIG` (Ray Train, Vertex AI, TFJob, your own),
    SageMaker's `SM_HOSTS` and `SM_CURRENT_HOST`, the variables of a Slurm step (what
    `srun` sets), a Kubernetes indexed job's `JOB_COMPLETION_INDEX` with the hosts in
    `TFAMP_HOSTS`, as in "train-[0-3].train:2222". Without these its pods are no
    cluster. Nothing is asked over the network, and TensorFlow is not imported.

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
    if environ.get("TF_CONFIG", "").strip() not in ("", "{}"):
        return _tf_config(environ["TF_CONFIG"])
    if environ.get("SM_HOSTS") and environ.get("SM_CURRENT_HOST"):
        return _sagemaker(environ)
    if _slurm_has_several(environ):
        return _slurm(environ)
    # An indexed job alone is none: its pods may each search, or predict a part.
    return _kubernetes(environ) if environ.get(_HOSTS) else Cluster("none")


def alone_in_job(environ: Mapping[str, str]) -> str | None:
    """Returns why a pod of an indexed job is in no cluster, None where it is none."""
    index = environ.get(_INDEX)
    if not index or environ.get(_HOSTS):
        return None
    return (
        f"{_INDEX} is {index!r} and {_HOSTS} is not set, so this pod trains alone. "
        f"Where all pods are to train together, set {_HOSTS} in the job's `env` to "
        "their names in the order of the index, as in train-[0-3].train."
    )


def expanded_hosts(variable: str, text: str) -> list[str]:
    """Returns the hosts of a list with ranges in brackets, in its order.

    Example:
        >>> expanded_hosts("SLURM_STEP_NODELIST", "n[08-10],m5,r[1-2]n[3,5]")
        ['n08', 'n09', 'n10', 'm5', 'r1n3', 'r1n5', 'r2n3', 'r2n5']
    """
    # A comma inside of brackets belongs to a range.
    parts = re.findall(r"(?:[^,\[\]]|\[[\d,-]*\])+", text)
    hosts = [host for part in parts for host in _expanded(part.strip())]
    if ",".join(parts) != text or not hosts or "" in hosts:
        expected = "names of hosts, with ranges in brackets, as in 'n[1-4],m5'"
        raise _error(f"{variable} is {text!r}", expected, "Correct it.")
    return hosts


def _expanded(part: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, after = rest.partition("]")
    for each in inside.split(","):
        first, _, last = each.partition("-")
        for number in range(int(first or 0), int(last or first or -1) + 1):
            for end in _expanded(after):
                yield f"{before}{number:0{len(first)}}{end}"


def _error(found: str, expected: str, remedy: str) -> ValueError:
    return ValueError(f"{found}; expected {expected}. {remedy}")


def _tf_config(text: str) -> Cluster:
    def check(
        is_good: Any, found: str, remedy: str = "Correct it, or unset it."
    ) -> None:
        if not is_good:
            raise _error(f"TF_CONFIG is {text[:200]!r}: {found}", _FORM, remedy)

    config: Any = None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as failure:
        check(False, f"it is not JSON ({failure})")
    check(isinstance(config, dict), "it is no object")
    jobs, task = config.get("cluster"), config.get("task")
    check(jobs, 'it has no "cluster"', f"Add it, or unset TF_CONFIG, or {_ALONE}.")
    is_good = isinstance(jobs, dict) and all(
        isinstance(each, list) and all(_ADDRESS.fullmatch(str(x)) for x in each)
        for each in jobs.values()
    )
    check(is_good, 'its "cluster" is no object of lists of "host:port"')
    check(isinstance(task, dict), 'it has no "task"', "Add which worker this one is.")
    kind, index = task.get("type"), str(task.get("index"))  # some write it as text
    check(
        "ps" not in jobs and kind != "evaluator",
        "it has parameter servers, or this process is an evaluator",
        "Keras 3 trains with workers alone; evaluate saved models in a process that "
        f"is none, and {_ALONE}.",
    )
    chiefs, others = jobs.get("chief", []), jobs.get("worker", [])
    of_kind = {"chief": chiefs, "worker": others}.get(kind, [])
    check(
        index.isdecimal() and int(index) < len(of_kind),
        f"its task is {kind} {index}, of {len(of_kind)}",
        "Add its address, or correct the index; the first is 0.",
    )
    addresses = [*chiefs, *others]
    is_each_once = len(set(addresses)) == len(addresses)
    check(is_each_once, "an address is there twice", "Give each its own port.")
    check(len(chiefs) < 2, f"it has {len(chiefs)} chiefs", "Leave one, add workers.")
    place = int(index) + (len(chiefs) if kind == "worker" else 0)
    return Cluster("TF_CONFIG", tuple(addresses), place, bool(chiefs))


def _sagemaker(environ: Mapping[str, str]) -> Cluster:
    hosts, own = json.loads(environ["SM_HOSTS"]), environ["SM_CURRENT_HOST"]
    if own not in hosts:
        found = f"SM_CURRENT_HOST is {own!r}"
        raise _error(found, f"one of SM_HOSTS, {tuple(hosts)!r}", "Correct either.")
    # Each host may have them in another order; "algo-10" comes after "algo-9".
    hosts.sort(key=lambda host: (len(host), host))
    addresses = tuple(f"{host}:{_SAGEMAKER_PORT}" for host in hosts)
    return Cluster("SageMaker", addresses, hosts.index(own))


def _kubernetes(environ: Mapping[str, str]) -> Cluster:
    index, hosts = environ.get(_INDEX), expanded_hosts(_HOSTS, environ[_HOSTS])
    if not index:
        raise _error(
            f"{_HOSTS} is {environ[_HOSTS]!r}, and {_INDEX} is not set",
            "the index of this pod, which Kubernetes sets where `completionMode: "
            "Indexed`",
            f"Set it in the job, or unset {_HOSTS}.",
        )
    if not index.isdecimal() or int(index) >= len(hosts):
        expected = f"a number below {len(hosts)}, the number of hosts in {_HOSTS}"
        remedy = "Name as many hosts as the job has `completions`."
        raise _error(f"{_INDEX} is {index!r}", expected, remedy)
    addresses = (h if ":" in h else f"{h}:{_KUBERNETES_PORT}" for h in hosts)
    return Cluster("Kubernetes", tuple(addresses), int(index))


def _slurm_has_several(environ: Mapping[str, str]) -> bool:
    """Returns whether Slurm gave this job several tasks, unlike a shell on a node."""
    if "SLURM_JOB_ID" not in environ and _NODES not in environ:
        return False
    tasks = environ.get(_TASKS) or environ.get("SLURM_NTASKS") or "1"
    return tasks.strip() != "1"


def _slurm(environ: Mapping[str, str]) -> Cluster:
    """Returns the addresses of a step's tasks, in their order, and this one's place."""
    for name in (_NODES, _COUNTS, _RANK, _TASKS):
        if not environ.get(name):
            found = f"{name} is not set, and Slurm gave this job several tasks"
            expected = "the variables that `srun` sets for each of them"
            raise _error(found, expected, _WITHOUT_SRUN)
    nodes = expanded_hosts(_NODES, environ[_NODES])
    counts = [  # "3(x2),1" is 3, 3, 1
        int(number)
        for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ[_COUNTS])
        for _ in range(int(times or 1))
    ]
    rank, num_tasks = int(environ[_RANK]), int(environ[_TASKS])
    if len(nodes) != len(counts) or not rank < num_tasks == sum(counts):
        names = (_NODES, _COUNTS, _TASKS, _RANK)
        told = ", ".join(f"{name} is {environ[name]!r}" for name in names)
        raise _error(told, "one number of tasks a node, and their sum", _WITHOUT_SRUN)
    order = environ.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0]
    if order not in ("", "block", "*", "cyclic") and max(counts) > 1:
        expected = "'block' or 'cyclic', which say on which node a task runs"
        remedy = "Pass `--distribution=block` to `srun`."
        raise _error(f"SLURM_DISTRIBUTION is {order!r}", expected, remedy)
    # For each task its node and its place there, both from 0.
    places = [(node, i) for node, count in enumerate(counts) for i in range(count)]
    if order == "cyclic":
        places.sort(key=lambda place: (place[1], place[0]))
    job = environ.get("SLURM_JOB_ID", "0")
    start = int(job) * _PORTS_A_JOB % _NUM_PORTS if job.isdecimal() else 0
    reserved = environ.get("SLURM_STEP_RESV_PORTS")
    ports = [str(_FIRST_PORT + start + i) for i in range(max(counts))]
    if reserved:
        ports = expanded_hosts("SLURM_STEP_RESV_PORTS", f"[{reserved}]")
    if len(ports) < max(counts):
        raise _error(
            f"SLURM_STEP_RESV_PORTS is {reserved!r}",
            f"{max(counts)} ports, one for each task of a node",
            f"Pass `--resv-ports={max(counts)}` to `srun`.",
        )
    addresses = tuple(f"{nodes[node]}:{ports[local]}" for node, local in places)
    return Cluster("Slurm", addresses, rank)
