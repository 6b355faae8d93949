"""Which layer an operation belongs to, by its name in the graph."""

import re
from collections.abc import Collection, Iterable

# What inlining puts before a name, and loops and branches between two.
_CALL = re.compile(r"^(?:(?:Stateful)?PartitionedCall(?:_\d+)?|cluster\w*)/")
_BODY = re.compile(r"/(?:body|cond|then|else)/_\d+/")
_BACKWARD = "gradient_tape"
# How often a scope is entered in one graph before names say nothing any more.
_MAX_SUFFIX = 4


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


def layers_of(names: Iterable[str], layers: Collection[str]) -> dict[str, str]:
    """Returns the layer of each operation, "" where it belongs to none.

    A graph in which the model was called before names its scopes "dense_1" for the
    layer "dense", which could be another layer. So all names are read alike: with the
    ending that explains most of them.

    Args:
        names: Names of operations.
        layers: Paths of layers; without any, an operation's scopes stand for it.

    Example:
        >>> layers_of(["m_1/a_1/MatMul", "m_1/a_1_1/Relu"], ["a", "a_1"])
        {'m_1/a_1/MatMul': 'a', 'm_1/a_1_1/Relu': 'a_1'}
        >>> layers_of(["m/a/MatMul"], [])
        {'m/a/MatMul': 'm/a'}
    """
    scopes = {name: scope_of(name) for name in names}
    if not layers:
        return {name: "/".join(scope) for name, scope in scopes.items()}
    suffixes = ["", *(f"_{number}" for number in range(1, _MAX_SUFFIX))]
    return max(
        (_read(scopes, layers, suffix) for suffix in suffixes),
        # `max` keeps the first of equals: the names as they stand.
        key=lambda found: len({layer for layer in found.values() if layer}),
    )


def _read(
    scopes: dict[str, tuple[str, ...]], layers: Collection[str], suffix: str
) -> dict[str, str]:
    """Returns the layers if all scopes end in `suffix`."""
    paths = {
        tuple(f"{part}{suffix}" for part in path.split("/")): path for path in layers
    }
    known: dict[tuple[str, ...], str] = {}
    for scope in scopes.values():
        if scope not in known:
            known[scope] = _innermost(scope, paths)
    return {name: known[scope] for name, scope in scopes.items()}


def _innermost(scope: tuple[str, ...], paths: dict[tuple[str, ...], str]) -> str:
    """Returns the layer that most of a scope spells out."""
    for length in range(len(scope), 0, -1):
        for start in range(len(scope) - length + 1):
            found = paths.get(scope[start : start + length])
            if found is not None:
                return found
    return ""
