"""What the doctor says of the cluster that a launcher describes."""

import re
from collections.abc import Callable, Mapping, Sequence

from tfamp.cli.diagnosis import ClusterReport, DoctorFinding
from tfamp.machine.clusters import environment, reach

_NETWORK = re.compile("NCCL_|GRPC_|UCX_|FI_")


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
        cluster = environment.read(environ)
    except ValueError as error:
        remedy = "Correct the variable: `tfamp.distribute.cluster` names all it reads."
        findings.append(DoctorFinding("error", str(error), remedy))
        return None
    if not cluster.workers:
        return None
    others = [each for each in cluster.workers if each != cluster.address]
    answers = ask(others)
    for answer, remedy in reach.REMEDIES.items():
        silent = [each for each in others if answers.get(each) == answer]
        if silent:
            more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
            message = f"Worker {silent[0]}{more} cannot be reached: {answer}."
            findings.append(DoctorFinding("advice", message, remedy))
    variables = {k: v for k, v in environ.items() if _NETWORK.match(k)}
    return ClusterReport(cluster, answers, dict(sorted(variables.items())))
