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


# Format -> the packages that write it, and integers in it, beside TensorFlow.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "saved_model": (),
    "litert": ("ai_edge_litert", "ai_edge_quantizer"),
    "onnx": ("onnx", "tf2onnx", "onnxruntime"),
    "openvino": ("openvino", "nncf"),
}


def load_exported(
    path: "str | os.PathLike[str] | keras.Model", *, threads: int | None = None
) -> LoadedModel:
    """Loads what `tfamp.export` wrote or `tfamp.freeze` returned, to ask it to predict.

    Each file is compared with its SHA-256 first, and none is run as Python. TensorFlow
    is imported for the format "saved_model" and Keras models alone.

    Args:
        path: The folder; a `.keras` file, as `tfamp.load_model` takes it; or a Keras
            model itself, whose weights are shared.
        threads: Threads that one prediction may use; None for all usable cores.

    Returns:
        The model: `.predict(x)`, `.run({name: array})`, `.signature`, `.runtime`, to be
        asked from several threads at once. Outputs are float32 or integers.
    """
    if threads is not None:
        checks.positive_int("threads", threads)
    source = Path(path) if isinstance(path, (str, os.PathLike)) else None
    if source is None or (source.suffix == ".keras" and not source.is_dir()):
        from tfamp.models import load_model
        from tfamp.serving.exports.tracing import trace
        from tfamp.stepping.arguments import check_built

        _set_threads(threads or num_usable_cpus())
        model: Any = path if source is None else load_model(source)
        check_built(model, "load")
        return of_trace(trace(model), source)
    found = manifest.read(source)
    manifest.verify(source, found)
    return open_model(source, found, threads)


def open_model(
    folder: Path, found: manifest.Manifest, threads: int | None = None
) -> LoadedModel:
    """Loads a folder of which `export.json` says what is in it."""
    file = folder / manifest.FILES[found.runtime]
    call = _CALLS[found.runtime](str(file), threads or num_usable_cpus())
    # ONNX Runtime measures one range for a batch, LiteRT one for each example.
    is_by_example = (found.runtime, found.scheme) != ("onnx", "dynamic")
    told = (found.runtime, folder, found.signature, call)
    return LoadedModel(*told, is_by_example=is_by_example)


def of_trace(traced: Any, path: Path | None = None) -> LoadedModel:
    """Returns a `Traced` model to be asked as exported ones are."""
    function = traced.function
    call = _called(lambda **given: function(*given.values()), traced)
    return LoadedModel("keras", path, traced.signature, call)


def require(package: str, *, purpose: str) -> Any:
    """Returns a package of a runtime, which sends nothing home from this process.

    ONNX Runtime sends events to Microsoft, OpenVINO and NNCF statistics to Google, both
    from their import on unless the user has opted out. Here nobody has consented.

    Source: onnxruntime, docs/Privacy.md, "Disabling Telemetry".
    """
    (extra,) = (name for name, packages in PACKAGES.items() if package in packages)
    if extra == "onnx":
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    elif extra == "openvino":
        with contextlib.suppress(ImportError):  # then nothing is sent
            telemetry = importlib.import_module("openvino_telemetry.main")
            checker = importlib.import_module("openvino_telemetry.utils.opt_in_checker")
            no = checker.ConsentCheckResult.DECLINED
            checker.OptInChecker.check = lambda self, *args, **options: no
            with contextlib.suppress(RuntimeError):  # nobody has imported it yet
                telemetry.Telemetry().consent = False
    found = checks.require(package, extra=extra, purpose=purpose)
    if package == "onnxruntime":
        found.disable_telemetry_events()
    return found


def _saved_model(folder: str, threads: int) -> Call:
    import tensorflow as tf

    _set_threads(threads)
    loaded = tf.saved_model.load(folder)
    return _called(loaded.signatures["serving_default"], loaded)


def _called(function: Callable[..., Mapping[str, Any]], owner: Any) -> Call:
    import tensorflow as tf

    def call(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = function(**{name: tf.constant(x) for name, x in given.items()})
        return {name: x.numpy() for name, x in found.items()}

    call.owner = owner  # type: ignore[attr-defined]  # its weights would go with it
    return call


def _set_threads(threads: int) -> None:
    """Sets the threads of the whole process, unless it has some or runs already."""
    from tensorflow.config import threading as config

    with contextlib.suppress(RuntimeError):
        if not config.get_intra_op_parallelism_threads():
            config.set_intra_op_parallelism_threads(threads)


def _litert(file: str, threads: int) -> Call:
    require("ai_edge_litert", purpose=repr(file))
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(model_path=file, num_threads=threads).get_signature_runner()
    lock = threading.Lock()  # an interpreter runs one batch at a time

    def call(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with lock:
            return {name: np.array(x) for name, x in runner(**given).items()}

    return call


def _onnx(file: str, threads: int) -> Call:
    onnxruntime = require("onnxruntime", purpose=repr(file))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
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
    package = require("openvino", purpose=repr(file))
    compiled = package.Core().compile_model(file, "CPU", settings)
    of_thread = threading.local()

    def call(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not hasattr(of_thread, "request"):
            of_thread.request = compiled.create_infer_request()
        found = of_thread.request.infer(given)
        ports = ((name, port) for port in compiled.outputs for name in port.get_names())
        return {name: np.array(found[port]) for name, port in ports}

    return call


_CALLS: dict[str, Callable[[str, int], Call]] = {
    "saved_model": _saved_model,
    "litert": _litert,
    "onnx": _onnx,
    "openvino": _openvino,
}
