"""Writes SavedModels, LiteRT and OpenVINO by their own converters and quantisers."""

import contextlib
import io
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfamp.records import checks
from tfamp.records.checks import first_line
from tfamp.serving.exports.request import NothingRoundedError, Request
from tfamp.serving.exports.tracing import SIGNATURE, Traced, scope_of
from tfamp.serving.runtimes import require_openvino
from tfamp.serving.runtimes.manifest import FILES

# Operations that LiteRT's converter names as missing.
_NEEDED = re.compile(r"tf\.(\w+)")
# Those that OpenVINO's names, after a comma each.
_UNCONVERTED = re.compile(r"^-- (?:No conversion rule|Conversion).*?: (.+)$", re.M)
_FLOAT64 = re.compile(r"tensor<[^>]*xf64>|tensor<f64>")
_PRODUCTS = ("MatMul", "Convolution", "GroupConvolution")


def write_saved_model(traced: Traced, folder: Path, request: Request) -> None:
    """Writes `saved_model.pb` and `variables/`, which hold each weight once."""
    del request  # the trace is of a model in the dtype already
    with quiet("tensorflow", "absl"):
        tf.saved_model.save(
            traced.module, str(folder), signatures={SIGNATURE: traced.function}
        )


def write_litert(traced: Traced, folder: Path, request: Request) -> None:
    """Writes `model.tflite` into a folder."""
    checks.require("ai_edge_litert", extra="litert", purpose="Exporting to LiteRT")
    content = traced.converted.get("litert")
    if content is None or request.dtype == "float16":
        content = _litert(traced, request)
    if request.dtype != "float16":
        traced.converted["litert"] = content
    if request.dtype == "int8":
        content = _litert_integers(content, request)
    (folder / FILES["litert"]).write_bytes(content)


def _litert(traced: Traced, request: Request) -> bytes:
    """Returns a file of LiteRT in floats."""
    with _saved(traced) as saved, quiet("tensorflow", "absl"):
        converter = tf.lite.TFLiteConverter.from_saved_model(
            saved, signature_keys=[SIGNATURE]
        )
        if request.dtype == "float16":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            converter.target_spec.supported_types = [tf.float16]
        try:
            return bytes(converter.convert())
        except Exception as error:  # of whatever the converter raises
            needed = sorted({*_NEEDED.findall(str(error))} - {"entry_function"})
            told = f"for {needed}" if needed else f"here: {first_line(error)}"
            which = " in float64" if _FLOAT64.search(str(error)) else ""
            raise ValueError(
                f"LiteRT has no operation {told}{which}, which the model uses. Export "
                f"to {traced.elsewhere()}, or take the layers that use it out of it"
                f"{', or give them float32' if which else ''}."
            ) from error


def write_openvino(traced: Traced, folder: Path, request: Request) -> None:
    """Writes `model.xml` and `model.bin` into a folder."""
    package = require_openvino(purpose="Exporting to OpenVINO")
    with _saved(traced) as saved, quiet("tensorflow"):
        try:
            model = package.convert_model(saved)
        except Exception as error:  # of whatever the converter raises
            needed = sorted(", ".join(_UNCONVERTED.findall(str(error))).split(", "))
            told = f"has no operation for {needed}, which the model uses."
            if needed == [""]:
                told = f"cannot express the model: {first_line(error)}"
            raise ValueError(
                f"OpenVINO {told} Export to {traced.elsewhere()}, or take the layers "
                "that use it out of it."
            ) from error
        _name_ports(model, traced)
        if request.dtype == "int8":
            model = _openvino_integers(model, traced, request)
        package.save_model(
            *(model, str(folder / FILES["openvino"])),
            compress_to_fp16=request.dtype == "float16",
        )


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Keeps loggers and warnings of converters quiet: running a file finds faults."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _saved(traced: Traced) -> Iterator[str]:
    """Yields a folder with a SavedModel, from which other formats are converted."""
    with tempfile.TemporaryDirectory() as folder:
        write_saved_model(traced, Path(folder), Request("saved_model", "float32"))
        yield folder


def _litert_integers(content: bytes, request: Request) -> bytes:
    """Returns a file of LiteRT with integers in it, by ai-edge-quantizer."""
    quantizer = checks.require(
        "ai_edge_quantizer", extra="litert", purpose="Integers in LiteRT"
    )
    names = quantizer.qtyping.TFLOperationName
    made = quantizer.quantizer.Quantizer(bytearray(content))
    operations = (
        [names.FULLY_CONNECTED, names.BATCH_MATMUL]
        if request.products_only and request.scheme == "static"
        else [names.ALL_SUPPORTED]
    )
    for operation in operations:
        if request.scheme == "static":
            made.add_static_config(".*", operation, 8, 8)
        elif request.scheme == "dynamic":
            made.add_dynamic_config(".*", operation, 8)
        else:
            made.add_weight_only_config(".*", operation, 8)
    no = quantizer.algorithm_manager.AlgorithmName.NO_QUANTIZE
    if request.scheme == "static":  # else floats would come in and go out as int8
        for operation in (names.INPUT, names.OUTPUT):
            made.update_quantization_recipe(".*", operation, algorithm_key=no)
    for path in request.keep:
        scope = rf"(^|.*[/;]){re.escape(scope_of(path))}/.*"
        made.update_quantization_recipe(scope, names.ALL_SUPPORTED, algorithm_key=no)
    calibrated: Any = None
    with contextlib.redirect_stdout(io.StringIO()), quiet():
        if made.need_calibration:
            batches = [dict(batch) for batch in request.calibration]
            calibrated = made.calibrate({SIGNATURE: batches})
        return bytes(made.quantize(calibrated).quantized_model)


def _name_ports(model: Any, traced: Traced) -> None:
    """Gives inputs and outputs the names of the signature."""
    specs = (*traced.signature.inputs, *traced.signature.outputs)
    wanted = {spec.in_file for spec in specs}
    # An output that is an input as it is has both names on one tensor.
    for port in (*model.inputs, *model.outputs):
        names = {re.sub(r"^serving_default_|:\d+$", "", n) for n in port.names}
        port.get_tensor().set_names(names & wanted or port.names)


def _openvino_integers(model: Any, traced: Traced, request: Request) -> Any:
    """Returns a model of OpenVINO with integers in it, by NNCF."""
    nncf = checks.require("nncf", extra="openvino", purpose="Integers in OpenVINO")
    ignored = nncf.IgnoredScope(names=_kept_nodes(model, traced, request))
    logging.getLogger("nncf").setLevel(logging.ERROR)
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        if request.scheme == "static":
            overflow = nncf.OverflowFix
            found = nncf.quantize(
                model,
                nncf.Dataset(list(map(dict, request.calibration))),
                subset_size=len(request.calibration),
                model_type=nncf.ModelType.TRANSFORMER
                if request.products_only
                else None,
                ignored_scope=ignored,
                advanced_parameters=nncf.AdvancedQuantizationParameters(
                    overflow_fix=overflow.ENABLE
                    if request.reduces_range
                    else overflow.DISABLE
                ),
            )
        else:
            found = nncf.compress_weights(
                model, mode=nncf.CompressWeightsMode.INT8_SYM, ignored_scope=ignored
            )
    lowered = "FakeQuantize" if request.scheme == "static" else "Convert"
    if lowered not in {node.get_type_name() for node in found.get_ordered_ops()}:
        raise NothingRoundedError(
            f"{request.name} quantises nothing of this model: NNCF leaves recurrent "
            "layers in float32. Pass another `scheme=`, or another format."
        )
    return found


def _kept_nodes(model: Any, traced: Traced, request: Request) -> list[str]:
    """Returns the products of layers that stay in float32, by name."""

    def names(node: Any) -> Iterator[str]:
        """Yields the node's name and those of the weights that it reads."""
        yield node.get_friendly_name()
        for port in node.inputs():
            source = port.get_source_output().get_node()
            if source.get_type_name() == "Constant":
                yield source.get_friendly_name()

    return [
        node.get_friendly_name()
        for node in model.get_ordered_ops()
        if node.get_type_name() in _PRODUCTS and traced.is_in(request.keep, names(node))
    ]
