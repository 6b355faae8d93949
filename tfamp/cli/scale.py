"""`tfamp scale`: what more replicas bring, and what holds them up."""

import dataclasses

import tfamp
from tfamp.cli._flags import MAX_MEMORY, Call, Command, Flag, Outcome
from tfamp.cli._flags import sizes as read_sizes
from tfamp.cli.tools import BUILD, STATUS, TARGET, one_policy


def _scale(call: Call) -> Outcome:
    given = {flag.name: call.values[flag.name] for flag in _SAME}
    found = tfamp.scaling(
        call.argument,
        replicas=call.values["replicas"],
        policy=str(call.values["policy"]),
        max_memory_bytes=call.values["max_memory"],
        **given,
    )
    return Outcome(found, is_bad=found.verdict == "not equal")


# Arguments of `tfamp.scaling` under the same names.
_SAME = (
    Flag(
        *("workers", "bool", False),
        "Have each replica be a process of its own, as on machines, not a device.",
    ),
    Flag(
        *("batch_size", "integer", None, "Examples of a step on one device."),
        {"lower_bound": 1},
    ),
    Flag("seconds", "float", 20.0, "About how long to time replicas."),
    Flag("timeout_seconds", "float", 600.0, "The most that an answer may take."),
)
_COMMAND = Command(
    "scale",
    "Looks at one device, holds the first steps of several replicas against its own, "
    "and times them: efficiency, and the shares of a step that go to communication, "
    "the slowest worker and the input. Replicas are GPUs, logical CPUs where there is "
    f"no GPU, or processes. {BUILD}\n\n"
    + STATUS.replace("if it cannot", "if steps are not equal or it cannot"),
    _scale,
    (
        Flag("replicas", read_sizes, [1, 2], "Numbers of replicas, such as 1,2,4."),
        Flag("policy", one_policy, "auto", "Policy to build under."),
        MAX_MEMORY._replace(
            help="Search for the batch that trains fastest below it, such as 16GB."
        ),
        *_SAME,
    ),
    TARGET,
)
COMMANDS = {
    "scale": _COMMAND,
    "scaling": dataclasses.replace(_COMMAND, name="scaling"),
}
