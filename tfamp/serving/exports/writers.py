"""Writes each format, and integers in it, by its runtime's own tools."""

import contextlib
import dataclasses
import importlib.util
import io
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.machine.cpus import instruction_sets
from tfamp.records import checks
from tfamp.records.checks import first_line
from tfamp.serving.exports.tracing import SIGNATURE, Traced, scope_of
from tfamp.serving.runtimes import require_onnxruntime, require_openvino
from tfamp.serving.runtimes.manifest import FILES

DTYPES = ("float32", "float16", "bfloat16", "int8")
SCHEMES = ("dynamic", "static")
# Format -> dtype -> the schemes that its quantizer has, the one to take first; (""):
# floats. What is missing cannot be expressed, or no runtime loads it.
POSSIBLE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "saved_model": {"float32": ("",), "float16": ("",), "bfloat16": ("",)},
    "litert": {"float32": ("",), "float16": ("",), "int8": ("dynamic", "static")},
    "onnx": {"float32": ("",), "float16": ("",), "int8": ("dynamic", "static")},
    "openvino": {"float32": ("",), "float16": ("",), "int8": ("static",)},
}
# Format -> the packages that write it, and integers in it, beside TensorFlow.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "saved_model": (),
    "litert": ("ai_edge_litert", "ai_edge_quantizer"),
    "onnx": ("onnx", "tf2onnx", "onnxruntime"),
    "openvino": ("openvino", "nncf"),
}
_WITHOUT_LOOPS = {"litert": "LiteRT", "openvino": "OpenVINO"}
# Operations that converters name as missing: LiteRT's, OpenVINO's behind commas.
_MISSING = re.compile(
    r"tf\.(\w+)|^-- (?:No conversion rule|Conversion).*?: (.+)$", re.M
)
_FLOAT64 = re.compile(r"tensor<[^>]*xf64>|tensor<f64>")
_OPSET = 17
_PRODUCTS = ["MatMul", "Gemm"]
_LITERT_PRODUCTS = ("FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D", "BATCH_MATMUL")
_INTEGERS = re.compile("Quantize|Integer|QLinear")


class NothingRoundedError(ValueError):
    """A quantizer that left a model as it is, as where all that it rounds is kept."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One file to be written."""

    format: str
    dtype: str
    scheme: str = ""  # "" for floats
    # Batches of inputs by name, for "static".
    calibration: tuple[dict[str, np.ndarray], ...] = ()
    # Path of a layer that stays in float32 -> why.
    keep: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Path of a layer -> the range of its input, where the model was trained with it.
    ranges: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    # Whether only products of matrices are quantized, as in models with attention.
    products_only: bool = False

    @property
    def products(self) -> bool:
        """Whether only products are rounded: all that a model was trained to stand."""
        return self.products_only or bool(self.ranges)

    @property
    def name(self) -> str:
        """Returns its name in tables, as "onnx int8 dynamic"."""
        return " ".join(filter(None, (self.format, self.dtype, self.scheme)))


def missing(format: str) -> tuple[str, ...]:
    """Returns the packages that a format needs and that are not installed."""
    names = PACKAGES[format]
    return tuple(name for name in names if importlib.util.find_spec(name) is None)


def check_possible(format: str, dtype: str, scheme: str | None) -> None:
    """Raises `ValueError` where a format has no such dtype or scheme."""
    schemes = POSSIBLE[format].get(dtype, ())
    if not schemes or scheme not in (None, *schemes):
        others = [name for name, dtypes in POSSIBLE.items() if dtype in dtypes]
        kind = " ".join(filter(None, (dtype, scheme)))
        raise ValueError(
            f"Format {format!r} has no {kind}, or no runtime that loads it; it has "
            f"{dict(POSSIBLE[format])}. Pass one of these dtypes and schemes, or a "
            f"format that has {dtype}: {others}."
        )


def write(traced: Traced, folder: Path, request: Request) -> None:
    """Writes a format's files into a folder."""
    purpose = f"Exporting to {request.name!r}"
    for package in PACKAGES[request.format]:
        if package == "onnxruntime":
            require_onnxruntime(purpose=purpose)
        elif package == "openvino":
            require_openvino(purpose=purpose)
        elif package != "nncf" or request.scheme:
            checks.require(package, extra=request.format, purpose=purpose)
    if traced.looping and request.format in _WITHOUT_LOOPS:
        raise ValueError(
            f"Layers {traced.looping!r} loop over steps, for which "
            f"{_WITHOUT_LOOPS[request.format]} has no operation. Export to 'onnx' or "
            "'saved_model', or build them with `unroll=True`, which answers the same."
        )
    with _quiet():
        _WRITERS[request.format](traced, folder, request)


def reduces_range(flags: Iterable[str] | None = None) -> bool:
    """States whether int8 products of this processor need weights of 7 bits.

    x86 without VNNI adds pairs of 8-bit products in 16 bits, which cuts sums off.

    Example:
        >>> reduces_range(["avx2"]), reduces_range(["avx512_vnni"]), reduces_range([])
        (True, False, False)
    """
    found = set(instruction_sets() if flags is None else flags)
    is_x86 = any(flag.startswith(("avx", "sse")) for flag in found)
    return is_x86 and not {"avx512_vnni", "avx_vnni", "amx_int8"} & found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps loggers and warnings of converters quiet: running a file finds faults."""
    before, silent = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _converting(runtime: str) -> Iterator[None]:
    """Turns whatever a converter raises into an error that names the operations."""
    try:
        yield
    except Exception as error:  # of whatever the converter raises
        named = {n for pair in _MISSING.findall(str(error)) for n in pair if n}
        named = {n for each in named for n in each.split(", ")} - {"entry_function"}
        which = " in float64" if _FLOAT64.search(str(error)) else ""
        told = f"has no operation for {sorted(named)}{which}, which the model uses"
        if not named:
            told = f"cannot express the model: {first_line(error)}"
        raise _refused(f"{runtime} {told}") from error


def _refused(why: str) -> ValueError:
    return ValueError(
        f"{why}. Export to 'saved_model', which has texts, tables and all else, take "
        "the layers that use it out of the model, or give them float32."
    )


def _check_rounded(request: Request, kinds: Iterable[str]) -> None:
    if not any(map(_INTEGERS.search, kinds)):
        raise NothingRoundedError(
            f"{request.name} quantizes nothing of this model: its runtime has no "
            "integers for these layers, or all stay in float32. Pass another "
            '`scheme=` ("static" needs `calibration=`), or another format.'
        )


def _saved_model(traced: Traced, folder: Path, request: Request | None = None) -> None:
    """Writes `saved_model.pb` and `variables/`, which hold each weight once."""
    signatures = {SIGNATURE: traced.function}  # in the dtype already
    tf.saved_model.save(traced.module, str(folder), signatures=signatures)


def _litert(traced: Traced, folder: Path, request: Request) -> None:
    """Writes `model.tflite`."""
    kind = "float16" if request.dtype == "float16" else "float32"
    content = traced.converted.get(f"litert {kind}")
    if content is None:
        with tempfile.TemporaryDirectory() as saved:
            _saved_model(traced, Path(saved))
            converter = tf.lite.TFLiteConverter.from_saved_model(
                saved, signature_keys=[SIGNATURE]
            )
            if kind == "float16":
                converter.optimizations = [tf.lite.Optimize.DEFAULT]
                converter.target_spec.supported_types = [tf.float16]
            with _converting("LiteRT"):
                content = bytes(converter.convert())
        traced.converted[f"litert {kind}"] = content
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
    operations = [names.ALL_SUPPORTED]
    if request.products and is_static:
        operations = [names.FULLY_CONNECTED, names.BATCH_MATMUL]
    if request.ranges and is_static:
        operations += [names.CONV_2D, names.DEPTHWISE_CONV_2D, names.CONV_2D_TRANSPOSE]
    for operation in operations:
        if is_static:
            made.add_static_config(".*", operation, 8, 8)
        else:
            made.add_dynamic_config(".*", operation, 8)
    # Else floats would come in and go out as int8.
    for operation in (names.INPUT, names.OUTPUT) if is_static else ():
        made.update_quantization_recipe(".*", operation, algorithm_key=no)
    for path in request.keep:
        scope = _pattern_of(path)
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


def _ranges_in_litert(
    content: bytes, request: Request
) -> dict[str, tuple[float, float]]:
    """Returns the ranges that a model was trained with, by the tensor's name."""
    from ai_edge_litert.interpreter import Interpreter

    if not request.ranges:
        return {}
    interpreter = Interpreter(model_content=content)
    names = {each["index"]: each["name"] for each in interpreter.get_tensor_details()}
    scopes = {
        re.compile(_pattern_of(path)): found for path, found in request.ranges.items()
    }
    ranges = {}
    for operation in interpreter._get_ops_details():
        if operation["op_name"] not in _LITERT_PRODUCTS:
            continue
        of_layer = [names.get(i, "") for i in operation["outputs"]]
        for scope, found in scopes.items():
            if any(map(scope.match, of_layer)):
                ranges[names[operation["inputs"][0]]] = found
    return ranges


def _openvino(traced: Traced, folder: Path, request: Request) -> None:
    """Writes `model.xml` and `model.bin`."""
    import openvino

    with tempfile.TemporaryDirectory() as saved:
        _saved_model(traced, Path(saved))
        with _converting("OpenVINO"):
            model = openvino.convert_model(saved)
        specs = (*traced.signature.inputs, *traced.signature.outputs)
        wanted = {spec.in_file for spec in specs}
        # An output that is an input as it is has both names on one tensor.
        for port in (*model.inputs, *model.outputs):
            names = {re.sub(r"^serving_default_|:\d+$", "", n) for n in port.names}
            port.get_tensor().set_names(names & wanted or port.names)
        if request.dtype == "int8":
            model = _openvino_integers(model, traced, request)
        file = str(folder / FILES["openvino"])
        openvino.save_model(model, file, compress_to_fp16=request.dtype == "float16")


def _openvino_integers(model: Any, traced: Traced, request: Request) -> Any:
    """Returns a model of OpenVINO with integers in it, by NNCF."""
    import nncf

    kept = []
    for node in model.get_ordered_ops():
        sources = [port.get_source_output().get_node() for port in node.inputs()]
        weights = [each for each in sources if each.get_type_name() == "Constant"]
        names = [each.get_friendly_name() for each in (node, *weights)]
        is_product = node.get_type_name() in (
            "MatMul",
            "Convolution",
            "GroupConvolution",
        )
        if is_product and traced.is_in(request.keep, names):
            kept.append(names[0])
    fix = nncf.OverflowFix.ENABLE if reduces_range() else nncf.OverflowFix.DISABLE
    found = nncf.quantize(
        model,
        nncf.Dataset([*request.calibration]),
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
    if request.dtype == "float32":
        path.write_bytes(content)
    elif request.dtype == "float16":
        from onnxruntime.transformers import float16

        model = onnx.load_model_from_string(content)
        kept = _kept_in_onnx(model, traced, request)
        lowered = float16.convert_float_to_float16(
            model, keep_io_types=True, node_block_list=kept
        )
        path.write_bytes(lowered.SerializeToString())
    else:
        _onnx_integers(content, path, request, traced)
        _check_rounded(request, (node.op_type for node in onnx.load(path).graph.node))


def _onnx_floats(traced: Traced) -> Any:
    """Returns the model as ONNX in float32, loadable by ONNX Runtime."""
    import onnx
    import tf2onnx

    with _converting("ONNX"):
        model, _ = tf2onnx.convert.from_function(
            traced.module.serve, input_signature=traced.specs, opset=_OPSET
        )
    graph = model.graph
    # Tensors that a model holds, which tf2onnx asks for as inputs.
    captures = traced.function.graph.captures
    held = {inner.name: x for x, inner in captures if x.dtype != tf.resource}
    for given in [each for each in graph.input if each.name in held]:
        value = np.asarray(held[given.name].numpy())
        if value.dtype.kind == "S":  # of a single text
            value = value.astype(object)
        graph.initializer.append(onnx.numpy_helper.from_array(value, given.name))
        graph.input.remove(given)
    _rewrite_erfc(graph)
    domains = {"", "ai.onnx", "ai.onnx.ml", "com.microsoft"}
    unknown = {
        node.op_type
        for node in graph.node
        if node.domain not in domains or not onnx.defs.has(node.op_type, node.domain)
    }
    if unknown:
        raise _refused(
            f"ONNX has no operation for {sorted(unknown)}, which the model uses"
        )
    return model


def _rewrite_erfc(graph: Any) -> None:
    """Turns Erfc, which tf2onnx copies from GELU and no runtime knows, into 1 - Erf."""
    from onnx import helper, numpy_helper

    one, nodes = "one_less_erf", []
    for node in graph.node:
        if node.op_type != "Erfc":
            nodes.append(node)
            continue
        (x,), (y,), erf = node.input, node.output, f"{node.output[0]}_erf"
        nodes.append(helper.make_node("Erf", [x], [erf], name=erf))
        nodes.append(helper.make_node("Sub", [one, erf], [y], name=f"{y}_sub"))
    if len(nodes) > len(graph.node):
        graph.initializer.append(numpy_helper.from_array(np.float32(1), one))
        del graph.node[:]
        graph.node.extend(nodes)


def _onnx_integers(
    content: bytes, path: Path, request: Request, traced: Traced
) -> None:
    """Writes a file of ONNX with integers in it, by ONNX Runtime's own tools."""
    import onnx
    from onnxruntime import quantization

    batches = iter(request.calibration)

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(batches, None)

    with tempfile.TemporaryDirectory() as folder:
        source, prepared = Path(folder, "model.onnx"), Path(folder, "prepared.onnx")
        source.write_bytes(content)
        quantization.shape_inference.quant_pre_process(
            str(source), str(prepared), skip_symbolic_shape=True
        )
        is_dynamic = request.scheme == "dynamic"
        is_products = is_dynamic or request.products_only
        options: dict[str, Any] = {
            "per_channel": True,
            "reduce_range": reduces_range(),
            "nodes_to_exclude": _kept_in_onnx(onnx.load(prepared), traced, request),
            "weight_type": quantization.QuantType.QInt8,
            "op_types_to_quantize": _PRODUCTS if is_products else None,
            "extra_options": {"MatMulConstBOnly": is_products},
        }
        if is_dynamic:
            # ONNX Runtime's dynamic convolutions take four times as long as float32.
            options["op_types_to_quantize"] = [*_PRODUCTS, "LSTM", "Gather"]
            quantization.quantize_dynamic(str(prepared), str(path), **options)
        else:
            options["activation_type"] = quantization.QuantType.QUInt8
            if request.ranges:
                products = [*_PRODUCTS, "Conv"]
                options["op_types_to_quantize"] = products
                outputs = "OpTypesToExcludeOutputQuantization"
                options["extra_options"] |= {
                    "MatMulConstBOnly": True,
                    outputs: products,
                }
            options["extra_options"]["TensorQuantOverrides"] = {
                name: [{"rmin": np.float32(low), "rmax": np.float32(high)}]
                for name, (low, high) in _ranges_in_onnx(
                    onnx.load(prepared), traced, request
                ).items()
            }
            quantization.quantize_static(str(prepared), str(path), Reader(), **options)


def _ranges_in_onnx(
    model: Any, traced: Traced, request: Request
) -> dict[str, tuple[float, float]]:
    """Returns the ranges that a model was trained with, by the tensor's name."""
    weights = {each.name for each in model.graph.initializer}
    return {
        node.input[0]: found
        for path, found in request.ranges.items()
        for node in model.graph.node
        if node.op_type in (*_PRODUCTS, "Conv")
        and node.input[0] not in weights
        and traced.is_in([path], [node.name, *(n for n in node.input if n in weights)])
    }


def _kept_in_onnx(model: Any, traced: Traced, request: Request) -> list[str]:
    """Returns the nodes of layers that stay: by name, or by a weight that they read.

    A convolution that was folded with what follows it bears the name of that.
    """
    weights = {each.name for each in model.graph.initializer}
    kept = []
    for node in model.graph.node:
        read = [name for name in node.input if name in weights]
        if traced.is_in(request.keep, [node.name, *(read or node.output)]):
            # ONNX Runtime makes a product and a sum of a Gemm before it looks.
            kept += [node.name, f"{node.name}_MatMul"]
    return kept


_WRITERS: dict[str, Callable[[Traced, Path, Request], None]] = {
    "saved_model": _saved_model,
    "litert": _litert,
    "onnx": _onnx,
    "openvino": _openvino,
}
