"""Graphs and functions as they are written down: nodes, arguments, results, shapes."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

Shape = tuple[int | None, ...] | None
LOOPS = ("While", "StatelessWhile")


class Reference(NamedTuple):
    """A tensor: the node or argument that it comes from, and which output of it."""

    name: str
    output: int = 0


class Body:
    """A graph, or a function of one."""

    def __init__(
        self,
        nodes: Iterable[tf.compat.v1.NodeDef],
        arguments: Iterable[str],
        results: Iterable[str],
        kept: Iterable[str],
        functions: Mapping[str, "Body"],
    ) -> None:
        self.nodes = {node.name: node for node in nodes}
        # The index of each argument; a graph has none.
        self.arguments = {name: index for index, name in enumerate(arguments)}
        self.results = [self._reference(text) for text in results]
        self.kept = list(kept)  # nodes that run though no result needs them
        self.argument_shapes: dict[int, Shape] = {}
        self.functions = functions  # of the library, by name

    def inputs(self, node: tf.compat.v1.NodeDef) -> list[Reference]:
        """Returns the tensors that a node reads, in order."""
        return [self._reference(text) for text in node.input if text[0] != "^"]

    def shape(self, reference: Reference) -> Shape:
        """Returns a tensor's shape; None, or a None inside, where it is not known."""
        if reference.name in self.arguments:
            return self.argument_shapes.get(self.arguments[reference.name])
        node = self.nodes.get(reference.name)
        return output_shape(node, reference.output) if node is not None else None

    @functools.cached_property
    def live(self) -> list[tf.compat.v1.NodeDef]:
        """The nodes that run: those behind the results and the kept ones."""
        waiting = [*(reference.name for reference in self.results), *self.kept]
        found = set(waiting)
        while waiting:
            node = self.nodes.get(waiting.pop())
            for text in node.input if node is not None else ():
                name = text.lstrip("^").split(":")[0]
                if name not in found:
                    found.add(name)
                    waiting.append(name)
        return [node for node in self.nodes.values() if node.name in found]

    def num_trips(self, loop: tf.compat.v1.NodeDef) -> int | None:
        """Returns how often a loop runs: once for each entry of a list that it reads.

        So do recurrent layers, `tf.map_fn` and `tf.scan`, and a gradient runs as often
        as what it is the gradient of. None where nothing tells.
        """
        sources = [self.nodes.get(reference.name) for reference in self.inputs(loop)]
        for source in filter(None, sources):
            if source.op == "TensorListFromTensor":
                shape = self.shape(self.inputs(source)[0])
                return shape[0] if shape else None
        loops = (source for source in sources if source and source.op in LOOPS)
        return next(map(self.num_trips, loops), None)

    def _reference(self, text: str) -> Reference:
        """Reads "name", "name:1" (in graphs) and "name:output:1" (in functions)."""
        name, *rest = text.split(":")
        if len(rest) < 2:
            return Reference(name, int(rest[0]) if rest else 0)
        node = self.nodes.get(name)
        outputs = [name for name, _ in outputs_of(node)] if node is not None else []
        first = outputs.index(rest[0]) if rest[0] in outputs else 0
        return Reference(name, first + int(rest[1]))


def outputs_of(node: tf.compat.v1.NodeDef) -> list[tuple[str, int]]:
    """Returns name and dtype of each output of a node; several may have one name."""
    definition = op_def_registry.get(node.op)
    found: list[tuple[str, int]] = []
    for each in definition.output_arg if definition is not None else ():
        if each.type_list_attr:
            dtypes = [*node.attr[each.type_list_attr].list.type]
        else:
            count = node.attr[each.number_attr].i if each.number_attr else 1
            dtypes = [each.type or node.attr[each.type_attr].type] * count
        found += [(each.name, dtype) for dtype in dtypes]
    return found


def output_shape(node: tf.compat.v1.NodeDef, index: int = 0) -> Shape:
    """Returns the shape of an output of a node; see `Body.shape`."""
    shapes = node.attr["_output_shapes"].list.shape
    return _shape(shapes[index]) if index < len(shapes) else None


def read_bodies(concrete: Any) -> Body:
    """Returns the graph of a traced, concrete function, ready to be walked."""
    graph = concrete.graph.as_graph_def(add_shapes=True)
    functions: dict[str, Body] = {}
    for definition in graph.library.function:
        signature = definition.signature
        body = functions[signature.name] = Body(
            definition.node_def,
            [argument.name for argument in signature.input_arg],
            [definition.ret[output.name] for output in signature.output_arg],
            definition.control_ret.values(),
            functions,
        )
        for index, argument in definition.arg_attr.items():
            if shapes := argument.attr["_output_shapes"].list.shape:
                body.argument_shapes[index] = _shape(shapes[0])
    whole = concrete.function_def
    results, kept = whole.ret.values(), whole.control_ret.values()
    return Body(graph.node, (), results, kept, functions)


def _shape(proto: Any) -> Shape:
    if proto.unknown_rank:
        return None
    return tuple(dim.size if dim.size >= 0 else None for dim in proto.dim)


def functions_of(node: tf.compat.v1.NodeDef) -> Iterator[str]:
    """Yields the names of the functions that a node calls."""
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        for each in value.list.func:
            yield each.name


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a graph, and how often it runs."""

    name: str  # behind those of the calls that it is in
    op_type: str  # such as "MatMul"
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    attributes: Any = dataclasses.field(repr=False)  # as protocol buffers
    sources: tuple[str, ...] = ()  # types of what made its inputs, "" for arguments
    count: int = 1  # in one call of the function
    is_counted: bool = True  # in a loop that data end `count` is 1, and not known

    def dtype(self, attribute: str = "T") -> str:
        """Returns the dtype that an attribute names, "" where there is none."""
        known = attribute in self.attributes and self.attributes[attribute].type
        # In the body of a function that takes several it may be left open, as 0.
        return str(tf.as_dtype(known).name) if known else ""


def is_backward(name: str) -> bool:
    """States whether an operation of this name was traced by a gradient tape."""
    parts = name.split("/")
    return any(part.startswith(("gradient_tape", "gradients")) for part in parts)
