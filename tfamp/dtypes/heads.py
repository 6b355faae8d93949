"""Finds the layers that make a model's outputs and keeps them in float32."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.dtypes import layer_dtypes
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import structure, trials
from tfamp.keras_hooks.layers import CALLS, Kind, policy_of, update

# Below this many weights a float32 product costs nothing that can be measured,
# whatever its share (256 x 1024).
MIN_LARGE_HEAD_WEIGHTS = 2**18
MAX_HEAD_SHARE = 0.03

# Operations through which a model's output is followed back to the layer that
# made it: they hold no weights and their float32 form costs next to nothing.
_TRANSPARENT = frozenset(
    "Softmax LogSoftmax Sigmoid Tanh Relu Elu Selu Softplus Exp Log Neg Cast Reshape "
    "Squeeze ExpandDims Transpose Identity StridedSlice Slice Pack Unpack ConcatV2 "
    "Add AddV2 Sub Mul RealDiv Maximum Minimum Mean Sum Max ClipByValue Sqrt Square "
    "Rsqrt L2Normalize SelectV2 Select Split SplitV".split()
)

# Products of two tensors, one of which may be a weight of the model's own.
_PRODUCTS = frozenset("BatchMatMulV2 BatchMatMulV3 Conv2D Einsum MatMul".split())


@dataclasses.dataclass
class Heads:
    """What makes a model's outputs."""

    # Layers with weights, the last on the way to an output.
    heads: list[keras.layers.Layer] = dataclasses.field(default_factory=list)
    # Layers without weights between a head and the output.
    after: list[keras.layers.Layer] = dataclasses.field(default_factory=list)
    # Graph tensors from the heads on, where there is a graph.
    tensors: list[keras.KerasTensor] = dataclasses.field(default_factory=list)
    is_complete: bool = True  # whether each output was followed to a layer
    # Products of the model's own, at which an output's way ended.
    own_products: list[tf.Operation] = dataclasses.field(default_factory=list)


def keeps_product_in_half(head_weights: int, share: float) -> bool:
    """Returns whether a head is too dear to compute wholly in float32.

    `share` is the head's part of the model's multiplications, in [0, 1]. Such a product
    stays in half precision and only what follows it is float32. In a training step of a
    256x8000 head on a CPU with bfloat16 instructions the float32 product cost 11 of 46
    ms.

    Example:
        >>> keeps_product_in_half(2048 * 1000, share=0.0005)  # ResNet50
        False
        >>> keeps_product_in_half(256 * 8000, share=0.5)  # a small language model
        True
    """
    return head_weights >= MIN_LARGE_HEAD_WEIGHTS and share > MAX_HEAD_SHARE


def graph_heads(model: keras.layers.Layer) -> Heads | None:
    """Finds the heads of a Functional or built Sequential model in its graph."""
    graph = structure.graph_of(model)
    if graph is None:
        return None
    found = Heads()
    seen: set[int] = set()
    for output in structure.outputs_of(graph):
        _follow_graph(output, found, seen)
    return found


def _follow_graph(tensor: keras.KerasTensor, found: Heads, seen: set[int]) -> None:
    if id(tensor) in seen:
        return
    seen.add(id(tensor))
    made = structure.producer(tensor)
    if made is None or isinstance(made[0], keras.layers.InputLayer):
        return
    operation, inputs, index = made
    found.tensors.append(tensor)
    nested = structure.graph_of(operation) if _is_layer(operation) else None
    if nested is not None:
        _follow_graph(structure.outputs_of(nested)[index], found, seen)
        return
    if _is_layer(operation):
        if not _is_weightless(operation):
            found.heads.append(operation)
            return
        found.after.append(operation)
    for tensor_before in inputs:
        _follow_graph(tensor_before, found, seen)


def _is_layer(operation: Any) -> bool:
    return isinstance(operation, keras.layers.Layer)


def _is_weightless(layer: keras.layers.Layer) -> bool:
    return not layer.weights or isinstance(layer, keras.layers.Normalization)


class Recorder:
    """Remembers which layer made each tensor while a call is traced."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[keras.layers.Layer, Any]] = {}
        self.passed: dict[int, tuple[keras.layers.Layer, Any]] = {}
        self.shapes: dict[int, tuple[int | None, ...]] = {}
        self.heads: Heads | None = None

    def __call__(self, layer: keras.layers.Layer, outputs: Any) -> None:
        """Takes note of one call; calls end innermost first."""
        tensors = [x for x in structure.flatten(outputs) if tf.is_tensor(x)]
        for tensor in tensors:
            seen = self.passed if _is_weightless(layer) else self.made
            seen.setdefault(id(tensor), (layer, tensor))
        if tensors and isinstance(tensors[0], tf.Tensor):
            self.shapes.setdefault(id(layer), tuple(tensors[0].shape))

    def follow(self, outputs: Any) -> Heads:
        """Follows a call's outputs back to the layers that made them."""
        found = Heads()
        seen: set[int] = set()
        for output in structure.flatten(outputs):
            if isinstance(output, tf.Tensor) and output.dtype.is_floating:
                found.is_complete &= self._follow(output, found, seen)
        return found

    def _follow(self, tensor: tf.Tensor, found: Heads, seen: set[int]) -> bool:
        if id(tensor) in seen or not tensor.dtype.is_floating:
            return True
        seen.add(id(tensor))
        if id(tensor) in self.made:
            layer = self.made[id(tensor)][0]
            if isinstance(layer, keras.Model):
                return False
            if layer not in found.heads:
                found.heads.append(layer)
            return True
        if id(tensor) in self.passed:
            found.after.append(self.passed[id(tensor)][0])
        operation = tensor.op
        if operation.type in ("Const", "Placeholder"):
            return operation.type == "Const"
        if operation.type not in _TRANSPARENT:
            if operation.type in _PRODUCTS:
                found.own_products.append(operation)
            return False
        floats = [x for x in operation.inputs if x.dtype.is_floating]
        return bool(floats) and all(self._follow(x, found, seen) for x in floats)


def traced_heads(
    model: keras.layers.Layer, args: Any, kwargs: Any
) -> tuple[Heads, Recorder]:
    """Traces one call of a model without side effects and finds its heads."""
    recorder = Recorder()

    def record(layer: keras.layers.Layer, outputs: Any) -> None:
        if layer is model:
            recorder.heads = recorder.follow(outputs)
        else:
            recorder(layer, outputs)

    before, CALLS.recorder = CALLS.recorder, record
    try:
        with trials.without_python_effects(model):
            structure.trace_call(model, args, kwargs)
    finally:
        CALLS.recorder = before
    return recorder.heads or Heads(is_complete=False), recorder


def keep_heads(
    model: keras.layers.Layer,
    found: Heads,
    settings: PolicySettings,
    shapes: dict[int, Any],
) -> layer_dtypes.Before:
    """Keeps the heads in float32; returns what they were, to be restored."""
    products = dict(_products(model, found.heads, shapes))
    total = sum(products.values()) or 1
    before = layer_dtypes.Before(_with_sublayers(found.heads + found.after))
    for layer in found.heads:
        policy = policy_of(layer)
        if (
            policy is None
            or policy.kind is Kind.EXPLICIT
            or policy.settings is not settings
        ):
            continue
        share = sum(products.get(id(s), 0) for s in _with_sublayers([layer])) / total
        weights = sum(math.prod(w.shape) for w in layer.weights)
        if policy.kind is Kind.FOLLOWS and keeps_product_in_half(weights, share):
            update(
                layer,
                kind=Kind.WIDE_OUTPUT,
                rule="default: heads",
                reason=f"makes an output of the model; its product is {share:.0%} of "
                "the model's multiplications, so it stays in half precision and all "
                "after it is float32",
                output_dtype="float32",
                is_decided=True,
            )
        else:
            _keep_head(layer)
    for layer in found.after:
        policy = policy_of(layer)
        if policy is not None and policy.kind is not Kind.EXPLICIT:
            _keep_head(layer)
    if all(
        (policy := policy_of(h)) and policy.kind is not Kind.EXPLICIT
        for h in found.heads
    ):
        for tensor in found.tensors:
            structure.set_tensor_dtype(tensor, "float32")
    return before


def _keep_head(layer: keras.layers.Layer) -> None:
    kept_by_user = policy_of(layer).rule.startswith("keep_float32")  # type: ignore[union-attr]
    names = {} if kept_by_user else {"rule": "default: heads"}
    update(
        layer,
        kind=Kind.HEAD,
        reason="makes an output of the model, which feeds the loss",
        output_dtype=None,
        exact_inputs=True,
        applies_to="all",
        is_decided=True,
        is_propagated=False,
        **names,
    )
    layer_dtypes.propagate_to_sublayers(layer)


def _with_sublayers(
    layers: Iterable[keras.layers.Layer],
) -> Iterator[keras.layers.Layer]:
    for layer in layers:
        for _, below, _ in structure.walk(layer):
            yield below


def _products(
    model: keras.layers.Layer, found: list[keras.layers.Layer], shapes: dict[int, Any]
) -> Iterator[tuple[int, int]]:
    """Yields (id, multiplications per example) of each layer with a kernel.

    A kernel is used once for each position of the output; a position whose number is
    unknown counts once. Embeddings multiply nothing, but as part of a head.
    """
    head_of = {id(part): head for head in found for part in _with_sublayers([head])}
    for _, layer, _ in structure.walk(model):
        head = head_of.get(id(layer))
        if isinstance(layer, keras.layers.Embedding) and head is None:
            continue
        weights = structure.own_weights(layer)
        kernels = [w.shape for w in weights if len(w.shape) >= 2]
        if kernels:
            shape = shapes.get(id(layer)) or structure.last_output_shape(head or layer)
            positions = math.prod(size or 1 for size in shape[1:-1])
            yield id(layer), positions * sum(math.prod(k) for k in kernels)
