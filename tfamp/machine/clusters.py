"""The workers that train together, read from the variables that launchers set.

TensorFlow's `SlurmClusterResolver` asks nvidia-smi and sorts the hosts by name, so that
with n9 and n10 the tasks stand at each other's addresses: only its parsers are used.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from tfamp.records.record import TableRecord

# Below the ports that systems give out on their own, and for each job some of its own.
_FIRST_PORT, _NUM_PORTS, _PORTS_A_JOB = 15000, 16000, 8
_ALONE = "pass `cluster=None` to `tfamp.distribute.strategy` to train alone"
_NODES, _COUNTS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
_TASKS, _RANK = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"
_PORTS = "SLURM_STEP_RESV_PORTS"
_MAX_SHOWN = 8
_ADDRESS = re.compile(r"(\[[^\]]+\]|[^:\s]+):\d{1,5}")


@dataclasses.dataclass(frozen=True)
class Cluster(TableRecord):
    """The workers that train together, and which of them this process is.

    `source` is what told, "TF_CONFIG", "Slurm" or "none"; `workers` are addresses
    "host:port", the chief's first, and `index` is the place of this process, from 0.

    Example:
        >>> print(Cluster("Slurm", ("n1:15000", "n2:15000"), index=1))
        Worker 1 of 2 (from 0), as Slurm says: n1:15000, n2:15000
    """

    source: Literal["none", "TF_CONFIG", "Slurm"]
    workers: tuple[str, ...] = ()
    index: int = 0

    @property
    def num_workers(self) -> int:
        """Number of processes that train together, 1 without a cluster."""
        return max(1, len(self.workers))

    def to_tf_config(self) -> dict[str, Any]:
        """Returns what `TF_CONFIG` would hold as JSON; empty without a cluster."""
        if not self.workers:
            return {}
        task = {"type": "worker", "index": self.index}
        return {"cluster": {"worker": [*self.workers]}, "task": task}

    def table(self) -> str:
        """Returns the cluster in one line."""
        if not self.workers:
            return "One process: no cluster is described in the environment"
        more = ", ..." * (self.num_workers > _MAX_SHOWN)
        return (
            f"Worker {self.index} of {self.num_workers} (from 0), as {self.source} "
            f"says: {', '.join(self.workers[:_MAX_SHOWN])}{more}"
        )


def cluster() -> Cluster:
    """Returns the cluster of this process, as its launcher describes it.

    It is read from `TF_CONFIG` (Ray Train, Vertex AI, TFJob, your own), else from the
    variables of a Slurm step (what `srun` sets); nothing is asked over the network. A
    ValueError names the variable that is missing, or does not fit the others.
    """
    return cluster_of(os.environ)


def cluster_of(environ: Mapping[str, str]) -> Cluster:
    """As `cluster`, of given variables."""
    if environ.get("TF_CONFIG", "").strip() not in ("", "{}"):
        return _tf_config(environ["TF_CONFIG"])
    if "SLURM_JOB_ID" in environ or _NODES in environ:
        tasks = environ.get(_TASKS) or environ.get("SLURM_NTASKS") or "1"
        if tasks.strip() != "1":  # else a shell on a node
            return _slurm(environ)
    return Cluster("none")


def _tf_config(text: str) -> Cluster:
    try:
        config = json.loads(text)
        jobs, task = config["cluster"], config["task"]
        chiefs, others = jobs.get("chief", []), jobs.get("worker", [])
        kind, index = task["type"], int(task["index"])  # some write it as text
        addresses = [*chiefs, *others]
        place = addresses.index({"chief": chiefs, "worker": others}[kind][index])
        is_form = all(_ADDRESS.fullmatch(each) for each in addresses) and index >= 0
        if not is_form or len({*addresses}) < len(addresses) or len(chiefs) > 1:
            raise ValueError("its addresses are not of that form, or not each once")
        if "ps" in jobs:
            raise ValueError("Keras 3 trains with workers alone")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"TF_CONFIG is {text[:200]!r} ({type(error).__name__}: {error}); expected "
            'JSON as in {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": '
            '"worker", "index": 0}}, with each address once, at most one \'chief\', no '
            f"'ps', and a task that is one of them. Correct or unset it, or {_ALONE}."
        ) from error
    return Cluster("TF_CONFIG", tuple(addresses), place)


def _slurm(environ: Mapping[str, str]) -> Cluster:
    """Returns the addresses of a step's tasks, in their order, and this one's place."""
    from tensorflow.python.distribute.cluster_resolver import slurm_cluster_resolver

    hosts = slurm_cluster_resolver.expand_hostlist
    tasks = slurm_cluster_resolver.expand_tasks_per_node
    remedy = f"Start the program with `srun --distribution=block`, or {_ALONE}."
    names = (_NODES, _COUNTS, _RANK, _TASKS)
    if lacking := [name for name in names if not environ.get(name)]:
        raise ValueError(
            f"{lacking[0]} is not set, and Slurm gave this job several tasks; expected "
            f"the variables that `srun` sets for each of them. {remedy}"
        )

    def read(variable: str, parse: Callable[[str], list[Any]], form: str) -> list[Any]:
        text = environ[variable]
        try:
            return parse(form.format(text))
        except ValueError as error:
            raise ValueError(
                f"{variable} is {text!r}; expected a list as `srun` sets it, such as "
                f"'n[1-4],m5' or '2(x4),1'. {remedy}"
            ) from error

    nodes, counts = read(_NODES, hosts, "{}"), read(_COUNTS, tasks, "{}")
    rank, num_tasks = int(environ[_RANK]), int(environ[_TASKS])
    order = environ.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0]
    is_block = order in ("", "block", "*") or max(counts, default=0) <= 1
    is_sum = len(nodes) == len(counts) and rank < num_tasks == sum(counts)
    if not is_sum or not is_block:
        told = ", ".join(f"{x} is {environ.get(x)!r}" for x in names)
        raise ValueError(
            f"{told}, SLURM_DISTRIBUTION is {order!r}; expected a number of tasks a "
            f"node, their sum, and 'block'. {remedy}"
        )
    job = environ.get("SLURM_JOB_ID", "0")
    start = int(job) * _PORTS_A_JOB % _NUM_PORTS if job.isdecimal() else 0
    ports = [_FIRST_PORT + start + i for i in range(max(counts))]
    if reserved := environ.get(_PORTS):
        ports = read(_PORTS, hosts, "[{}]")
    if len(ports) < max(counts):
        raise ValueError(
            f"{_PORTS} is {reserved!r}; expected {max(counts)} ports, one for each "
            f"task of a node. Pass `--resv-ports={max(counts)}` to `srun`."
        )
    pairs = zip(nodes, counts, strict=True)
    addresses = [f"{node}:{ports[i]}" for node, count in pairs for i in range(count)]
    return Cluster("Slurm", tuple(addresses), rank)
