"""Where and how a comparison was measured, so that another one can be held to it."""

import dataclasses

from tfamp.results import Device, Record


@dataclasses.dataclass(frozen=True)
class Context(Record):
    """The machine, the versions and the settings behind the figures.

    Args:
        devices: What TensorFlow computed on.
        driver: The GPU's driver, "" without one.
        versions: Package -> version.
        system: Operating system and Python, as text.
        num_cores: Processor cores that the process may use.
        intra_op_threads: Threads of one operation; 0 leaves it to TensorFlow.
        inter_op_threads: Operations at a time; 0 likewise.
        tf32: Whether float32 products may round to TF32 (on GPUs that can).
        onednn: Whether TensorFlow's oneDNN kernels are on.
        variables: The environment variables that matter and are set.
        command: How to measure it again.
        date: The day of the first run, as 2026-01-31 in UTC.
    """

    devices: tuple[Device, ...]
    driver: str
    versions: dict[str, str | None]
    system: str
    num_cores: int
    intra_op_threads: int
    inter_op_threads: int
    tf32: bool
    onednn: bool
    variables: dict[str, str]
    command: str = ""
    date: str = ""
