"""One candidate: written, run in a fresh process, compared, and put in its place."""

import contextlib
import dataclasses
import errno
import importlib.metadata
import os
import platform
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfamp.machine.cpus import instruction_sets, num_usable_cpus
from tfamp.records.checks import short_error
from tfamp.records.record import BESIDE
from tfamp.records.units import format_bytes
from tfamp.serving.exports import onnx_files, writers
from tfamp.serving.exports.request import PACKAGES, Request
from tfamp.serving.exports.source import Source
from tfamp.serving.parity import check_parity, size_of
from tfamp.serving.parity.result import FreshProcess, Parity
from tfamp.serving.parity.timings import raced
from tfamp.serving.runtimes import fresh_process, open_model
from tfamp.serving.runtimes.manifest import (
    READ_FOLDERS,
    Manifest,
    digests,
    written_in,
)
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.trials.statistics import MIN_GAIN

WRITERS = {
    "saved_model": writers.write_saved_model,
    "litert": writers.write_litert,
    "onnx": onnx_files.write,
    "openvino": writers.write_openvino,
}
# Of the spread of an output: what float32 sums in another order come to, and more.
MAX_FLOAT32_DIFFERENCE = 1e-2
# How long one thread is timed against all cores.
_THREADS_SECONDS = 0.3
# Of a model's weights: as converters read them, and before and after lowering.
_COPIES = 4


@dataclasses.dataclass
class Candidate:
    """An export that was written and runs.

    Attributes:
        request: What it was to be.
        folder: Where it lies until it is chosen.
        manifest: What its `export.json` says.
        difference: The largest from the float32 model's outputs, over their spread.
        cost: What it took a fresh process.
    """

    request: Request
    folder: Path
    manifest: Manifest
    difference: float
    cost: FreshProcess | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes of all its files."""
        return size_of(self.folder) or 0

    def load(self, *, threads: int | None = None) -> LoadedModel:
        """Returns the model in its runtime, from where it was written."""
        return open_model(self.folder, self.manifest, threads)


def write(source: Source, request: Request, folder: Path) -> Candidate:
    """Writes an export with `export.json` into an empty folder, and runs it.

    Raises:
        ImportError: A package is missing.
        ValueError: The format cannot express the model, the file cannot be loaded or
            run in a fresh process, or answers otherwise than the model.
    """
    WRITERS[request.format](source.trace_for(request), folder, request)
    manifest = Manifest(
        runtime=request.format,
        dtype=request.dtype,
        scheme=request.scheme,
        signature=source.traced.signature,
        files=digests(folder),
        versions=_versions(request.format),
        processor={"name": platform.processor(), "flags": list(instruction_sets())},
        kept=dict(request.keep),
        plan=request.to_dict(),
    )
    manifest.write(folder)
    inputs = source.tried_inputs()
    answered = fresh_process.ask(folder, inputs)
    difference = largest_difference(source.traced.call(inputs), answered.outputs)
    is_wrong = request.dtype == "float32" and difference > MAX_FLOAT32_DIFFERENCE
    if is_wrong or not np.isfinite(difference):
        raise ValueError(
            f"The exported file answers otherwise than the model, by {difference:.1e} "
            "of the outputs' spread. Export another format or dtype."
        )
    cost = FreshProcess(request.format, answered.seconds, answered.peak_bytes)
    return Candidate(request, folder, manifest, difference, cost)


def compared(source: Source, candidate: Candidate, **timing: Any) -> Parity:
    """Returns what the gate says of a candidate on the source's validation data.

    What the float32 model answers to it is predicted once for all candidates.
    """
    return check_parity(
        *(source.model, candidate.load(), source.validation),
        metric=source.metric,
        tolerance=source.tolerance,
        known=source.expected,
        **timing,
    )


def choose_threads(source: Source, candidate: Candidate) -> None:
    """Notes in `export.json` whether one thread is faster than all cores.

    Steps of a recurrent layer, and of any small model, are over before other threads
    have woken up. The threads of TensorFlow are those of the whole process.
    """
    if num_usable_cpus() == 1 or candidate.request.format == "saved_model":
        return
    ways = {"one": candidate.load(threads=1), "all": candidate.load()}
    sizes = {1, source.batch_size or 1}
    paces = raced(ways, source.tried_inputs(), sizes, seconds=_THREADS_SECONDS)
    threads = 1 if paces["all"].slowdown > MIN_GAIN else None
    candidate.manifest = dataclasses.replace(candidate.manifest, threads=threads)
    candidate.manifest.write(candidate.folder)


def largest_difference(
    wanted: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]
) -> float:
    """Returns an output's largest difference over its spread, inf if not finite.

    Example:
        >>> largest_difference({"y": np.array([0.0, 2.0])}, {"y": np.array([0.0, 1.9])})
        0.1
    """
    largest = 0.0
    for name, exact in wanted.items():
        other = np.asarray(found[name])
        if exact.dtype.kind not in "fiub":
            same = np.array_equal(exact.astype(str), other.astype(str))
            largest = max(largest, 0.0 if same else float("inf"))
            continue
        exact, other = exact.astype(np.float64), other.astype(np.float64)
        if exact.shape != other.shape or not np.array_equal(
            np.isfinite(exact), np.isfinite(other)
        ):
            return float("inf")
        held = np.isfinite(exact)
        if not held.any():
            continue
        spread = float(exact[held].std()) or float(abs(exact[held]).max()) or 1.0
        largest = max(largest, float(abs(exact - other)[held].max()) / spread)
    return round(largest, 12)


def _versions(format: str) -> dict[str, str]:
    """Returns the versions of what wrote an export."""
    import tfamp

    found = {"tfamp": tfamp.__version__, "python": platform.python_version()}
    for package in ("tensorflow", "keras", "numpy", *PACKAGES[format]):
        try:
            found[package.replace("_", "-")] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_target(path: Path) -> None:
    """Raises unless a folder may be written at `path`, or take an export's place.

    Raises:
        FileExistsError: Something else is there, or this process stands in it.
        FileNotFoundError: The folder it is to lie in is not there.
        PermissionError: Nothing may be written there.
    """
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(
            f"`path` is {str(path)!r}, and its folder is not there; expected a name in "
            f"a folder that is. Make it with `mkdir -p {path.absolute().parent}`."
        )
    if path.is_symlink():
        raise FileExistsError(
            f"`path` is {str(path)!r}, a link to {os.readlink(path)!r}; expected the "
            "name of a folder. Pass what the link points to, or another path and move "
            "the link there."
        )
    if path.exists() and path.resolve() in (here := Path.cwd(), *here.parents):
        raise FileExistsError(
            f"`path` is {str(path)!r}, in which this process works; expected another "
            "folder, as a former export is moved away. Change to the folder above, and "
            "pass its name."
        )
    is_export = path.is_dir() and written_in(path) is not None
    is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not (is_free or is_export):
        raise FileExistsError(
            f"`path` is {str(path)!r}, where something else is than an export; "
            "expected a new name, an empty folder or a former export, which is "
            "replaced. Pass another path."
        )
    for folder in (path.absolute().parent, path):
        if folder.exists() and not os.access(folder, os.W_OK):
            raise PermissionError(
                errno.EACCES,
                f"`path` is {str(path)!r}, and {str(folder)!r} is read-only; expected "
                "the right to write. Make it writable, or pass another path.",
            )


def place(source: Path, path: Path) -> None:
    """Copies a folder to where it belongs, whole or not at all.

    Of a former export go the files that its `export.json` names; others, such as the
    labels that a deployment reads, come along.

    What was there stays as it was if the disk is full, Ctrl-C comes at whatever moment,
    or the process is killed. Killed between the two moves at the end, which take
    microseconds, it lies beside as `.NAME.TOKEN.former`.

    Raises:
        FileExistsError: Other files are where those of the export belong.
        OSError: The disk is full, or does not let the folder be written.
    """
    target = path.absolute()
    token = secrets.token_hex(4)
    beside = target.with_name(f".{target.name}.{token}{BESIDE}")
    former = target.with_name(f".{target.name}.{token}.former")
    files = [file for file in sorted(source.rglob("*")) if file.is_file()]
    new = {file.relative_to(source).as_posix() for file in files}
    others = _others(target, new)
    try:
        beside.mkdir()
        for file in files:
            copy = beside / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        for name in others:
            copy = beside / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(target / name, copy, follow_symlinks=False)
        if target.exists():
            shutil.copymode(target, beside)
            os.replace(target, former)
        os.replace(beside, target)
    except OSError as error:
        remedy = "Free some space" if _is_full(error) else "Make its folder writable"
        size = format_bytes(sum(file.stat().st_size for file in files))
        raise OSError(
            error.errno,
            f"`path` is {str(path)!r}, which could not be written ({error.strerror}); "
            f"expected room for {size} and the right to write. What was there is as it "
            f"was. {remedy}, or pass another path.",
        ) from error
    finally:
        if former.exists() and not target.exists():
            os.replace(former, target)
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def _others(target: Path, new: Collection[str]) -> list[str]:
    """Returns the files in a former export's folder that are not of the export.

    Raises:
        FileExistsError: One is where the `new` files belong.
    """
    former = written_in(target) or ()
    found = []
    for folder, below, names in os.walk(target):
        links = [name for name in below if Path(folder, name).is_symlink()]
        for name in (*names, *links):
            path = Path(folder, name).relative_to(target).as_posix()
            if path not in former:
                found.append(path)
    # A SavedModel is all that lies in its folders.
    is_saved_model = "saved_model.pb" in new
    read = tuple(f"{name}/" for name in READ_FOLDERS["saved_model"] if is_saved_model)
    taken = [path for path in found if path in new or path.startswith(read)]
    if taken:
        raise FileExistsError(
            f"{str(target)!r} holds {taken}, which no export wrote and where this one "
            "has files of its own; expected other names. Nothing was written: move "
            "them, or pass another path."
        )
    return found


@contextlib.contextmanager
def said_if_full(size_bytes: int) -> Iterator[None]:
    """Says that the disk of temporary files is too full where that may be the cause.

    Libraries say so each in their own words, or not at all.

    Args:
        size_bytes: Of the weights of the model that the block writes and converts.

    Raises:
        OSError: The block failed, and the disk has too little left for it.
    """
    try:
        yield
    except Exception as error:
        where = tempfile.gettempdir()
        free, needed = shutil.disk_usage(where).free, _COPIES * size_bytes
        is_told = isinstance(error, (ImportError, OSError, TypeError, ValueError))
        if not _is_full(error) and (is_told or free >= needed):
            raise
        raise OSError(
            errno.ENOSPC,
            f"Writing the model failed in {where!r}, where {format_bytes(free)} are "
            f"free: {short_error(error)}; expected room for {_COPIES} times its "
            f"weights, {format_bytes(needed)}. Free some space there, or set TMPDIR "
            "to a folder that has more.",
        ) from error


def _is_full(error: Exception) -> bool:
    """States whether an error says that a disk or a quota is full."""
    number = error.errno if isinstance(error, OSError) else None
    return number in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
