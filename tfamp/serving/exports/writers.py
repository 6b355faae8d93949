"""Writes each format, and integers in it, by its runtime's own tools."""

import contextlib
import dataclasses
import functools
import importlib.util
import io
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.machine.cpus import instruction_sets
from tfamp.records.checks import first_line
from tfamp.serving.exports.tracing import SIGNATURE, Traced, is_in, scope_of
from tfamp.serving.runtimes import PACKAGES, require
from tfamp.serving.runtimes.manifest import FILES

DTYPES = ("float32", "float16", "bfloat16", "int8")
# Format -> dtype -> the schemes that its quantizer has, the one to take first; (""):
# floats. What is missing cannot be expressed, or no runtime loads it.
POSSIBLE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "saved_model": {"float32": ("",), "float16": ("",), "bfloat16": ("",)},
    "litert": {"float32": ("",), "float16": ("",), "int8": ("dynamic", "static")},
    "onnx": {"float32": ("",), "float16": ("",), "int8": ("dynamic", "static")},
    "openvino": {"float32": ("",), "float16": ("",), "int8": ("static",)},
}
# Operations that converters name as missing: LiteRT's, OpenVINO's behind commas.
_MISSING = re.compile(
    r"tf\.([A-Z]\w+)|^-- (?:No conversion rule|Conversion).*?: (.+)$", re.M
)
_OPSET = 17
_PRODUCTS = ["MatMul", "Gemm"]
_LITERT_PRODUCTS = ("FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D", "BATCH_MATMUL")
_OPENVINO_PRODUCTS = ("MatMul", "Convolution", "GroupConvolution")
_INTEGERS = re.compile("Quantize|Integer|QLinear")
Ranges = Mapping[str, tuple[float, float]]


class NothingRoundedError(ValueError):
    """A quantizer that left a model as it is, as where all that it rounds is kept."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One file to be written."""

    format: str
    dtype: str
    scheme: str  # "" for floats
    calibration: tuple[dict[str, np.ndarray], ...]  # batches by name, for "static"
    keep: Mapping[str, str]  # path of a layer that stays in float32 -> why
    # Path of a layer -> the range of its input, where the model was trained with it.
    ranges: Ranges
    products_only: bool  # of matrices are quantized, as in models with attention

    @property
    def name(self) -> str:
        """Returns its name in tables, as "onnx int8 dynamic"."""
        return " ".join(filter(None, (self.format, self.dtype, self.scheme)))


def missing(format: str) -> tuple[str, ...]:
    """Returns the packages that a format needs and that are not installed."""
    return tuple(x for x in PACKAGES[format] if importlib.util.find_spec(x) is None)


def write(traced: Traced, folder: Path, request: Request) -> None:
    """Writes a format's files into a folder."""
    for package in PACKAGES[request.format]:
        if package != "nncf" or request.scheme:
            require(package, purpose=f"Exporting to {request.name!r}")
    before, silent = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)  # running a file finds faults
    out, err = contextlib.redirect_stdout, contextlib.redirect_stderr
    try:
        with out(silent), err(silent), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _WRITERS[request.format](traced, folder, request)
    except (NothingRoundedError, OSError):
        raise
    except Exception as error:  # of whatever the converter raises
        found = {n for pair in _MISSING.findall(str(error)) for n in pair if n}
        named = sorted({each for names in found for each in names.split(", ")})
        told = f"has no operation for {named}, which the model uses"
        if not named:
            told = f"cannot express the model: {first_line(error)}"
        raise ValueError(
            f"{request.name} {told}. Export to 'saved_model', which has texts, tables "
            "and all else, or take the layers that use it out of the model."
        ) from error
    finally:
        logging.disable(before)


def _reduces_range() -> bool:
    """States whether int8 products of this processor need weights of 7 bits.

    x86 without VNNI adds pairs of 8-bit products in 16 bits, which cuts sums off.
    """
    found = set(instruction_sets())
    is_x86 = any(flag.startswith(("avx", "sse")) for flag in found)
    return is_x86 and not {"avx512_vnni", "avx_vnni", "amx_int8"} & found


def _check_rounded(request: Request, kinds: Iterable[str]) -> None:
    if not any(map(_INTEGERS.search, kinds)):
        raise NothingRoundedError(
            f"{request.name} has no integers for these layers, or all stay in float32. "
            'Pass another `scheme=` ("static" needs `calibration=`), or another format.'
        )


def _saved_model(traced: Traced, folder: Path, request: Request | None = None) -> None:
    """Writes `saved_model.pb` and `variables/`, which hold each weight once."""
    signatures = {SIGNATURE: traced.function}  # in the dtype already
    tf.saved_model.save(traced.module, str(folder), signatures=signatures)


def _litert(traced: Traced, folder: Path, request: Request) -> None:
    """Writes `model.tflite`."""
    kind = "litert float16" if request.dtype == "float16" else "litert"
    if kind not in traced.converted:
        with tempfile.TemporaryDirectory() as saved:
            _saved_model(traced, Path(saved))
            made = tf.lite.TFLiteConverter.from_saved_model
            converter = made(saved, signature_keys=[SIGNATURE])
            if request.dtype == "float16":
                converter.optimizations = [tf.lite.Optimize.DEFAULT]
                converter.target_spec.supported_types = [tf.float16]
            traced.converted[kind] = bytes(converter.convert())
    content = traced.converted[kind]
    if request.dtype == "int8":
        content = _litert_integers(content, request)
    (folder / FILES["litert"]).write_bytes(content)


def _litert_integers(content: bytes, request: Request) -> bytes:
    """Returns a file of LiteRT with integers in it, by ai-edge-quantizer."""
    import ai_edge_quantizer as quantizer

    names = quantizer.qtyping.TFLOperationName
    no = quantizer.algorithm_manager.AlgorithmName.NO_QUANTIZE
    made = quantizer.quantizer.Quantizer(bytearray(content))
    is_static = request.scheme == "static"
    if not is_static:
        made.add_dynamic_config(".*", names.ALL_SUPPORTED, 8)
    else:
        operations = [names.ALL_SUPPORTED]
        if request.products_only or request.ranges:
            operations = [names.FULLY_CONNECTED, names.BATCH_MATMUL]
        if request.ranges:  # all that the model was trained to stand
            operations += [names.CONV_2D, names.DEPTHWISE_CONV_2D]
        for operation in operations:
            made.add_static_config(".*", operation, 8, 8)
        for operation in (names.INPUT, names.OUTPUT):  # else they would be int8
            made.update_quantization_recipe(".*", operation, algorithm_key=no)
    for scope in map(_pattern_of, request.keep):
        made.update_quantization_recipe(scope, names.ALL_SUPPORTED, algorithm_key=no)
    calibrated: Any = None
    if made.need_calibration:
        calibrated = made.calibrate({SIGNATURE: [*request.calibration]})
        for name, (low, high) in _ranges_in_litert(content, request).items():
            for end, value in (("min", low), ("max", high)):
                calibrated[name][end] = np.full_like(calibrated[name][end], value)
    return bytes(made.quantize(calibrated).quantized_model)


def _pattern_of(path: str) -> str:
    """Returns what matches the names of a layer's tensors in LiteRT."""
    return rf"(^|.*[/;]){re.escape(scope_of(path))}/.*"


def _ranges_in_litert(content: bytes, request: Request) -> Ranges:
    """Returns the ranges that a model was trained with, by the tensor's name."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content)
    names = {each["index"]: each["name"] for each in interpreter.get_tensor_details()}
    found = {}
    for operation in interpreter._get_ops_details():
        if operation["op_name"] in _LITERT_PRODUCTS:
            told = [names.get(i, "") for i in operation["outputs"]]
            for path, ends in request.ranges.items():
                if any(re.match(_pattern_of(path), name) for name in told):
                    found[names[operation["inputs"][0]]] = ends
    return found


def _openvino(traced: Traced, folder: Path, request: Request) -> None:
    """Writes `model.xml` and `model.bin`."""
    import openvino

    with tempfile.TemporaryDirectory() as saved:
        _saved_model(traced, Path(saved))
        model = openvino.convert_model(saved)
        specs = (*traced.signature.inputs, *traced.signature.outputs)
        wanted = {spec.in_file for spec in specs}
        # An output that is an input as it is has both names on one tensor.
        for port in (*model.inputs, *model.outputs):
            names = {re.sub(r"^serving_default_|:\d+$", "", n) for n in port.names}
            port.get_tensor().set_names(names & wanted or port.names)
        if request.dtype == "int8":
            model = _openvino_integers(model, request)
        file = str(folder / FILES["openvino"])
        openvino.save_model(model, file, compress_to_fp16=request.dtype == "float16")


def _openvino_integers(model: Any, request: Request) -> Any:
    """Returns a model of OpenVINO with integers in it, by NNCF."""
    import nncf

    kept = []
    for node in model.get_ordered_ops():
        read = [port.get_source_output().get_node() for port in node.inputs()]
        weights = [each for each in read if each.get_type_name() == "Constant"]
        names = [each.get_friendly_name() for each in (node, *weights)]
        if node.get_type_name() in _OPENVINO_PRODUCTS and is_in(request.keep, names):
            kept.append(names[0])
    fix = nncf.OverflowFix.ENABLE if _reduces_range() else nncf.OverflowFix.DISABLE
    found = nncf.quantize(
        *(model, nncf.Dataset([*request.calibration])),
        subset_size=len(request.calibration),
        model_type=nncf.ModelType.TRANSFORMER if request.products_only else None,
        ignored_scope=nncf.IgnoredScope(names=kept),
        advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=fix),
    )
    _check_rounded(request, (n.get_type_name() for n in found.get_ordered_ops()))
    return found


def _onnx(traced: Traced, folder: Path, request: Request) -> None:
    """Writes `model.onnx`."""
    import onnx

    if "onnx" not in traced.converted:
        traced.converted["onnx"] = _onnx_floats(traced).SerializeToString()
    content, path = traced.converted["onnx"], folder / FILES["onnx"]
    if request.dtype == "int8":
        _onnx_integers(content, path, request)
        _check_rounded(request, (node.op_type for node in onnx.load(path).graph.node))
        return
    if request.dtype == "float16":
        from onnxruntime.transformers.float16 import convert_float_to_float16

        model = onnx.load_model_from_string(content)
        lowered = convert_float_to_float16(model, keep_io_types=True)
        content = lowered.SerializeToString()
    path.write_bytes(content)


def _onnx_floats(traced: Traced) -> Any:
    """Returns the model as ONNX in float32, loadable by ONNX Runtime."""
    import onnx
    import tf2onnx
    from onnx import helper, numpy_helper

    model, _ = tf2onnx.convert.from_function(
        traced.module.serve, input_signature=traced.specs, opset=_OPSET
    )
    graph = model.graph
    # Tensors that a model holds, which tf2onnx asks for as inputs.
    captures = traced.function.graph.captures
    held = {inner.name: x for x, inner in captures if x.dtype != tf.resource}
    for given in [each for each in graph.input if each.name in held]:
        value = np.asarray(held[given.name].numpy())
        graph.initializer.append(numpy_helper.from_array(value, given.name))
        graph.input.remove(given)
    # Erfc, which tf2onnx copies from GELU and no runtime knows, is 1 - Erf.
    one, nodes = "one_less_erf", list(graph.node)
    graph.initializer.append(numpy_helper.from_array(np.float32(1), one))
    del graph.node[:]
    for node in nodes:
        if node.op_type == "Erfc":
            y, erf = node.output[0], f"{node.output[0]}_erf"
            graph.node.append(helper.make_node("Erf", node.input, [erf], name=erf))
            node = helper.make_node("Sub", [one, erf], [y], name=f"{y}_sub")
        graph.node.append(node)
    onnx.checker.check_model(model)
    return model


def _onnx_integers(content: bytes, path: Path, request: Request) -> None:
    """Writes a file of ONNX with integers in it, by ONNX Runtime's own tools."""
    import onnx
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):
        get_next = functools.partial(next, iter(request.calibration), None)

    with tempfile.TemporaryDirectory() as folder:
        source, prepared = Path(folder, "model.onnx"), Path(folder, "prepared.onnx")
        source.write_bytes(content)
        quantization.shape_inference.quant_pre_process(
            str(source), str(prepared), skip_symbolic_shape=True
        )
        kept, overrides = _nodes_of(request, onnx.load(prepared))
        is_products = request.scheme == "dynamic" or request.products_only
        extra: dict[str, Any] = {"MatMulConstBOnly": is_products}
        options: dict[str, Any] = {
            **{"per_channel": True, "reduce_range": _reduces_range()},
            **{"nodes_to_exclude": kept, "extra_options": extra},
            "weight_type": quantization.QuantType.QInt8,
            "op_types_to_quantize": _PRODUCTS if is_products else None,
        }
        if request.scheme == "dynamic":
            # ONNX Runtime's dynamic convolutions take four times as long as float32.
            options["op_types_to_quantize"] = [*_PRODUCTS, "LSTM", "Gather"]
            quantization.quantize_dynamic(str(prepared), str(path), **options)
            return
        if request.ranges:
            products = [*_PRODUCTS, "Conv"]
            options["op_types_to_quantize"] = products
            extra["MatMulConstBOnly"] = True
            extra["OpTypesToExcludeOutputQuantization"] = products
        extra["TensorQuantOverrides"] = overrides
        options["activation_type"] = quantization.QuantType.QUInt8
        quantization.quantize_static(str(prepared), str(path), Reader(), **options)


def _nodes_of(request: Request, model: Any) -> tuple[list[str], Any]:
    """Returns the nodes of layers that stay, and ranges by the tensor's name.

    They are told by name, or by a weight that they read: a convolution that was folded
    with what follows it bears the name of that.
    """
    weights = {each.name for each in model.graph.initializer}
    kept: list[str] = []
    ranges = {}
    for node in model.graph.node:
        read = [name for name in node.input if name in weights]
        names = [node.name, *(read or node.output)]
        if is_in(request.keep, names):
            # ONNX Runtime makes a product and a sum of a Gemm before it looks.
            kept += [node.name, f"{node.name}_MatMul"]
        if node.op_type in (*_PRODUCTS, "Conv") and node.input[0] not in weights:
            for path, (low, high) in request.ranges.items():
                if is_in([path], names):
                    found = {"rmin": np.float32(low), "rmax": np.float32(high)}
                    ranges[node.input[0]] = [found]
    return kept, ranges


_WRITERS: dict[str, Callable[[Traced, Path, Request], None]] = {
    "saved_model": _saved_model,
    "litert": _litert,
    "onnx": _onnx,
    "openvino": _openvino,
}
