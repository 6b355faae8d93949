"""Marks every operation of a trace with the layer whose call made it."""

import contextlib
import gc
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.patches import Patch, like, replaced

_MARK = "tfamp-mark"
_RUNS = itertools.count()
# What a strategy puts into the names of all replicas but the first.
_REPLICA = re.compile(r"replica_\d+$")


class Marks:
    """Knows the layer of each operation of a model by a mark in its name.

    A name alone does not tell: a layer that is called twice and the second layer of a
    class get names alike. The gradient of an operation carries its name. `scope` is a
    name scope for the whole trace, which no other trace has.
    """

    def __init__(self, model: keras.layers.Layer) -> None:
        self._layers = [(path, layer) for path, layer, _ in structure.walk(model)]
        # Functions that were traced for another run carry marks of that one.
        run = next(_RUNS)
        self.scope = f"{_MARK}{run}x"
        marks = [f"{self.scope}{i}x" for i in range(len(self._layers))]
        self._mark_of = {
            id(layer): mark
            for mark, (_, layer) in zip(marks, self._layers, strict=True)
        }
        self._at = {mark: i for i, mark in enumerate(marks)}
        path_of = {id(layer): path for path, layer in self._layers}
        self._children = {
            path: {c.name: path_of[id(c)] for c in structure.children(layer)}
            for path, layer in self._layers
        }

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Marks what is traced inside; calls are as before afterwards."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @like(original)
            def __call__(layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
                mark = self._mark_of.get(id(layer))
                if mark is None or tf.executing_eagerly():
                    return original(layer, *args, **kwargs)
                with tf.name_scope(mark):
                    return original(layer, *args, **kwargs)

            return __call__

        # The collector may take the last managed model, and with it the hook on
        # `__call__` that stands below this one.
        collects = gc.isenabled()
        gc.disable()
        patch = Patch(keras.layers.Layer, "__call__", wrap)
        patch.install()
        try:
            with contextlib.ExitStack() as stack:
                for _, layer in self._layers:
                    if isinstance(layer, keras.layers.Wrapper):
                        stack.enter_context(self._called_past(layer.layer))
                yield
        finally:
            patch.remove()
            if collects:
                gc.enable()

    @contextlib.contextmanager
    def _called_past(self, layer: keras.layers.Layer) -> Iterator[None]:
        """Marks a layer whose `call` is called without its `__call__`."""
        mark, original = self._mark_of.get(id(layer)), layer.call

        @like(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with tf.name_scope(mark or layer.name):
                return original(*args, **kwargs)

        with replaced(layer, call=call):
            yield

    def layer_of(self, name: str) -> str:
        """Returns the path of the layer that made an operation, "" for none."""
        path, rest = "", name.split("/")
        for position, part in enumerate(name.split("/")):
            mark = re.match(rf"{_MARK}\d+x\d+x", part)
            if mark and mark.group() in self._at:
                path = self._layers[self._at[mark.group()]][0]
                rest = name.split("/")[position + 1 :]
        # A function that was traced before holds no marks, only names of layers, which
        # TensorFlow numbers: Keras opens the first scope of a layer for its `build`.
        for part in rest if path else ():
            children = self._children[path]
            path = children.get(_without_number(part)) or children.get(part) or path
        return path


def plain_name(name: str) -> str:
    """Returns the name of an operation without marks and replicas.

    Example:
        >>> plain_name("replica_1/tfamp-mark0x1x_1/dense/MatMul")
        'dense/MatMul'
    """
    parts = [part for part in name.split("/") if not part.startswith(_MARK)]
    return "/".join(part for part in parts if not _REPLICA.match(part))


def _without_number(part: str) -> str:
    """Returns the name that TensorFlow made unique: "dense" of "dense_3"."""
    return re.sub(r"_\d+$", "", part)
