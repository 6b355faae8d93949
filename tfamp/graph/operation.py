"""One operation of a graph: its type, shapes, dtypes, and how often it runs."""

import dataclasses
from typing import Any

import tensorflow as tf

from tfamp.graph.bodies import Shape


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a graph, and how often it runs.

    Args:
        name: Its name; behind those of the calls that it is in, where the names
            of a function start anew.
        op_type: Its type without what marks a variant of it, such as "MatMul" of
            a "_FusedMatMul".
        inputs: Shapes of what it reads.
        outputs: Shapes of what it gives.
        attributes: Its attributes, as protocol buffers.
        sources: Types of the operations that its inputs come from, "" for
            arguments.
        count: How often it runs in one call of the function.
        is_counted: Whether `count` is known; in a loop that data end it is 1.
    """

    name: str
    op_type: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    attributes: Any = dataclasses.field(repr=False)
    sources: tuple[str, ...] = ()
    count: int = 1
    is_counted: bool = True

    def dtype(self, attribute: str = "T") -> str:
        """Returns the dtype that an attribute names, "" where there is none."""
        if attribute not in self.attributes:
            return ""
        return str(tf.as_dtype(self.attributes[attribute].type).name)

    @property
    def is_backward(self) -> bool:
        """Whether it computes a gradient: it was traced by a gradient tape."""
        return is_backward(self.name)


def is_backward(name: str) -> bool:
    """States whether an operation of this name was traced by a gradient tape.

    Example:
        >>> is_backward("gradient_tape/dense/MatMul"), is_backward("dense/MatMul")
        (True, False)
    """
    parts = name.split("/")
    return any(part.startswith(("gradient_tape", "gradients")) for part in parts)


def plain_type(op_type: str) -> str:
    """Returns the type of an operation without the marks of fusion and oneDNN.

    Example:
        >>> plain_type("_MklNativeFusedMatMul"), plain_type("_FusedConv2D")
        ('MatMul', 'Conv2D')
    """
    if not op_type.startswith("_"):
        return op_type
    plain = op_type[1:]
    for mark in ("Mkl", "Native", "Eager", "Fused"):
        plain = plain.removeprefix(mark)
    return plain.removesuffix("WithBias")
