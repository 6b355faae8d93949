"""Which versions tfamp supports, which are here, and what is wrong with them."""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tfamp.records import checks

# Environment variable -> what it does.
VARIABLES = {
    "TFAMP_POLICY": "policy of `tfamp.enable()` when it is given none",
    "TFAMP_UNTESTED_KERAS": "1 leaves out the self-test on versions not tested",
    "KERAS_BACKEND": "Keras's backend; has to be tensorflow",
    "KERAS_HOME": "folder of keras.json, which may set a backend too",
    "TF_USE_LEGACY_KERAS": "1 makes tf.keras the old Keras 2",
    "CUDA_VISIBLE_DEVICES": "GPUs that TensorFlow may see; empty or -1 hides all",
    "TF_ENABLE_ONEDNN_OPTS": "0 turns off oneDNN, which bfloat16 on a CPU needs",
    "ONEDNN_MAX_CPU_ISA": "caps the CPU instructions that oneDNN uses",
    "ONEDNN_DEFAULT_FPMATH_MODE": "lets oneDNN round float32 products to fewer bits",
    "TF_XLA_FLAGS": "--tf_xla_auto_jit=2 compiles all graphs with XLA",
    "XLA_FLAGS": "options of the XLA compiler",
    "TF_ENABLE_AUTO_MIXED_PRECISION": "1 has TensorFlow lower precision on its own",
    "TF_GPU_ALLOCATOR": "cuda_malloc_async lessens fragmentation of GPU memory",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true takes GPU memory as needed, not all at once",
    "TF_DETERMINISTIC_OPS": "1 gives the same result in each run, at some speed",
}
# Package -> its name, the first and the last minor version (None: no end; every patch
# release of them is fine), and what to do about another.
_PACKAGES = {
    "python": ("Python", (3, 10), (3, 13), "Make an environment with one of these."),
    "tensorflow": (
        *("TensorFlow", (2, 19), (2, 21)),
        "Run `pip install 'tensorflow>=2.19,<2.22'`.",
    ),
    "keras": ("Keras", (3, 10), None, "Run `pip install 'keras>=3.10'`."),
}
SUPPORTED = {
    package: f"{major}.{minor} {f'to {last[0]}.{last[1]}' if last else 'and later'}"
    for package, (_, (major, minor), last, _) in _PACKAGES.items()
}
# What the suite runs on, oldest and newest. On any other a self-test comes first, which
# the variable named here leaves out.
TESTED_KERAS = ("3.10.0", "3.15.1")
UNTESTED_KERAS = "TFAMP_UNTESTED_KERAS"
# How versions of Keras begin that are wrong -> what is wrong there.
BAD_KERAS = {
    "3.16.0.dev": "brings arrays in one order in all epochs, runs and seeds "
    "(keras#23046); `fit` is mended while tfamp is enabled"
}
# The same library under the names it is published by; the first one found counts.
_DISTRIBUTIONS = {
    "tensorflow": (
        *("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos"),
        *("tensorflow-rocm", "intel-tensorflow", "tf-nightly", "tf-nightly-cpu"),
    ),
    "keras": ("keras", "keras-nightly"),
    "numpy": ("numpy",),
}


class Problem(NamedTuple):
    """Something that keeps tfamp from working here: a package or a variable."""

    found: str
    remedy: str
    error: type[Exception]


def installed_versions() -> dict[str, str | None]:
    """Returns the versions of Python, TensorFlow, Keras and NumPy, None if missing."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package, names in _DISTRIBUTIONS.items():
        versions[package] = None
        for name in names[::-1]:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(name)
    return versions


def blame_untested_keras(
    error: Exception, versions: Mapping[str, str | None] | None = None
) -> str | None:
    """Returns what to say where tfamp cannot be imported; None on a tested Keras."""
    keras = (installed_versions() if versions is None else versions)["keras"]
    if keras is None or keras in TESTED_KERAS:
        return None
    return (
        f"tfamp does not know its way in Keras {keras}: {type(error).__name__}: "
        f"{checks.first_line(error)}. Install a version that it was tested with: "
        f"`pip install 'keras=={TESTED_KERAS[-1]}'`."
    )


def keras_fault(version: str | None) -> tuple[str, str] | None:
    """Returns what is known to be wrong with a version of Keras, and the remedy."""
    remedy = f"Install a version without it: `pip install 'keras=={TESTED_KERAS[-1]}'`."
    for start, fault in BAD_KERAS.items():
        if version is not None and version.startswith(start):
            return f"Keras {version} {fault}.", remedy
    return None


def find_problems(
    environ: Mapping[str, str] | None = None,
    versions: Mapping[str, str | None] | None = None,
    modules: Mapping[str, Any] | None = None,
) -> tuple[Problem, ...]:
    """Returns all that keeps tfamp from working here, or in what is given."""
    environ = os.environ if environ is None else environ
    versions = installed_versions() if versions is None else versions
    modules = sys.modules if modules is None else modules
    found = []
    for package, (name, first, last, remedy) in _PACKAGES.items():
        version = versions.get(package)
        numbers = re.match(r"(\d+)\.(\d+)", version or "")
        minor = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
        if not (version and first <= minor <= (last or minor)):
            told = f"Found {name} {version}" if version else f"{name} is not installed"
            told += f"; tfamp supports {name} {SUPPORTED[package]}."
            found.append(Problem(told, remedy, ImportError))
    where, backend, remedy = _backend(environ, modules)
    if backend not in (None, "tensorflow"):
        text = f"{where} {backend!r}; tfamp needs 'tensorflow'."
        found.append(Problem(text, remedy, ValueError))
    legacy = environ.get("TF_USE_LEGACY_KERAS")
    if legacy in ("true", "True", "1"):  # what TensorFlow itself takes for "yes"
        text = f"TF_USE_LEGACY_KERAS is {legacy!r}, which makes `tf.keras` Keras 2."
        remedy = "Unset TF_USE_LEGACY_KERAS before TensorFlow is imported."
        found.append(Problem(text, remedy, ValueError))
    return tuple(found)


def check_environment(*where: Mapping[str, Any]) -> None:
    """Raises the first of `find_problems`: `ImportError` or `ValueError`."""
    for problem in find_problems(*where):
        raise problem.error(f"{problem.found} {problem.remedy}")


def _backend(
    environ: Mapping[str, str], modules: Mapping[str, Any]
) -> tuple[str, str | None, str]:
    """Returns what says which backend Keras has, that backend, and what to do."""
    # A module that is still being imported has no `config` yet.
    config: Any = getattr(modules.get("keras"), "config", None)
    remedy = "Set KERAS_BACKEND=tensorflow before Keras is imported, in a new process."
    if config is not None:
        return "Keras is already running on the backend", config.backend(), remedy
    if backend := environ.get("KERAS_BACKEND"):
        return "KERAS_BACKEND is", backend, remedy
    home = environ.get("KERAS_HOME") or f"{environ.get('HOME', '~')}/.keras"
    path = Path(home).expanduser() / "keras.json"
    try:
        found = json.loads(path.read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        found = None  # Keras goes on with its defaults when it cannot read the file
    return f"{path} sets the backend to", found, remedy
