"""Writes ONNX by tf2onnx, and lowers it by ONNX Runtime's own tools."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.records import checks
from tfamp.records.checks import short_error
from tfamp.serving.exports.request import (
    PACKAGES,
    NothingRoundedError,
    Request,
)
from tfamp.serving.exports.tracing import Traced
from tfamp.serving.exports.writers import quiet
from tfamp.serving.runtimes import require_onnxruntime
from tfamp.serving.runtimes.manifest import FILES

_OPSET = 17
# A protobuf file holds less than 2 GiB.
_MAX_BYTES = 2**31 - 2**20
_PRODUCTS = ["MatMul", "Gemm"]
_INTEGERS = re.compile("Quantize|Integer|QLinear")
# Why a scheme may leave all of a model in float32, and what to do.
_WITHOUT = {
    "dynamic": (
        "ONNX Runtime's dynamic convolutions are slower than float32. Pass "
        "`calibration=` and `scheme='static'`"
    ),
    "static": "ONNX Runtime has no static recurrent layers. Pass `scheme='dynamic'`",
}


def write(traced: Traced, folder: Path, request: Request) -> None:
    """Writes `model.onnx` into a folder."""
    require_onnxruntime(purpose="Exporting to ONNX")
    for package in PACKAGES["onnx"]:
        checks.require(package, extra="onnx", purpose="Exporting to ONNX")
    import onnx

    if "onnx" not in traced.converted:
        traced.converted["onnx"] = _converted(traced).SerializeToString()
    content = traced.converted["onnx"]
    path = folder / FILES["onnx"]
    with quiet("root"):
        if request.dtype == "float32":
            path.write_bytes(content)
        elif request.dtype == "float16":
            from onnxruntime.transformers import float16

            model = onnx.load_model_from_string(content)
            kept = _kept_nodes(model, traced, request)
            lowered = float16.convert_float_to_float16(
                model, keep_io_types=True, node_block_list=kept
            )
            path.write_bytes(lowered.SerializeToString())
        else:
            _write_int8(content, path, request, traced)
    nodes = onnx.load(path, load_external_data=False).graph.node
    if request.scheme and not any(_INTEGERS.search(n.op_type) for n in nodes):
        raise NothingRoundedError(
            f"{request.name} quantises nothing of this model: "
            f"{_WITHOUT[request.scheme]}, or another format."
        )


def _converted(traced: Traced) -> Any:
    """Returns the model as ONNX in float32, loadable by ONNX Runtime."""
    import onnx
    import tf2onnx

    with quiet("tf2onnx", "tensorflow"):
        try:
            model, _ = tf2onnx.convert.from_function(
                traced.module.serve, input_signature=traced.specs, opset=_OPSET
            )
        except Exception as error:  # of whatever the converter raises
            raise ValueError(
                f"ONNX cannot express the model: {short_error(error)}. Export to "
                "'saved_model', which has all operations; texts, above all, are for "
                "TensorFlow alone."
            ) from error
    _fill_in_captured(model.graph, traced)
    _rewrite_erfc(model.graph)
    known = {"", "ai.onnx", "ai.onnx.ml", "com.microsoft"}
    unknown = {
        node.op_type
        for node in model.graph.node
        if node.domain not in known or not onnx.defs.has(node.op_type, node.domain)
    }
    if unknown:
        raise ValueError(
            f"ONNX has no operation for {sorted(unknown)}, which the model uses. "
            "Export to 'saved_model', or take the layers that use them out of it."
        )
    if model.ByteSize() > _MAX_BYTES:
        raise ValueError(
            f"The model takes {model.ByteSize():,} bytes; expected at most "
            f"{_MAX_BYTES:,}, which a file of ONNX holds. Export to 'saved_model' or "
            "'openvino'."
        )
    return model


def _fill_in_captured(graph: Any, traced: Traced) -> None:
    """Stores the tensors that a model holds, which tf2onnx asks for as inputs."""
    from onnx import numpy_helper

    captures = traced.function.graph.captures
    held = {inner.name: x for x, inner in captures if x.dtype != tf.resource}
    for given in [each for each in graph.input if each.name in held]:
        value = np.asarray(held[given.name].numpy())
        if value.dtype.kind == "S":  # of a single text
            value = value.astype(object)
        graph.initializer.append(numpy_helper.from_array(value, given.name))
        graph.input.remove(given)


def _rewrite_erfc(graph: Any) -> None:
    """Turns Erfc, which tf2onnx copies from GELU and no runtime knows, into 1 - Erf."""
    from onnx import helper, numpy_helper

    found = [node for node in graph.node if node.op_type == "Erfc"]
    if not found:
        return
    one = "one_less_erf"
    graph.initializer.append(numpy_helper.from_array(np.float32(1), one))
    nodes = []
    for node in graph.node:
        if node.op_type != "Erfc":
            nodes.append(node)
            continue
        (x,), (y,), erf = node.input, node.output, f"{node.output[0]}_erf"
        nodes.append(helper.make_node("Erf", [x], [erf], name=erf))
        nodes.append(helper.make_node("Sub", [one, erf], [y], name=f"{y}_sub"))
    del graph.node[:]
    graph.node.extend(nodes)


def _write_int8(content: bytes, path: Path, request: Request, traced: Traced) -> None:
    import onnx
    from onnxruntime import quantization

    with tempfile.TemporaryDirectory() as folder:
        source, prepared = Path(folder, "model.onnx"), Path(folder, "prepared.onnx")
        source.write_bytes(content)
        quantization.shape_inference.quant_pre_process(
            str(source), str(prepared), skip_symbolic_shape=True
        )
        kept = _kept_nodes(onnx.load(prepared), traced, request)
        options: dict[str, Any] = {
            "per_channel": True,
            "reduce_range": request.reduces_range,
            "nodes_to_exclude": kept,
            "weight_type": quantization.QuantType.QInt8,
        }
        if request.scheme == "dynamic":
            # ONNX Runtime's dynamic convolutions take four times as long as float32.
            quantization.quantize_dynamic(
                str(prepared),
                str(path),
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
            str(prepared),
            str(path),
            Reader(),
            activation_type=quantization.QuantType.QUInt8,
            op_types_to_quantize=_PRODUCTS if request.products_only else None,
            extra_options={"MatMulConstBOnly": request.products_only},
            **options,
        )


def _kept_nodes(model: Any, traced: Traced, request: Request) -> list[str]:
    """Returns the nodes of layers that stay: by name, or by a weight that they read.

    A convolution that was folded with what follows it bears the name of that.
    """
    weights = {each.name for each in model.graph.initializer}

    def names(node: Any) -> Iterator[str]:
        yield node.name
        read = [name for name in node.input if name in weights]
        yield from read or node.output

    kept = [
        node for node in model.graph.node if traced.is_in(request.keep, names(node))
    ]
    # ONNX Runtime makes a product and a sum of a Gemm before it looks at the names.
    products = [f"{node.name}_MatMul" for node in kept if node.op_type == "Gemm"]
    return [*(node.name for node in kept), *products]
