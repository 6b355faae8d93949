"""Looks at the machine and the settings that a run was measured under."""

import contextlib
import datetime
import os
import platform
from typing import Any

import tensorflow as tf

import tfamp
from tfamp.machine import devices
from tfamp.records import checks, versions
from tfamp.records.environment import VARIABLES
from tfamp.trials.run_records import Context


def look(*, command: str = "") -> Context:
    """Returns the context of this process.

    Args:
        command: How to repeat the comparison.
    """
    threading = tf.config.threading
    onednn = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1").lower()
    return Context(
        devices=devices.devices(),
        driver=_driver(),
        versions={"tfamp": tfamp.__version__, **versions.installed_versions()},
        system=f"{platform.platform()}, Python {platform.python_version()}",
        num_cores=_num_cores(),
        intra_op_threads=threading.get_intra_op_parallelism_threads(),
        inter_op_threads=threading.get_inter_op_parallelism_threads(),
        tf32=bool(tf.config.experimental.tensor_float_32_execution_enabled()),
        onednn=onednn not in ("0", "false"),
        variables={k: os.environ[k] for k in VARIABLES if k in os.environ},
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def _num_cores() -> int:
    """Returns the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _driver() -> str:
    """Returns the version of NVIDIA's driver, "" without one."""
    try:
        pynvml: Any = checks.require("pynvml", extra="gpu", purpose="The driver")
    except ImportError:
        return ""
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
        return version.decode() if isinstance(version, bytes) else str(version)
    return ""
