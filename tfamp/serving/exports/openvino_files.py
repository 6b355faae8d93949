"""Writes OpenVINO's format by its own converter, and lowers it by NNCF."""

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfamp.records import checks
from tfamp.records.checks import first_line
from tfamp.serving.exports.request import Request
from tfamp.serving.exports.saved_model_files import quiet, written
from tfamp.serving.exports.tracing import Traced
from tfamp.serving.runtimes.openvino import FILE

_GROUP = 32
_LEAST_GROUP = 8


def write(traced: Traced, folder: Path, request: Request) -> None:
    """Writes `model.xml` and `model.bin` into a folder.

    Raises:
        ImportError: A package is missing.
        ValueError: The model has operations that OpenVINO has not.
    """
    openvino = checks.require(
        "openvino", extra="openvino", purpose="Exporting to OpenVINO"
    )
    with written(traced) as saved, quiet("tensorflow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = openvino.convert_model(saved)
        except Exception as error:  # of whatever the converter raises
            raise ValueError(
                f"OpenVINO cannot express the model: {first_line(error)} Export to "
                "'onnx' or 'saved_model'."
            ) from error
        _name(model, traced)
        if request.dtype in ("int8", "int4"):
            model = _quantized(model, traced, request)
            _check_has_integers(model, request)
        openvino.save_model(
            model, str(folder / FILE), compress_to_fp16=request.dtype == "float16"
        )


def _name(model: Any, traced: Traced) -> None:
    """Gives inputs and outputs the names of the signature."""
    for ports, specs in (
        (model.inputs, traced.signature.inputs),
        (model.outputs, traced.signature.outputs),
    ):
        wanted = {spec.name for spec in specs}
        for port in ports:
            names = {re.sub(r"^serving_default_|:\d+$", "", n) for n in port.names}
            port.get_tensor().set_names(names & wanted or port.names)


def _quantized(model: Any, traced: Traced, request: Request) -> Any:
    nncf = checks.require("nncf", extra="openvino", purpose="Integers in OpenVINO")
    kept = _nodes_of(model, traced, request.keep)
    ignored = nncf.IgnoredScope(names=kept)
    silent = contextlib.redirect_stdout(io.StringIO())
    logging.getLogger("nncf").setLevel(logging.ERROR)
    with silent, contextlib.redirect_stderr(io.StringIO()):
        if request.scheme == "weights":
            mode = nncf.CompressWeightsMode
            if request.dtype == "int8":
                return nncf.compress_weights(
                    model, mode=mode.INT8_SYM, ignored_scope=ignored
                )
            # Rows that no group divides get 8 bits, with one scale for each.
            advanced = nncf.AdvancedCompressionParameters(
                group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST,
                min_adjusted_group_size=_LEAST_GROUP,
            )
            return nncf.compress_weights(
                model,
                mode=mode.INT4_SYM,
                group_size=_GROUP,
                ignored_scope=ignored,
                advanced_parameters=advanced,
            )
        fix = nncf.OverflowFix.ENABLE if request.reduces_range else None
        return nncf.quantize(
            model,
            nncf.Dataset(list(map(dict, request.calibration))),
            subset_size=len(request.calibration),
            model_type=nncf.ModelType.TRANSFORMER if request.products_only else None,
            ignored_scope=ignored,
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                overflow_fix=fix or nncf.OverflowFix.DISABLE
            ),
        )


def _check_has_integers(model: Any, request: Request) -> None:
    lowered = {"FakeQuantize"} if request.scheme == "static" else {"Convert"}
    if not lowered & {node.get_type_name() for node in model.get_ordered_ops()}:
        raise ValueError(
            f"{request.name} quantises nothing of this model: NNCF leaves recurrent "
            "layers in float32. Pass another `scheme=`, or another format."
        )


def _nodes_of(model: Any, traced: Traced, keep: Mapping[str, str]) -> list[str]:
    """Returns the nodes of layers, by their names or by those of weights they read."""
    if not keep:
        return []

    def is_kept(node: Any) -> bool:
        names = [node.get_friendly_name()]
        names += [
            port.get_source_output().get_node().get_friendly_name()
            for port in node.inputs()
            if port.get_source_output().get_node().get_type_name() == "Constant"
        ]
        paths = [path for path in map(traced.path_of, names) if path is not None]
        return any(
            path == each or path.startswith(f"{each}/")
            for path in paths
            for each in keep
        )

    return [
        node.get_friendly_name()
        for node in model.get_ordered_ops()
        if node.get_type_name() in ("MatMul", "Convolution", "GroupConvolution")
        and is_kept(node)
    ]
