"""Finds the layers that make a model's outputs and keeps them in float32."""

import dataclasses
import math
from typing import Any

import keras
import tensorflow as tf

from tfamp.dtypes import layer_dtypes
from tfamp.dtypes.rules import HEADS
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import structure, trials
from tfamp.keras_hooks.layers import Kind, keep, policy_of
from tfamp.keras_hooks.structure import Layer

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

    heads: list[Layer] = dataclasses.field(default_factory=list)  # with weights
    after: list[Layer] = dataclasses.field(default_factory=list)  # those without, then
    # Graph tensors from the heads on, where there is a graph.
    tensors: list[keras.KerasTensor] = dataclasses.field(default_factory=list)
    is_complete: bool = True  # whether each output was followed to a layer
    # Products of the model's own, at which an output's way ended.
    own_products: list[tf.Operation] = dataclasses.field(default_factory=list)
    # The shape that each layer gave, by its `id`, where the model was traced.
    shapes: dict[int, Any] = dataclasses.field(default_factory=dict)


def keeps_product_in_half(head_weights: int, share: float) -> bool:
    """Returns whether a head is too dear to compute wholly in float32.

    `share` is its part of the model's multiplications. In a step of a 256x8000 head on
    a CPU with bfloat16 instructions the float32 product cost 11 of 46 ms.

    Example:
        >>> keeps_product_in_half(2048 * 1000, share=0.0005)  # ResNet50
        False
        >>> keeps_product_in_half(256 * 8000, share=0.5)  # a small language model
        True
    """
    return head_weights >= MIN_LARGE_HEAD_WEIGHTS and share > MAX_HEAD_SHARE


def graph_heads(model: Layer) -> Heads | None:
    """Finds the heads of a Functional or built Sequential model in its graph."""
    graph = structure.graph_of(model)
    if graph is None:
        return None
    found, seen = Heads(), set[int]()

    def follow(tensor: keras.KerasTensor) -> None:
        made = structure.producer(tensor)
        if id(tensor) in seen or made is None:
            return
        seen.add(id(tensor))
        operation, inputs, index = made
        if isinstance(operation, keras.layers.InputLayer):
            return
        found.tensors.append(tensor)
        if isinstance(operation, keras.layers.Layer):
            nested = structure.graph_of(operation)
            if nested is not None:
                follow(nested.outputs[index])
                return
            if not _is_weightless(operation):
                found.heads.append(operation)
                return
            found.after.append(operation)
        for tensor_before in inputs:
            follow(tensor_before)

    for output in graph.outputs:
        follow(output)
    return found


def _is_weightless(layer: Layer) -> bool:
    return not layer.weights or isinstance(layer, keras.layers.Normalization)


def traced_heads(model: Layer, args: Any, kwargs: Any) -> Heads:
    """Traces one call of a model without side effects and finds its heads."""
    made: dict[int, tuple[Layer, Any]] = {}  # by tensor
    found, seen = Heads(), set[int]()

    def follow(tensor: tf.Tensor) -> bool:
        """Follows a tensor back to the layers that made it; returns if to the end."""
        if id(tensor) in seen or not tensor.dtype.is_floating:
            return True
        seen.add(id(tensor))
        layer, _ = made.get(id(tensor), (None, None))
        if layer is not None and not _is_weightless(layer):
            if layer not in found.heads and not isinstance(layer, keras.Model):
                found.heads.append(layer)
            return not isinstance(layer, keras.Model)
        if layer is not None:
            found.after.append(layer)
        operation = tensor.op
        if operation.type not in _TRANSPARENT:
            if operation.type in _PRODUCTS:
                found.own_products.append(operation)
            return bool(operation.type == "Const")
        floats = [x for x in operation.inputs if x.dtype.is_floating]
        return bool(floats) and all(follow(x) for x in floats)

    def tensors_in(outputs: Any) -> list[tf.Tensor]:
        return [x for x in structure.flatten(outputs) if isinstance(x, tf.Tensor)]

    whole = trials.look(model, args, kwargs)
    for call in whole.calls():
        for tensor in tensors_in(call.outputs):
            found.shapes.setdefault(id(call.layer), tuple(tensor.shape))
            # One with weights counts ahead of those around it that have none.
            known = made.get(id(tensor))
            if not known or (_is_weightless(known[0]) > _is_weightless(call.layer)):
                made[id(tensor)] = call.layer, tensor
    found.is_complete = all([follow(tensor) for tensor in tensors_in(whole.outputs)])
    return found


def keep_heads(model: Layer, found: Heads, settings: PolicySettings) -> None:
    """Keeps the heads in float32, but the products of those that are too dear."""
    parts = {id(head): structure.layers_of(head) for head in found.heads}
    products = _products(model, parts, found.shapes)
    total = sum(products.values()) or 1
    managed = []
    for layer in found.heads + found.after:
        policy, inside = policy_of(layer), parts.get(id(layer))
        if policy is None or policy.kind is Kind.EXPLICIT:
            continue
        managed.append(layer)
        if inside is not None and policy.settings is not settings:
            continue
        share = sum(products.get(id(part), 0) for part in inside or ()) / total
        weights = sum(math.prod(w.shape) for w in layer.weights)
        if policy.kind is Kind.FOLLOWS and keeps_product_in_half(weights, share):
            reason = (
                f"makes an output of the model; its product is {share:.0%} of the "
                "model's multiplications, so it stays in half precision and all after "
                "it is float32"
            )
            keep(layer, Kind.WIDE_OUTPUT, HEADS, reason)
            continue
        if layer in settings.taken_back:
            keep(layer, Kind.WIDE_OUTPUT, HEADS, "its `call` raises in float32")
            continue
        rule = policy.rule if policy.rule.startswith("keep_float32") else HEADS
        reason = "makes an output of the model, which feeds the loss"
        keep(layer, Kind.HEAD, rule, reason)
        layer_dtypes.propagate_to_sublayers(layer)
    if all(head in managed for head in found.heads):
        for tensor in found.tensors:
            structure.set_tensor_dtype(tensor, "float32")


def _products(
    model: Layer, parts_of_heads: dict[int, list[Layer]], shapes: dict[int, Any]
) -> dict[int, int]:
    """Returns the multiplications per example of each layer with a kernel, by `id`.

    Embeddings multiply nothing, but as part of a head.
    """
    head_of = {id(p): parts[0] for parts in parts_of_heads.values() for p in parts}
    products = {}
    for layer in structure.layers_of(model):
        head = head_of.get(id(layer))
        if isinstance(layer, keras.layers.Embedding) and head is None:
            continue
        kernels = [w.shape for w in structure.own_weights(layer) if len(w.shape) >= 2]
        if kernels:
            outputs = structure.tensors_of(head or layer)[1]
            shape = shapes.get(id(layer)) or (outputs[0].shape if outputs else ())
            positions = math.prod(size or 1 for size in shape[1:-1])
            products[id(layer)] = positions * sum(map(math.prod, kernels))
    return products
