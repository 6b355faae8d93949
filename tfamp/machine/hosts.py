"""Hosts that train together: those of a Slurm step, and whether they can be reached.

TensorFlow's `SlurmClusterResolver` reads Slurm's variables for one worker a GPU: it
asks nvidia-smi, fails without a GPU, and sorts the hosts by name, so that with n9 and
n10 the tasks stand at each other's addresses. Only what it expects is shared with it.
"""

import contextlib
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

_NODES, _COUNTS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
_TASKS, _RANK, _NODE = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_NODEID"
_PORTS, _ORDER = "SLURM_STEP_RESV_PORTS", "SLURM_DISTRIBUTION"
# Below the ports that systems give out on their own, and for each job some of its own.
_FIRST_PORT, _NUM_PORTS, _PORTS_A_JOB = 15000, 16000, 8
_WITHOUT_SRUN = (
    "Start the program with `srun`, or pass `cluster=None` to "
    "`tfamp.distribute.strategy` to train alone"
)


def slurm_has_several(environ: Mapping[str, str]) -> bool:
    """Returns whether Slurm gave this job several tasks.

    A job with one, such as a shell on a node, is no cluster.
    """
    if "SLURM_JOB_ID" not in environ and _NODES not in environ:
        return False
    counts = (environ.get(_TASKS), environ.get("SLURM_NTASKS"))
    return next((each for each in counts if each), "1").strip() != "1"


def slurm_workers(environ: Mapping[str, str]) -> tuple[list[str], int]:
    """Returns the addresses of a step's tasks, in their order, and this one's place.

    A ValueError names a variable that is missing, as without `srun`, or does not fit.
    """
    nodes = expanded_hosts(_NODES, _get(environ, _NODES))
    counts = _counts(_get(environ, _COUNTS))
    rank = _number(environ, _RANK)
    num_tasks = _number(environ, _TASKS)
    if len(nodes) != len(counts):
        raise ValueError(
            f"{_COUNTS} is {environ[_COUNTS]!r}, for {len(counts)} nodes; expected one "
            f"number for each of the {len(nodes)} in {_NODES} ({environ[_NODES]!r}). "
            f"{_WITHOUT_SRUN}."
        )
    if not rank < num_tasks == sum(counts):
        raise ValueError(
            f"{_RANK} is {rank}, {_TASKS} {num_tasks}, and {_COUNTS} "
            f"{environ[_COUNTS]!r}; expected {sum(counts)} tasks, numbered from 0. "
            f"{_WITHOUT_SRUN}."
        )
    places = _placed(environ, counts)
    node, _ = places[rank]
    if environ.get(_NODE, str(node)) != str(node):
        raise ValueError(
            f"{_NODE} is {environ[_NODE]!r}; expected {node}, where task {rank} stands "
            f"in the order {environ.get(_ORDER, 'block')!r}. Pass "
            "`--distribution=block` to `srun`."
        )
    ports = _ports(environ, max(counts))
    return [f"{nodes[node]}:{ports[local]}" for node, local in places], rank


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
        raise ValueError(
            f"{variable} is {text!r}; expected names of hosts, with ranges in "
            "brackets, as in 'n[1-4],m5'. Correct it."
        )
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


def _counts(text: str) -> list[int]:
    """Returns the tasks on each node: [3, 3, 1] of "3(x2),1"."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(
                f"{_COUNTS} is {text!r}; expected numbers of tasks, as in '2(x3),1'. "
                "Correct it."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _placed(environ: Mapping[str, str], counts: list[int]) -> list[tuple[int, int]]:
    """Returns for each task its node and its place there, both from 0."""
    order = environ.get(_ORDER, "block").split(":")[0].split(",")[0].lower()
    if order not in ("", "block", "*", "cyclic"):
        raise ValueError(
            f"{_ORDER} is {environ[_ORDER]!r}; expected 'block' or 'cyclic', which say "
            "on which node a task runs. Pass `--distribution=block` to `srun`."
        )
    places = [
        (node, local) for node, count in enumerate(counts) for local in range(count)
    ]
    in_turns = sorted(places, key=lambda place: (place[1], place[0]))
    return in_turns if order == "cyclic" else places


def _ports(environ: Mapping[str, str], num_needed: int) -> list[int]:
    """Returns the ports of a node's tasks: those that Slurm reserved, if it did."""
    reserved = environ.get(_PORTS)
    if reserved:
        found = [int(n) for n in expanded_hosts(_PORTS, f"[{reserved}]")]
        if len(found) < num_needed:
            raise ValueError(
                f"{_PORTS} is {reserved!r}; expected {num_needed} ports, one for each "
                f"task of a node. Pass `--resv-ports={num_needed}` to `srun`."
            )
        return found
    job = environ.get("SLURM_JOB_ID", "0")
    start = int(job) * _PORTS_A_JOB % _NUM_PORTS if job.isdecimal() else 0
    return [_FIRST_PORT + start + i for i in range(num_needed)]


def _get(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        tasks = environ.get("SLURM_NTASKS") or environ.get(_TASKS)
        raise ValueError(
            f"{name} is not set, and Slurm gave this job {tasks} tasks; expected the "
            f"variables that `srun` sets for each of them. {_WITHOUT_SRUN}."
        )
    return value


def _number(environ: Mapping[str, str], name: str) -> int:
    value = _get(environ, name)
    if not value.isdecimal():
        raise ValueError(f"{name} is {value!r}; expected a number. {_WITHOUT_SRUN}.")
    return int(value)


_SECONDS = 3.0
_MAX_ASKED = 32
LISTENS = "listens"
REFUSED = "host answers, nothing listens yet"
UNKNOWN = "unknown host"
SILENT = "no answer"
# Before training starts nothing listens, which is as it should be.
REMEDIES = {
    UNKNOWN: "Correct the name, or wait until the worker's host is up.",
    SILENT: "Open the port between the hosts; a firewall drops what comes to it.",
}


def answers(addresses: Sequence[str], *, seconds: float = _SECONDS) -> dict[str, str]:
    """Returns for each "host:port" what came of a connection to it; it never hangs.

    A name server may keep a thread for minutes, so threads are left to themselves when
    the time is over. Of a large cluster, the first are asked.
    """
    asked = list(addresses[:_MAX_ASKED])
    found: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def ask(address: str) -> None:
        found.put((address, _ask(address, seconds)))

    for address in asked:
        threading.Thread(target=ask, args=(address,), daemon=True).start()
    result = dict.fromkeys(asked, SILENT)
    deadline = time.monotonic() + seconds
    for _ in asked:
        try:
            address, came = found.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        result[address] = came
    return result


def _ask(address: str, seconds: float) -> str:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except socket.gaierror:
        return UNKNOWN
    except ConnectionRefusedError:
        return REFUSED
    except OSError:
        return SILENT
    return LISTENS


def free_ports(number: int) -> list[int]:
    """Returns ports of this host that nobody listens at, each another one."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(number):
            each = stack.enter_context(socket.socket())
            each.bind(("127.0.0.1", 0))
            found.append(int(each.getsockname()[1]))
        return found
