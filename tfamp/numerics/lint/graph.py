"""A traced call of a model, as rules read it: nodes with layers, and who reads whom."""

import inspect
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.graph.bodies import (
    Body,
    Reference,
    Shape,
    functions_of,
    plain_type,
    read_bodies,
)
from tfamp.graph.constants import evaluate
from tfamp.stepping.step_traces import Marks, plain_name

# What hands numbers on as they are, in another shape or in part.
PASSING = frozenset(
    "Identity Reshape Squeeze ExpandDims Transpose StridedSlice Slice Pack Unpack "
    "Split SplitV ConcatV2 StopGradient EnsureShape".split()
)
# Arrays beyond this are data, not constants that someone wrote.
_MAX_ELEMENTS = 2**20


class Node(NamedTuple):
    """One operation of a traced call.

    Its name without marks, the path of its layer or "", its type without what marks a
    variant, TensorFlow's definition, and the graph or function that it is in.
    """

    name: str
    layer: str
    op: str
    definition: Any
    body: Body

    def dtype(self, attribute: str = "T") -> str:
        """Returns the dtype that an attribute names, "" where there is none."""
        if attribute not in self.definition.attr:
            return ""
        return str(tf.as_dtype(self.definition.attr[attribute].type).name)

    @property
    def inputs(self) -> list[Reference]:
        """The tensors that it reads, in order."""
        return self.body.inputs(self.definition)

    def shape(self, index: int) -> Shape:
        """Returns the shape of an input."""
        return self.body.shape(self.inputs[index])

    def value(self, index: int) -> Any:
        """Returns the value of an input as an array, None if it is not constant."""
        return evaluate(self.body, self.inputs[index])

    @property
    def constant(self) -> np.ndarray | None:
        """The value of a "Const" of numbers, as float64."""
        if self.op != "Const" or not tf.as_dtype(self.dtype("dtype")).is_floating:
            return None
        proto = self.definition.attr["value"].tensor
        if math.prod(dim.size for dim in proto.tensor_shape.dim) > _MAX_ELEMENTS:
            return None
        return np.asarray(tf.make_ndarray(proto)).astype(np.float64)


class Graph:
    """A traced call of a model, with so many arguments named by `_leaf_name`."""

    def __init__(self, concrete: Any, marks: Marks, leaves: int) -> None:
        self.concrete = concrete
        self._whole = read_bodies(concrete)
        self.nodes = tuple(_walk(self._whole, "", marks, set()))
        self._by_name = {(id(n.body), n.definition.name): n for n in self.nodes}
        self._readers: dict[tuple[int, str], list[Node]] = {}
        for node in self.nodes:
            for reference in node.inputs:
                key = (id(node.body), reference.name)
                self._readers.setdefault(key, []).append(node)
        names = {_leaf_name(index): index for index in range(leaves)}
        self.leaves = {
            names[node.definition.name]: node
            for node in self.nodes
            if node.op == "Placeholder" and node.definition.name in names
        }

    def of_type(self, *ops: str) -> list[Node]:
        """Returns the operations of some types."""
        return [node for node in self.nodes if node.op in ops]

    def producer(self, node: Node, index: int) -> Node | None:
        """Returns what makes an input of an operation, None for an argument."""
        reference = node.inputs[index]
        return self._by_name.get((id(node.body), reference.name))

    def maker(self, name: str, output: int, passing: Iterable[str]) -> Node:
        """Returns the operation that made an output, past those `passing` it."""
        body, reference = self._whole, Reference(name, output)
        node = self._by_name[id(body), name]
        while True:
            functions = list(functions_of(node.definition))
            called = body.function(functions[0]) if len(functions) == 1 else None
            if called is not None:
                body, reference = called, called.results[reference.output]
            elif node.op in passing and node.inputs:
                reference = node.inputs[0]
            else:
                return node
            before = self._by_name.get((id(body), reference.name))
            if before is None or not _is_float(before):
                return node
            node = before

    def readers_past(self, node: Node, passing: Iterable[str] = PASSING) -> list[Node]:
        """Returns the readers of an operation, behind those that hand it on."""
        # Names without marks may be alike.
        found, waiting, seen = [], [node], {id(node.definition)}
        while waiting:
            at = waiting.pop()
            for reader in self._readers.get((id(at.body), at.definition.name), []):
                if id(reader.definition) in seen:
                    continue
                seen.add(id(reader.definition))
                if reader.op in passing:
                    waiting.append(reader)
                else:
                    found.append(reader)
        return found


def _is_float(node: Node) -> bool:
    """States whether an operation gives floats, or may."""
    dtype = node.dtype("DstT") or node.dtype()
    return not dtype or bool(tf.as_dtype(dtype).is_floating)


def _leaf_name(index: int) -> str:
    """Returns the name of an argument of the traced call."""
    return f"tfamp_leaf_{index}"


def _walk(body: Body, prefix: str, marks: Marks, seen: set[int]) -> Iterator[Node]:
    """Yields the operations of a graph and of the functions that it calls."""
    seen.add(id(body))
    for definition in body.live():
        name = definition.name
        if prefix and not name.startswith(prefix):
            name = f"{prefix}/{name}"
        yield Node(
            plain_name(name),
            marks.layer_of(name),
            plain_type(definition.op),
            definition,
            body,
        )
        for called in functions_of(definition):
            function = body.function(called)
            if function is None or id(function) in seen:
                continue
            for index, reference in enumerate(body.inputs(definition)):
                function.argument_shapes.setdefault(index, body.shape(reference))
            yield from _walk(function, name, marks, seen)


def trace_call(model: keras.Model, x: Any) -> Graph:
    """Returns the graph of a call for training of a built model; nothing is run.

    `x` are inputs or their specifications.
    """
    marks = Marks(model)
    flat = tf.nest.flatten(x)
    specs = [
        tf.TensorSpec(leaf.shape, leaf.dtype, name=_leaf_name(index))
        if isinstance(leaf, (tf.Tensor, tf.TensorSpec))
        else tf.type_spec_from_value(leaf)
        for index, leaf in enumerate(flat)
    ]
    parameters = inspect.signature(model.call).parameters
    options = {"training": True} if "training" in parameters else {}

    @tf.autograph.experimental.do_not_convert
    def forward(*leaves: Any) -> Any:
        inputs = tf.nest.pack_sequence_as(x, leaves)
        # Layers keep the losses that they add, but not those of this call.
        with keras.StatelessScope(collect_losses=True):
            with tf.name_scope(marks.scope):
                return model(inputs, **options)

    with model.distribute_strategy.scope(), marks.placed():
        concrete = tf.function(forward).get_concrete_function(*specs)
    return Graph(concrete, marks, len(flat))
