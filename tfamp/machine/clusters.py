"""The workers that train together, read from the variables that launchers set.

TensorFlow's `SlurmClusterResolver` reads Slurm's variables for one worker a GPU: it
asks nvidia-smi, fails without a GPU, and sorts the hosts by name, so that with n9 and
n10 the tasks stand at each other's addresses.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from tfamp.records.record import TableRecord

# That of SageMaker's own training container, for workers that reduce among themselves.
_SAGEMAKER_PORT = 8890
_KUBERNETES_PORT = 2222
_INDEX, _HOSTS = "JOB_COMPLETION_INDEX", "TFAMP_HOSTS"
_ALONE = "pass `cluster=None` to `tfamp.distribute.strategy` to train alone"
_WITHOUT_SRUN = f"Start the program with `srun`, or {_ALONE}."
_NODES, _COUNTS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
_TASKS, _RANK, _NODE = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_NODEID"
_PORTS, _ORDER = "SLURM_STEP_RESV_PORTS", "SLURM_DISTRIBUTION"
# Below the ports that systems give out on their own, and for each job some of its own.
_FIRST_PORT, _NUM_PORTS, _PORTS_A_JOB = 15000, 16000, 8
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
    is_set: dict[Source, bool] = {
        "TF_CONFIG": environ.get("TF_CONFIG", "").strip() not in ("", "{}"),
        "SageMaker": bool(environ.get("SM_HOSTS") or environ.get("SM_CURRENT_HOST")),
        "Slurm": _slurm_has_several(environ),
        # An indexed job alone is none: its pods may each search, or predict a part.
        "Kubernetes": bool(environ.get(_HOSTS)),
    }
    found = [name for name, is_there in is_set.items() if is_there]
    if not found:
        return Cluster("none")
    chief = False
    if found[0] == "TF_CONFIG":
        workers, index, chief = _tf_config(environ["TF_CONFIG"])
    else:
        readers = {"SageMaker": _sagemaker, "Slurm": _slurm, "Kubernetes": _kubernetes}
        workers, index = readers[found[0]](environ)
    return Cluster(found[0], tuple(workers), index, chief, tuple(found[1:]))


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
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
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
        if not (first.isdecimal() and (last or first).isdecimal()):
            yield ""  # no name of a host
            return
        for number in range(int(first), int(last or first) + 1):
            for end in _expanded(after):
                yield f"{before}{number:0{len(first)}}{end}"


def _error(found: str, expected: str, remedy: str) -> ValueError:
    return ValueError(f"{found}; expected {expected}. {remedy}")


def _tf_config(text: str) -> tuple[list[str], int, bool]:
    """Returns the addresses, this one's place, and whether the first is a "chief"."""

    def check(
        is_good: Any, found: str, remedy: str = "Correct it, or unset it."
    ) -> None:
        if not is_good:
            expected = (
                'JSON as in {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": '
                '{"type": "worker", "index": 0}}'
            )
            raise _error(
                f"TF_CONFIG is {text[:_MAX_TEXT]!r}: {found}", expected, remedy
            )

    try:
        config = json.loads(text)
    except json.JSONDecodeError as failure:
        config = None
        check(False, f"it is not JSON ({failure})")
    check(isinstance(config, dict), "it is no object")
    jobs, task = config.get("cluster"), config.get("task")
    check(jobs, 'it has no "cluster"', f"Add it, or unset TF_CONFIG, or {_ALONE}.")
    is_good = isinstance(jobs, dict) and all(
        isinstance(each, list)
        and all(isinstance(x, str) and _ADDRESS.fullmatch(x) for x in each)
        for each in jobs.values()
    )
    check(is_good, 'its "cluster" is no object of lists of "host:port"')
    check(isinstance(task, dict), 'it has no "task"', "Add which worker this one is.")
    kind, index = task.get("type"), task.get("index")
    if isinstance(index, str) and index.isdecimal():
        index = int(index)  # as some launchers write it
    check(
        "ps" not in jobs and kind != "ps",
        'it has a job "ps"',
        "Keras 3 cannot train with parameter servers: start workers alone.",
    )
    check(
        kind != "evaluator",
        "this process is an evaluator, which does not train with the workers",
        f"Evaluate saved models in it, and {_ALONE}.",
    )
    trained = {name: jobs[name] for name in ("chief", "worker") if jobs.get(name)}
    other = tuple(sorted(jobs.keys() - {"chief", "worker", "evaluator"}))
    check(not other, f"it has the jobs {other!r}", 'Name them "chief" and "worker".')
    check(kind in trained, f'its task is {kind!r}, of which "cluster" has none')
    is_number = isinstance(index, int) and not isinstance(index, bool)
    check(is_number, f'its task has the "index" {index!r}', "Pass a whole number.")
    check(
        0 <= index < len(trained[kind]),
        f"its task is {kind} {index}, of {len(trained[kind])}",
        "Add its address, or correct the index; the first is 0.",
    )
    chiefs = trained.get("chief", [])
    check(len(chiefs) < 2, f"it has {len(chiefs)} chiefs", "Leave one, add workers.")
    addresses = [*chiefs, *trained.get("worker", [])]
    is_each_once = len(set(addresses)) == len(addresses)
    check(is_each_once, "an address is there twice", "Give each its own port.")
    return addresses, index + (len(chiefs) if kind == "worker" else 0), bool(chiefs)


def _sagemaker(environ: Mapping[str, str]) -> tuple[list[str], int]:
    text, own = environ.get("SM_HOSTS"), environ.get("SM_CURRENT_HOST")
    for name, value in (("SM_HOSTS", text), ("SM_CURRENT_HOST", own)):
        if not value:
            found = (
                f"{name} is not set, and the other of SM_HOSTS and SM_CURRENT_HOST is"
            )
            expected = "both, as SageMaker's training toolkit sets them"
            raise _error(found, expected, "Set it, or unset the other.")
    try:
        hosts = json.loads(str(text))
    except json.JSONDecodeError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(h, str) for h in hosts):
        expected = 'a JSON list of names, as in ["algo-1", "algo-2"]'
        raise _error(f"SM_HOSTS is {text!r}", expected, "Correct it, or unset it.")
    if own not in hosts:
        found = f"SM_CURRENT_HOST is {own!r}"
        raise _error(found, f"one of SM_HOSTS, {tuple(hosts)!r}", "Correct either.")
    # Each host may have them in another order; "algo-10" comes after "algo-9".
    parts = {h: re.split(r"(\d+)", h) for h in hosts}
    hosts.sort(key=lambda h: [int(p) if p.isdecimal() else p for p in parts[h]])
    return [f"{host}:{_SAGEMAKER_PORT}" for host in hosts], hosts.index(own)


def _kubernetes(environ: Mapping[str, str]) -> tuple[list[str], int]:
    index, text = environ.get(_INDEX), environ[_HOSTS]
    if not index:
        raise _error(
            f"{_HOSTS} is {text!r}, and {_INDEX} is not set",
            "the index of this pod, which Kubernetes sets where `completionMode: "
            "Indexed`",
            f"Set it in the job, or unset {_HOSTS}.",
        )
    hosts = expanded_hosts(_HOSTS, text)
    if not index.isdecimal() or int(index) >= len(hosts):
        raise _error(
            f"{_INDEX} is {index!r}",
            f"a number below {len(hosts)}, the number of hosts in {_HOSTS} ({text!r})",
            "Name as many hosts as the job has `completions`.",
        )
    addresses = [h if ":" in h else f"{h}:{_KUBERNETES_PORT}" for h in hosts]
    if bad := [each for each in addresses if not _ADDRESS.fullmatch(each)]:
        found = f"{_HOSTS} is {text!r}, with {bad[0]!r} in it"
        raise _error(found, "names of hosts, with a port or without", "Correct it.")
    return addresses, int(index)


def _slurm_has_several(environ: Mapping[str, str]) -> bool:
    """Returns whether Slurm gave this job several tasks.

    A job with one, such as a shell on a node, is no cluster.
    """
    if "SLURM_JOB_ID" not in environ and _NODES not in environ:
        return False
    counts = (environ.get(_TASKS), environ.get("SLURM_NTASKS"))
    return next((each for each in counts if each), "1").strip() != "1"


def _slurm(environ: Mapping[str, str]) -> tuple[list[str], int]:
    """Returns the addresses of a step's tasks, in their order, and this one's place."""
    tasks = environ.get("SLURM_NTASKS") or environ.get(_TASKS)
    for name in (_NODES, _COUNTS, _RANK, _TASKS):
        if not environ.get(name):
            found = f"{name} is not set, and Slurm gave this job {tasks} tasks"
            expected = "the variables that `srun` sets for each of them"
            raise _error(found, expected, _WITHOUT_SRUN)
        if name in (_RANK, _TASKS) and not environ[name].isdecimal():
            raise _error(f"{name} is {environ[name]!r}", "a number", _WITHOUT_SRUN)
    nodes, counts = expanded_hosts(_NODES, environ[_NODES]), list[int]()
    for part in environ[_COUNTS].split(","):  # "3(x2),1" is 3, 3, 1
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            expected = "numbers of tasks, as in '2(x3),1'"
            found = f"{_COUNTS} is {environ[_COUNTS]!r}"
            raise _error(found, expected, "Correct it.")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(nodes) != len(counts):
        raise _error(
            f"{_COUNTS} is {environ[_COUNTS]!r}, for {len(counts)} nodes",
            f"a number for each of the {len(nodes)} in {_NODES} ({environ[_NODES]!r})",
            _WITHOUT_SRUN,
        )
    rank, num_tasks = int(environ[_RANK]), int(environ[_TASKS])
    if not rank < num_tasks == sum(counts):
        raise _error(
            f"{_RANK} is {rank}, {_TASKS} {num_tasks}, and {_COUNTS} "
            f"{environ[_COUNTS]!r}",
            f"{sum(counts)} tasks, numbered from 0",
            _WITHOUT_SRUN,
        )
    order = environ.get(_ORDER, "block").split(":")[0].split(",")[0].lower()
    in_block = "Pass `--distribution=block` to `srun`."
    if order not in ("", "block", "*", "cyclic"):
        found = f"{_ORDER} is {environ[_ORDER]!r}"
        expected = "'block' or 'cyclic', which say on which node a task runs"
        raise _error(found, expected, in_block)
    # For each task its node and its place there, both from 0.
    places = [(node, i) for node, count in enumerate(counts) for i in range(count)]
    if order == "cyclic":
        places.sort(key=lambda place: (place[1], place[0]))
    node, _ = places[rank]
    if environ.get(_NODE, str(node)) != str(node):
        expected = f"{node}, where task {rank} stands in the order {order!r}"
        raise _error(f"{_NODE} is {environ[_NODE]!r}", expected, in_block)
    ports = _slurm_ports(environ, max(counts))
    return [f"{nodes[node]}:{ports[local]}" for node, local in places], rank


def _slurm_ports(environ: Mapping[str, str], num_needed: int) -> list[int]:
    """Returns the ports of a node's tasks: those that Slurm reserved, if it did."""
    if reserved := environ.get(_PORTS):
        found = [int(n) for n in expanded_hosts(_PORTS, f"[{reserved}]")]
        if len(found) < num_needed:
            raise _error(
                f"{_PORTS} is {reserved!r}",
                f"{num_needed} ports, one for each task of a node",
                f"Pass `--resv-ports={num_needed}` to `srun`.",
            )
        return found
    job = environ.get("SLURM_JOB_ID", "0")
    start = int(job) * _PORTS_A_JOB % _NUM_PORTS if job.isdecimal() else 0
    return [_FIRST_PORT + start + i for i in range(num_needed)]
