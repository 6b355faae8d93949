"""What the doctor says of the cluster that a launcher describes."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from tfamp.cli.diagnosis import ClusterReport, Diagnosis, DoctorFinding, Setting
from tfamp.machine import network
from tfamp.machine.clusters import cluster_of

_NETWORK = re.compile("NCCL_|GRPC_|UCX_|FI_")
# What to look at first where NCCL is slow, or waits without an end.
_NCCL = {
    "NCCL_DEBUG": "WARN has NCCL log its errors, INFO what it chooses too",
    "NCCL_SOCKET_IFNAME": "network devices of NCCL, as in eth0; unset, it chooses",
    "NCCL_IB_DISABLE": "1 leaves InfiniBand unused",
    "NCCL_P2P_DISABLE": "1 leaves copies from GPU to GPU unused",
    "NCCL_SHM_DISABLE": "1 leaves shared memory of one host unused",
}
_ONE_VERSION = (
    "Install one version on all: others round otherwise, or do not understand each "
    "other's messages."
)


def settings(environ: Mapping[str, str], report: ClusterReport | None) -> list[Setting]:
    """Returns the variables of NCCL, where there is a cluster."""
    if report is None:
        return []
    return [Setting(name, environ.get(name), what) for name, what in _NCCL.items()]


def read(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Diagnosis]:
    """Returns what the doctor wrote on other workers, by its file.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: It holds something else.
    """
    return {os.fspath(path): Diagnosis.from_json(path) for path in paths}


def differences(
    own: Diagnosis, others: Mapping[str, Diagnosis]
) -> Iterator[DoctorFinding]:
    """Yields what differs between this worker and others, and should not."""
    for path, other in others.items():
        for package in {**own.versions, **other.versions}:
            here, there = own.versions.get(package), other.versions.get(package)
            if here != there:
                message = (
                    f"{package} is {here or 'missing'} here and {there or 'missing'} "
                    f"in {path}."
                )
                yield DoctorFinding("error", message, _ONE_VERSION)
        yield from _of_clusters(own.cluster, other.cluster, path)
        values = {each.name: each.value for each in other.settings}
        for setting in own.settings:
            value = values.get(setting.name)
            if setting.name in values and value != setting.value:
                message = f"{setting.name} is {_shown(setting.value)} here and "
                message += f"{_shown(value)} in {path}."
                remedy = "Set the same on all, where their machines are the same."
                yield DoctorFinding("advice", message, remedy)
        kinds = [sorted({e.device.name for e in d.devices}) for d in (own, other)]
        if kinds[0] != kinds[1]:
            message = f"Devices are {', '.join(kinds[0])} here and "
            message += f"{', '.join(kinds[1])} in {path}."
            remedy = "Each step takes as long as on the slowest: use machines alike."
            yield DoctorFinding("advice", message, remedy)


def _of_clusters(
    own: ClusterReport | None, other: ClusterReport | None, path: str
) -> Iterator[DoctorFinding]:
    """Yields where two workers know of other workers, or are the same one."""
    here = own.cluster.workers if own else ()
    there = other.cluster.workers if other else ()
    if here != there:
        message = f"Workers are {', '.join(here) or 'none'} here and "
        message += f"{', '.join(there) or 'none'} in {path}."
        remedy = "Give all the same list, in one order: else each waits for others."
        yield DoctorFinding("error", message, remedy)
    elif own and other and own.cluster.index == other.cluster.index:
        message = f"This is worker {own.cluster.index}, and so is that of {path}."
        remedy = "Give each worker its own index, and ask the doctor again on each."
        yield DoctorFinding("error", message, remedy)


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(value)


def look(
    environ: Mapping[str, str],
    ask: Callable[[Sequence[str]], dict[str, str]],
    findings: list[DoctorFinding],
) -> ClusterReport | None:
    """Returns the cluster and who answers, and notes what is wrong with either.

    Args:
        environ: Variables.
        ask: Takes addresses; gives for each what came of a connection to it.
        findings: Gets what is wrong.
    """
    try:
        cluster = cluster_of(environ)
    except ValueError as error:
        remedy = "Correct the variable: `tfamp.distribute.cluster` names all it reads."
        findings.append(DoctorFinding("error", str(error), remedy))
        return None
    if not cluster.workers:
        return None
    others = [each for each in cluster.workers if each != cluster.address]
    answers = ask(others)
    for answer, remedy in network.REMEDIES.items():
        silent = [each for each in others if answers.get(each) == answer]
        if silent:
            more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
            message = f"Worker {silent[0]}{more} cannot be reached: {answer}."
            findings.append(DoctorFinding("advice", message, remedy))
    variables = {k: v for k, v in environ.items() if _NETWORK.match(k)}
    return ClusterReport(cluster, answers, dict(sorted(variables.items())))
