"""Which layer an operation belongs to, by its name in the graph."""

import re

# What inlining puts before a name, and loops and branches between two.
_CALL = re.compile(r"^(?:(?:Stateful)?PartitionedCall(?:_\d+)?|cluster\w*)/")
_BODY = re.compile(r"/(?:body|cond|then|else)/_\d+/")
_BACKWARD = "gradient_tape"


def scope_of(name: str) -> tuple[str, ...]:
    """Returns the scopes around an operation, outermost first.

    Example:
        >>> scope_of("StatefulPartitionedCall/gradient_tape/model/dense/MatMul/MatMul")
        ('model', 'dense', 'MatMul')
        >>> scope_of("model/gru/while/body/_24/model/gru/while/cell/add")
        ('model', 'gru', 'while', 'cell')
    """
    name = _BODY.split(_CALL.sub("", name))[-1]
    parts = [part for part in name.split("/") if part != _BACKWARD]
    return tuple(parts[:-1])
