"""Exported models run: one way to ask any of the runtimes."""

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfamp.records import checks
from tfamp.serving.runtimes import manifest
from tfamp.serving.runtimes.signature import LoadedModel, dtype_named

if TYPE_CHECKING:
    import keras


_ERRORS_ONLY = 3


def load_exported(
    path: "str | os.PathLike[str] | keras.Model", *, threads: int | None = None
) -> LoadedModel:
    """Loads what `tfamp.export` wrote or `tfamp.freeze` returned, to ask it to predict.

    Each file is compared with its SHA-256 first; nothing of the folder is run as
    Python. TensorFlow is imported for the format "saved_model" and Keras models alone,
    so that the others answer within a fraction of a second of the start of a process.
    A Keras model is traced once, without what `predict` does around each batch.

    Args:
        path: The folder; or a `.keras` file, frozen or not, as `tfamp.load_model` takes
            it; or a Keras model itself, whose weights are shared.
        threads: Threads that one prediction may use, set once; by default one where
            `tfamp.export` found that faster, else as many as the cores that this
            process may use.

    Returns:
        The model: `.predict(x)`, `.run({name: array})`, `.signature`, `.runtime`. It
        may be asked from several threads at once. Outputs are float32 or integers.

    Raises:
        FileNotFoundError: There is no such folder, or it is none of `tfamp.export`.
        ImportError: The runtime is not installed; the message names the extra.
        TypeError: `path` is neither a path nor a Keras model.
        ValueError: A file is missing or changed, or a later version wrote the folder;
            a Keras model is not built, or does not tell its inputs.

    Example:
        >>> load_exported("/nowhere")
        Traceback (most recent call last):
        ...
        FileNotFoundError: `path` is '/nowhere', which is no folder; ...
    """
    if threads is not None:
        checks.positive_int("threads", threads)
    source = Path(path) if isinstance(path, (str, os.PathLike)) else None
    if source is None or (source.suffix == ".keras" and not source.is_dir()):
        from tfamp.serving.runtimes.tensorflow_models import keras_model

        return keras_model(source or path, _threads(threads))
    found = manifest.read(source)
    manifest.verify(source, found)
    return open_model(source, found, threads)


def open_model(
    folder: Path, found: manifest.Manifest, threads: int | None = None
) -> LoadedModel:
    """Loads a folder of which `export.json` says what is in it."""
    threads = _threads(threads or found.threads)
    if found.runtime == "saved_model":
        from tfamp.serving.runtimes.tensorflow_models import saved_model

        return saved_model(folder, found, threads)
    return _WITHOUT_TENSORFLOW[found.runtime](folder, found, threads)


def require_onnxruntime(*, purpose: str) -> Any:
    """Returns the package `onnxruntime`, which sends nothing home from this process.

    Late versions (1.32) send events to Microsoft, on Linux and macOS too, and keep an
    identifier of the device in `~/.cache/Microsoft`, from their import on, unless the
    environment has `ORT_DISABLE_TELEMETRY`. Where it was imported before, the events
    that it takes for essential go on.

    Source: onnxruntime, docs/Privacy.md, "Disabling Telemetry".
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    package = checks.require("onnxruntime", extra="onnx", purpose=purpose)
    package.disable_telemetry_events()
    return package


def require_openvino(*, purpose: str) -> Any:
    """Returns the package `openvino`, which sends nothing home from this process.

    OpenVINO and NNCF send statistics of use to Google Analytics when they are imported
    and at each conversion, each from a process that is forked for it, unless the user
    has run `opt_in_out --opt_out`. Here nobody has consented, whatever is in the file
    that keeps the answer: it is as if that said no.
    """
    with contextlib.suppress(ImportError):  # then nothing is sent
        telemetry = importlib.import_module("openvino_telemetry.main")
        checker = importlib.import_module("openvino_telemetry.utils.opt_in_checker")
        no = checker.ConsentCheckResult.DECLINED
        checker.OptInChecker.check = lambda self, *args, **options: no
        with contextlib.suppress(RuntimeError):  # nobody has imported OpenVINO yet
            telemetry.Telemetry().consent = False
    return checks.require("openvino", extra="openvino", purpose=purpose)


def _threads(threads: int | None) -> int:
    from tfamp.machine.cpus import num_usable_cpus

    return threads or num_usable_cpus()


class _LiteRT(LoadedModel):
    """A model that LiteRT runs, one batch at a time: an interpreter is not shared."""

    runtime = "litert"

    def __init__(self, folder: Path, found: manifest.Manifest, threads: int) -> None:
        super().__init__(folder, found.signature)
        package = checks.require(
            "ai_edge_litert.interpreter", extra="litert", purpose=f"{str(folder)!r}"
        )
        self._interpreter = package.Interpreter(
            model_path=str(folder / manifest.FILES["litert"]), num_threads=threads
        )
        self._runner = self._interpreter.get_signature_runner()
        self._lock = threading.Lock()

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs by name for one batch of all inputs by name."""
        with self._lock:
            found = self._runner(**self.in_file(inputs))
            return {
                spec.name: np.array(found[spec.in_file], dtype_named(spec.dtype))
                for spec in self.signature.outputs
            }


class _Onnx(LoadedModel):
    """A model that ONNX Runtime runs."""

    runtime = "onnx"

    def __init__(self, folder: Path, found: manifest.Manifest, threads: int) -> None:
        super().__init__(folder, found.signature)
        onnxruntime = require_onnxruntime(purpose=f"{str(folder)!r}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _ERRORS_ONLY
        # Threads that spin while they wait take the cores of others.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            str(folder / manifest.FILES["onnx"]),
            options,
            providers=["CPUExecutionProvider"],
        )
        self._outputs = [spec.in_file for spec in found.signature.outputs]
        self._names = [spec.name for spec in found.signature.outputs]

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs by name for one batch of all inputs by name."""
        found = self._session.run(self._outputs, self.in_file(inputs))
        return dict(zip(self._names, found, strict=True))


class _OpenVINO(LoadedModel):
    """A model that OpenVINO runs, with a request of its own in each thread."""

    runtime = "openvino"

    def __init__(self, folder: Path, found: manifest.Manifest, threads: int) -> None:
        super().__init__(folder, found.signature)
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        package = require_openvino(purpose=f"{str(folder)!r}")
        file = str(folder / manifest.FILES["openvino"])
        self._compiled = package.Core().compile_model(file, "CPU", settings)
        self._of_thread = threading.local()

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs by name for one batch of all inputs by name."""
        if not hasattr(self._of_thread, "request"):
            self._of_thread.request = self._compiled.create_infer_request()
        found = self._of_thread.request.infer(self.in_file(inputs))
        outputs = self.signature.outputs
        return {spec.name: np.array(found[spec.in_file]) for spec in outputs}


_WITHOUT_TENSORFLOW: dict[str, Callable[..., LoadedModel]] = {
    "litert": _LiteRT,
    "onnx": _Onnx,
    "openvino": _OpenVINO,
}
