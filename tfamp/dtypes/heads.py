"""Finds the layers that make a model's outputs and keeps them in float32."""

import dataclasses
import math
from typing import Any

import keras
import tensorflow as tf

from tfamp.dtypes import layer_dtypes
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import structure, trials
from tfamp.keras_hooks.layers import CALLS, Kind, policy_of, update
from tfamp.keras_hooks.patches import replaced

# Below this many weights a float32 product costs nothing that can be measured,
# whatever its share (256 x 1024).
MIN_LARGE_HEAD_WEIGHTS = 2**18
MAX_HEAD_SHARE = 0.03
RULE = "default: heads"

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
            _follow_graph(structure.outputs_of(nested)[index], found, seen)
            return
        if not _is_weightless(operation):
            found.heads.append(operation)
            return
        found.after.append(operation)
    for tensor_before in inputs:
        _follow_graph(tensor_before, found, seen)


def _is_weightless(layer: keras.layers.Layer) -> bool:
    return not layer.weights or isinstance(layer, keras.layers.Normalization)


def traced_heads(model: keras.layers.Layer, args: Any, kwargs: Any) -> Heads:
    """Traces one call of a model without side effects and finds its heads."""
    made: dict[int, tuple[keras.layers.Layer, Any]] = {}
    found = Heads(is_complete=False)

    def record(layer: keras.layers.Layer, outputs: Any) -> None:
        """Takes note of one call; calls end innermost first."""
        tensors = [x for x in structure.flatten(outputs) if isinstance(x, tf.Tensor)]
        if layer is model:
            found.is_complete = True
            for tensor in tensors:
                found.is_complete &= _follow_trace(tensor, made, found, set())
            return
        for tensor in tensors:
            # One with weights counts ahead of those around it that have none.
            known = made.get(id(tensor))
            if known is None or (_is_weightless(known[0]) > _is_weightless(layer)):
                made[id(tensor)] = layer, tensor
        if tensors:
            found.shapes.setdefault(id(layer), tuple(tensors[0].shape))

    with replaced(CALLS, recorder=record), trials.without_python_effects(model):
        structure.trace_call(model, args, kwargs)
    return found


def _follow_trace(
    tensor: tf.Tensor,
    made: dict[int, tuple[keras.layers.Layer, Any]],
    found: Heads,
    seen: set[int],
) -> bool:
    """Follows a tensor back to the layers that made it; returns whether to the end."""
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
    if operation.type in ("Const", "Placeholder"):
        return bool(operation.type == "Const")
    if operation.type not in _TRANSPARENT:
        if operation.type in _PRODUCTS:
            found.own_products.append(operation)
        return False
    floats = [x for x in operation.inputs if x.dtype.is_floating]
    return bool(floats) and all(_follow_trace(x, made, found, seen) for x in floats)


def keep_heads(
    model: keras.layers.Layer, found: Heads, settings: PolicySettings
) -> layer_dtypes.Before:
    """Keeps the heads in float32; returns what they were, to be restored."""
    parts = {id(head): structure.layers_of(head) for head in found.heads}
    products = _products(model, parts, found.shapes)
    total = sum(products.values()) or 1
    whole = [part for x in found.heads + found.after for part in structure.layers_of(x)]
    before = layer_dtypes.Before(whole)
    policies = [policy_of(head) for head in found.heads]
    for layer, policy in zip(found.heads, policies, strict=True):
        is_explicit = policy is None or policy.kind is Kind.EXPLICIT
        if is_explicit or policy.settings is not settings:  # type: ignore[union-attr]
            continue
        share = sum(products.get(id(part), 0) for part in parts[id(layer)]) / total
        weights = sum(math.prod(w.shape) for w in layer.weights)
        is_dear = keeps_product_in_half(weights, share)
        if policy.kind is Kind.FOLLOWS and is_dear:  # type: ignore[union-attr]
            update(
                layer,
                kind=Kind.WIDE_OUTPUT,
                rule=RULE,
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
    if all(policy and policy.kind is not Kind.EXPLICIT for policy in policies):
        for tensor in found.tensors:
            structure.set_tensor_dtype(tensor, "float32")
    return before


def _keep_head(layer: keras.layers.Layer) -> None:
    kept_by_user = policy_of(layer).rule.startswith("keep_float32")  # type: ignore[union-attr]
    update(
        layer,
        kind=Kind.HEAD,
        reason="makes an output of the model, which feeds the loss",
        output_dtype=None,
        exact_inputs=True,
        applies_to="all",
        is_decided=True,
        is_propagated=False,
        **({} if kept_by_user else {"rule": RULE}),
    )
    layer_dtypes.propagate_to_sublayers(layer)


def _products(
    model: keras.layers.Layer,
    parts_of_heads: dict[int, list[keras.layers.Layer]],
    shapes: dict[int, Any],
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
            shape = shapes.get(id(layer)) or structure.last_output_shape(head or layer)
            positions = math.prod(size or 1 for size in shape[1:-1])
            products[id(layer)] = positions * sum(map(math.prod, kernels))
    return products
