"""Exported models run: one way to ask any of the runtimes."""

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfamp.machine.cpus import num_usable_cpus
from tfamp.records import checks
from tfamp.serving.runtimes import manifest
from tfamp.serving.runtimes.signature import Call, LoadedModel

if TYPE_CHECKING:
    import keras


_ERRORS_ONLY = 3


def load_exported(
    path: "str | os.PathLike[str] | keras.Model", *, threads: int | None = None
) -> LoadedModel:
    """Loads what `tfamp.export` wrote or `tfamp.freeze` returned, to ask it to predict.

    Each file is compared with its SHA-256 first; nothing of the folder is run as
    Python. TensorFlow is imported for the format "saved_model" and Keras models alone.

    Args:
        path: The folder; or a `.keras` file, frozen or not, as `tfamp.load_model` takes
            it; or a Keras model itself, whose weights are shared.
        threads: Threads that one prediction may use; None for all usable cores.

    Returns:
        The model: `.predict(x)`, `.run({name: array})`, `.signature`, `.runtime`. It
        may be asked from several threads at once. Outputs are float32 or integers.

    Raises:
        FileNotFoundError: There is no such folder, or it is none of `tfamp.export`.
        ImportError: The runtime is not installed; the message names the extra.
        TypeError: `path` is neither a path nor a Keras model.
        ValueError: A file is missing or changed, or a later version wrote the folder.

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

        return keras_model(source or path, threads or num_usable_cpus())
    found = manifest.read(source)
    manifest.verify(source, found)
    return open_model(source, found, threads)


def open_model(
    folder: Path, found: manifest.Manifest, threads: int | None = None
) -> LoadedModel:
    """Loads a folder of which `export.json` says what is in it."""
    threads = threads or num_usable_cpus()
    if found.runtime == "saved_model":
        from tfamp.serving.runtimes.tensorflow_models import saved_model

        return saved_model(folder, found, threads)
    file = str(folder / manifest.FILES[found.runtime])
    call = _WITHOUT_TENSORFLOW[found.runtime](file, threads)
    # ONNX Runtime measures one range for a batch, LiteRT one for each example.
    is_by_example = (found.runtime, found.scheme) != ("onnx", "dynamic")
    return LoadedModel(
        *(found.runtime, folder, found.signature, call), is_by_example=is_by_example
    )


def require_onnxruntime(*, purpose: str) -> Any:
    """Returns the package `onnxruntime`, which sends nothing home from this process.

    Version 1.32 sends events to Microsoft, on Linux too, and keeps an identifier of the
    device at home, from its import on, unless the environment forbids it.

    Source: onnxruntime, docs/Privacy.md, "Disabling Telemetry".
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    package = checks.require("onnxruntime", extra="onnx", purpose=purpose)
    package.disable_telemetry_events()
    return package


def require_openvino(*, purpose: str) -> Any:
    """Returns the package `openvino`, which sends nothing home from this process.

    OpenVINO and NNCF send statistics of use to Google Analytics when they are imported
    and at each conversion, unless the user has opted out. Here nobody has consented.
    """
    with contextlib.suppress(ImportError):  # then nothing is sent
        telemetry = importlib.import_module("openvino_telemetry.main")
        checker = importlib.import_module("openvino_telemetry.utils.opt_in_checker")
        no = checker.ConsentCheckResult.DECLINED
        checker.OptInChecker.check = lambda self, *args, **options: no
        with contextlib.suppress(RuntimeError):  # nobody has imported OpenVINO yet
            telemetry.Telemetry().consent = False
    return checks.require("openvino", extra="openvino", purpose=purpose)


def _litert(file: str, threads: int) -> Call:
    package = checks.require(
        "ai_edge_litert.interpreter", extra="litert", purpose=repr(file)
    )
    interpreter = package.Interpreter(model_path=file, num_threads=threads)
    runner = interpreter.get_signature_runner()
    lock = threading.Lock()  # an interpreter runs one batch at a time

    def call(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with lock:
            return {name: np.array(x) for name, x in runner(**given).items()}

    return call


def _onnx(file: str, threads: int) -> Call:
    onnxruntime = require_onnxruntime(purpose=repr(file))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS_ONLY
    # Threads that spin while they wait take the cores of others.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(file, options, providers=providers)
    names = [output.name for output in session.get_outputs()]
    return lambda given: dict(zip(names, session.run(names, given), strict=True))


def _openvino(file: str, threads: int) -> Call:
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    package = require_openvino(purpose=repr(file))
    compiled = package.Core().compile_model(file, "CPU", settings)
    of_thread = threading.local()

    def call(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not hasattr(of_thread, "request"):
            of_thread.request = compiled.create_infer_request()
        found = of_thread.request.infer(given)
        return {
            name: np.array(found[port])
            for port in compiled.outputs
            for name in port.get_names()
        }

    return call


_WITHOUT_TENSORFLOW: dict[str, Callable[[str, int], Call]] = {
    "litert": _litert,
    "onnx": _onnx,
    "openvino": _openvino,
}
