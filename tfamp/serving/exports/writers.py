"""Writes each format, and integers in it, by its runtime's own tools."""

import contextlib
import io
import logging
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.machine.cpus import instruction_sets
from tfamp.records import checks
from tfamp.records.checks import first_line, short_error
from tfamp.serving.exports.request import PACKAGES, NothingRoundedError, Request
from tfamp.serving.exports.tracing import SIGNATURE, Traced, scope_of
from tfamp.serving.runtimes import require_onnxruntime, require_openvino
from tfamp.serving.runtimes.manifest import FILES

# Operations that LiteRT's converter names as missing.
_NEEDED = re.compile(r"tf\.(\w+)")
# Those that OpenVINO's names, after a comma each.
_UNCONVERTED = re.compile(r"^-- (?:No conversion rule|Conversion).*?: (.+)$", re.M)
_FLOAT64 = re.compile(r"tensor<[^>]*xf64>|tensor<f64>")
_OPSET = 17
# What to do about an operation that a format has not, which is told with its name.
_OUT = (
    "Export to 'saved_model', which has texts, tables and all else, take the layers "
    "that use it out of the model, or give them float32."
)
_PRODUCTS = ["MatMul", "Gemm"]
_INTEGERS = re.compile("Quantize|Integer|QLinear")


def write(traced: Traced, folder: Path, request: Request) -> None:
    """Writes a format's files into a folder."""
    for package in PACKAGES[request.format]:
        if package == "onnxruntime":
            require_onnxruntime(purpose="Exporting to ONNX")
        elif package == "openvino":
            require_openvino(purpose="Exporting to OpenVINO")
        elif package != "nncf" or request.scheme:
            purpose = f"Exporting to {request.name!r}"
            checks.require(package, extra=request.format, purpose=purpose)
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
    names = ("", "absl", "tensorflow", "tf2onnx", "nncf")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    silent = io.StringIO()
    try:
        with contextlib.redirect_stdout(silent), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _saved_model(traced: Traced, folder: Path, request: Request) -> None:
    """Writes `saved_model.pb` and `variables/`, which hold each weight once."""
    del request  # the trace is of a model in the dtype already
    signatures = {SIGNATURE: traced.function}
    tf.saved_model.save(traced.module, str(folder), signatures=signatures)


@contextlib.contextmanager
def _saved(traced: Traced) -> Iterator[str]:
    """Yields a folder with a SavedModel, from which other formats are converted."""
    with tempfile.TemporaryDirectory() as folder:
        _saved_model(traced, Path(folder), Request("saved_model", "float32"))
        yield folder


def _litert(traced: Traced, folder: Path, request: Request) -> None:
    """Writes `model.tflite`."""
    kind = "float16" if request.dtype == "float16" else "float32"
    content = traced.converted.get(f"litert {kind}")
    if content is None:
        content = traced.converted[f"litert {kind}"] = _litert_floats(traced, kind)
    if request.dtype == "int8":
        content = _litert_integers(content, request)
    (folder / FILES["litert"]).write_bytes(content)


def _litert_floats(traced: Traced, dtype: str) -> bytes:
    """Returns a file of LiteRT in floats."""
    with _saved(traced) as saved:
        converter = tf.lite.TFLiteConverter.from_saved_model(
            saved, signature_keys=[SIGNATURE]
        )
        if dtype == "float16":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            converter.target_spec.supported_types = [tf.float16]
        try:
            return bytes(converter.convert())
        except Exception as error:  # of whatever the converter raises
            needed = sorted({*_NEEDED.findall(str(error))} - {"entry_function"})
            told = f"for {needed}" if needed else f"here: {first_line(error)}"
            which = " in float64" if _FLOAT64.search(str(error)) else ""
            raise ValueError(
                f"LiteRT has no operation {told}{which}, which the model uses. {_OUT}"
            ) from error


def _litert_integers(content: bytes, request: Request) -> bytes:
    """Returns a file of LiteRT with integers in it, by ai-edge-quantizer."""
    import ai_edge_quantizer as quantizer

    names = quantizer.qtyping.TFLOperationName
    no = quantizer.algorithm_manager.AlgorithmName.NO_QUANTIZE
    made = quantizer.quantizer.Quantizer(bytearray(content))
    is_static = request.scheme == "static"
    operations = [names.ALL_SUPPORTED]
    if request.products_only and is_static:
        operations = [names.FULLY_CONNECTED, names.BATCH_MATMUL]
    for operation in operations:
        if is_static:
            made.add_static_config(".*", operation, 8, 8)
        else:
            made.add_dynamic_config(".*", operation, 8)
    # Else floats would come in and go out as int8.
    for operation in (names.INPUT, names.OUTPUT) if is_static else ():
        made.update_quantization_recipe(".*", operation, algorithm_key=no)
    for path in request.keep:
        scope = rf"(^|.*[/;]){re.escape(scope_of(path))}/.*"
        made.update_quantization_recipe(scope, names.ALL_SUPPORTED, algorithm_key=no)
    calibrated: Any = None
    if made.need_calibration:
        batches = [dict(batch) for batch in request.calibration]
        calibrated = made.calibrate({SIGNATURE: batches})
    return bytes(made.quantize(calibrated).quantized_model)


def _openvino(traced: Traced, folder: Path, request: Request) -> None:
    """Writes `model.xml` and `model.bin`."""
    import openvino

    with _saved(traced) as saved:
        try:
            model = openvino.convert_model(saved)
        except Exception as error:  # of whatever the converter raises
            needed = sorted(", ".join(_UNCONVERTED.findall(str(error))).split(", "))
            told = f"has no operation for {needed}, which the model uses."
            if needed == [""]:
                told = f"cannot express the model: {first_line(error)}"
            raise ValueError(f"OpenVINO {told} {_OUT}") from error
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
    ignored = nncf.IgnoredScope(names=kept)
    with contextlib.redirect_stderr(io.StringIO()):
        fix = nncf.OverflowFix
        found = nncf.quantize(
            model,
            nncf.Dataset(list(map(dict, request.calibration))),
            subset_size=len(request.calibration),
            model_type=nncf.ModelType.TRANSFORMER if request.products_only else None,
            ignored_scope=ignored,
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                overflow_fix=fix.ENABLE if reduces_range() else fix.DISABLE
            ),
        )
    kinds = {node.get_type_name() for node in found.get_ordered_ops()}
    _check_rounded(request, kinds, "NNCF leaves recurrent layers in float32.")
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
        kinds = {node.op_type for node in onnx.load(path).graph.node}
        why = "ONNX Runtime has neither dynamic convolutions that are faster than "
        _check_rounded(request, kinds, f"{why}float32 nor static recurrent layers.")


def _onnx_floats(traced: Traced) -> Any:
    """Returns the model as ONNX in float32, loadable by ONNX Runtime."""
    import onnx
    import tf2onnx

    try:
        model, _ = tf2onnx.convert.from_function(
            traced.module.serve, input_signature=traced.specs, opset=_OPSET
        )
    except Exception as error:  # of whatever the converter raises
        raise ValueError(
            f"ONNX cannot express the model: {short_error(error)}. {_OUT}"
        ) from error
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
        raise ValueError(
            f"ONNX has no operation for {sorted(unknown)}, which the model uses. {_OUT}"
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

    with tempfile.TemporaryDirectory() as folder:
        source, prepared = Path(folder, "model.onnx"), Path(folder, "prepared.onnx")
        source.write_bytes(content)
        quantization.shape_inference.quant_pre_process(
            str(source), str(prepared), skip_symbolic_shape=True
        )
        options: dict[str, Any] = {
            "per_channel": True,
            "reduce_range": reduces_range(),
            "nodes_to_exclude": _kept_in_onnx(onnx.load(prepared), traced, request),
            "weight_type": quantization.QuantType.QInt8,
        }
        if request.scheme == "dynamic":
            # ONNX Runtime's dynamic convolutions take four times as long as float32.
            quantization.quantize_dynamic(
                *(str(prepared), str(path)),
                op_types_to_quantize=[*_PRODUCTS, "LSTM", "Gather"],
                extra_options={"MatMulConstBOnly": True},
                **options,
            )
            return
        batches = iter(request.calibration)

        class Reader(quantization.CalibrationDataReader):
            def get_next(self) -> dict[str, np.ndarray] | None:
                return next(map(dict, batches), None)

        quantization.quantize_static(
            *(str(prepared), str(path), Reader()),
            activation_type=quantization.QuantType.QUInt8,
            op_types_to_quantize=_PRODUCTS if request.products_only else None,
            extra_options={"MatMulConstBOnly": request.products_only},
            **options,
        )


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


def _check_rounded(request: Request, kinds: Iterable[str], why: str) -> None:
    if not any(map(_INTEGERS.search, kinds)):
        raise NothingRoundedError(
            f"{request.name} quantises nothing of this model: {why} Pass another "
            '`scheme=` ("static" needs `calibration=`), or another format.'
        )


_WRITERS = {
    "saved_model": _saved_model,
    "litert": _litert,
    "onnx": _onnx,
    "openvino": _openvino,
}
