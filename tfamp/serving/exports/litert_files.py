"""Writes LiteRT by TensorFlow's converter, and lowers it by ai-edge-quantizer."""

import contextlib
import io
import re
import warnings
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfamp.records import checks
from tfamp.records.checks import first_line
from tfamp.serving.exports.request import Request
from tfamp.serving.exports.saved_model_files import quiet, written
from tfamp.serving.exports.tracing import SIGNATURE, Traced, scope_of
from tfamp.serving.runtimes.litert import FILE

_NEEDED = re.compile(r"tf\.(\w+)")
_FLOAT64 = re.compile(r"tensor<[^>]*xf64>|tensor<f64>")


def write(traced: Traced, folder: Path, request: Request) -> None:
    """Writes `model.tflite` into a folder.

    Raises:
        ImportError: A package is missing.
        ValueError: The model has operations that LiteRT has not.
    """
    checks.require("ai_edge_litert", extra="litert", purpose="Exporting to LiteRT")
    content = _converted(traced, request)
    if request.dtype in ("int8", "int4"):
        content = _quantized(content, request)
    (folder / FILE).write_bytes(content)


def _converted(traced: Traced, request: Request) -> bytes:
    with (
        written(traced) as folder,
        quiet("tensorflow", "absl"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        converter = tf.lite.TFLiteConverter.from_saved_model(
            folder, signature_keys=[SIGNATURE]
        )
        if request.dtype == "float16":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            converter.target_spec.supported_types = [tf.float16]
        try:
            content: bytes = converter.convert()
        except Exception as error:  # of whatever the converter raises
            needed = sorted({*_NEEDED.findall(str(error))} - {"entry_function"})
            told = f"for {needed}" if needed else f"here: {first_line(error)}"
            which = " in float64" if _FLOAT64.search(str(error)) else ""
            raise ValueError(
                f"LiteRT has no operation {told}{which}, which the model uses. Export "
                "to 'onnx' or 'saved_model', or take the layers that use it out of it"
                f"{', or give them float32' if which else ''}."
            ) from error
    return content


def _quantized(content: bytes, request: Request) -> bytes:
    quantizer = checks.require(
        "ai_edge_quantizer", extra="litert", purpose="Integers in LiteRT"
    )
    names = quantizer.qtyping.TFLOperationName
    bits = 4 if request.dtype == "int4" else 8
    made = quantizer.quantizer.Quantizer(bytearray(content))
    operations = (
        [names.FULLY_CONNECTED, names.BATCH_MATMUL]
        if request.products_only and request.scheme == "static"
        else [names.ALL_SUPPORTED]
    )
    for operation in operations:
        if request.scheme == "static":
            made.add_static_config(".*", operation, 8, bits)
        elif request.scheme == "dynamic":
            made.add_dynamic_config(".*", operation, bits)
        else:
            made.add_weight_only_config(".*", operation, bits)
    no = quantizer.algorithm_manager.AlgorithmName.NO_QUANTIZE
    if request.scheme == "static":  # else floats would come in and go out as int8
        for operation in (names.INPUT, names.OUTPUT):
            made.update_quantization_recipe(".*", operation, algorithm_key=no)
    for path in request.keep:
        scope = rf"(^|.*[/;]){re.escape(scope_of(path))}/.*"
        made.update_quantization_recipe(scope, names.ALL_SUPPORTED, algorithm_key=no)
    calibrated: Any = None
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if made.need_calibration:
            batches = [dict(batch) for batch in request.calibration]
            calibrated = made.calibrate({SIGNATURE: batches})
        return bytes(made.quantize(calibrated).quantized_model)
