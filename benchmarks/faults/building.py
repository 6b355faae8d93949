"""Makes the same chain of layers in four styles, with a part at a random depth.

A chain is a list of elements: a Keras layer; a `Node`, one operation of a Functional
graph; a `Branch`, any piece of a Functional graph; or a `Residual` around layers. A
factory makes them anew for each model.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tfamp.keras_hooks import structure

BATCH, BATCHES = 16, 2


class Raw(layers.Layer):
    """A user's layer that computes by a function of tensors.

    Args:
        function: Takes and returns a tensor.
        **kwargs: As for every layer.
    """

    def __init__(self, function: Callable[[Any], Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function

    def call(self, inputs: Any) -> Any:
        """Returns the function of the inputs."""
        return self.function(inputs)


class Stage(layers.Layer):
    """A user's layer made of layers, one after the other.

    Args:
        parts: The layers.
        is_residual: Whether the inputs are added to what they give.
        **kwargs: As for every layer.
    """

    def __init__(
        self, parts: Sequence[Any], *, is_residual: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.parts = list(parts)
        self.is_residual = is_residual

    def call(self, inputs: Any) -> Any:
        """Returns what the last layer gives."""
        x = inputs
        for part in self.parts:
            x = part(x)
        return ops.add(inputs, x) if self.is_residual else x


class Chain(keras.Model):
    """A user's model made of layers, one after the other.

    Args:
        parts: The layers.
        **kwargs: As for every model.
    """

    def __init__(self, parts: Sequence[Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.parts = list(parts)

    def call(self, inputs: Any) -> Any:
        """Returns what the last layer gives."""
        x = inputs
        for part in self.parts:
            x = part(x)
        return x


@dataclasses.dataclass(frozen=True)
class Node:
    """One operation of a Functional graph: a name and a function of one tensor."""

    name: str
    function: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Branch:
    """A piece of a Functional graph: a function of a symbolic tensor."""

    function: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Residual:
    """Layers around which the input is added to the output."""

    name: str
    parts: Sequence[Any]


def named(tensor: Any, name: str) -> Any:
    """Returns a symbolic tensor, the operation that made it renamed."""
    made = structure.producer(tensor)
    if made is None:
        raise TypeError(
            f"Got {tensor!r}, which no operation made; expected a symbolic tensor of a "
            "Functional graph. Pass what an operation on a `keras.Input` gave."
        )
    made[0].name = name
    return tensor


def extend(x: Any, elements: Sequence[Any]) -> Any:
    """Returns the symbolic tensor after the elements of a chain."""
    for element in elements:
        if isinstance(element, Node):
            x = named(element.function(x), element.name)
        elif isinstance(element, Branch):
            x = element.function(x)
        elif isinstance(element, Residual):
            inner = extend(x, element.parts)
            x = layers.Add(name=f"{element.name}_add")([x, inner])
        else:
            x = element(x)
    return x


def plain(elements: Sequence[Any]) -> list[Any]:
    """Returns the elements as layers, which every style can hold."""
    return [
        Stage(list(e.parts), is_residual=True, name=e.name)
        if isinstance(e, Residual)
        else e
        for e in elements
    ]


def assemble(
    style: str, shape: Sequence[int], before: list, middle: list, after: list
) -> keras.Model:
    """Returns a model of the three parts of a chain, in a style.

    In "nested" the middle is a Functional model "inner", what comes after it a
    Sequential one; in "nested stage" the middle is a layer of layers, "stage".
    """
    if style == "sequential":
        parts = plain([*before, *middle, *after])
        return keras.Sequential([keras.Input(shape), *parts])
    if style == "subclassed":
        model = Chain(plain([*before, *middle, *after]), name="chain")
        model(np.zeros((2, *shape), "float32"))
        return model
    inputs = keras.Input(shape)
    x = extend(inputs, before)
    if style == "nested":
        if middle:  # Keras 3.10 refuses a graph without an operation
            inner = keras.Input(x.shape[1:])
            x = keras.Model(inner, extend(inner, middle), name="inner")(x)
        x = keras.Sequential([keras.Input(x.shape[1:]), *plain(after)], name="rest")(x)
    elif style == "nested stage":
        x = extend(Stage(plain(middle), name="stage")(x), after)
    else:
        x = extend(x, [*middle, *after])
    return keras.Model(inputs, x)


def trunk(kind: str, depth: int, width: int) -> list[Any]:
    """Returns a healthy chain of about `depth` layers; every third one normalises."""
    if kind == "dense":
        return _dense(depth, width)
    if kind == "image":
        return _image(depth, width)
    if kind == "sequence":
        return _sequence(depth, width)
    return _residual(depth, width)


def _dense(depth: int, width: int) -> list[Any]:
    found: list[Any] = []
    for i in range(depth // 3):
        found += [
            layers.Dense(width, activation="tanh", name=f"dense_{i}a"),
            layers.Dense(width, name=f"dense_{i}b"),
            layers.LayerNormalization(name=f"norm_{i}"),
        ]
    return found


def _image(depth: int, width: int) -> list[Any]:
    found: list[Any] = []
    for i in range(depth // 3):
        found += [
            layers.Conv2D(width, 3, padding="same", name=f"conv_{i}"),
            layers.Activation("gelu", name=f"gelu_{i}"),
            layers.BatchNormalization(name=f"norm_{i}"),
        ]
    return found


def _sequence(depth: int, width: int) -> list[Any]:
    found: list[Any] = []
    for i in range(depth // 3):
        mixing = (
            layers.Conv1D(width, 3, padding="same", name=f"conv_{i}")
            if i % 2
            else layers.Dense(width, activation="gelu", name=f"dense_{i}")
        )
        found += [
            mixing,
            layers.Dense(width, name=f"mix_{i}"),
            layers.LayerNormalization(name=f"norm_{i}"),
        ]
    return found


def _residual(depth: int, width: int) -> list[Any]:
    found: list[Any] = []
    for i in range(depth // 4):
        parts = [
            layers.Dense(width, activation="gelu", name=f"up_{i}"),
            layers.Dense(width, name=f"down_{i}"),
        ]
        found.append(Residual(f"block_{i}", parts))
        found.append(layers.LayerNormalization(name=f"norm_{i}"))
    return found


def head(kind: str, units: int = 3) -> list[Any]:
    """Returns the layers that end a model of a trunk of that kind."""
    found: list[Any] = []
    if kind == "image":
        found.append(layers.GlobalAveragePooling2D(name="pool"))
    if kind == "sequence":
        found.append(layers.Flatten(name="flat"))
    return [*found, layers.Dense(units, name="head")]


def compiled(model: keras.Model, loss: Any = "mse", **kwargs: Any) -> keras.Model:
    """Returns the model, compiled with Adam."""
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss, **kwargs)
    return model


def normal_batches(
    rng: np.random.Generator, shape: Sequence[int], *, units: int = 3, batch: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns batches of normal inputs and targets, float32."""
    # Convolutions in float16 are slow on CPUs.
    batch = batch or (BATCH // 2 if len(shape) == 3 else BATCH)
    return [
        (
            rng.normal(size=(batch, *shape)).astype("float32"),
            rng.normal(size=(batch, units)).astype("float32"),
        )
        for _ in range(BATCHES)
    ]


def in_trunk(
    part: Callable[[], list[Any]],
    *,
    style: str,
    kind: str = "dense",
    depth: int = 6,
    width: int = 16,
    shape: Sequence[int] | None = None,
) -> Callable[[int], tuple[keras.Model, list[Any]]]:
    """Returns a builder of a trunk that has a part at a depth drawn by the seed.

    The part comes after a normalising layer, so that what it gets is of size one, and
    one comes after it.

    Args:
        part: Makes the part's elements anew.
        style: As for `assemble`.
        kind: "dense", "residual", "sequence" or "image".
        depth: Layers of the trunk.
        width: Channels.
        shape: Of an example; what suits the kind if None.
    """
    usual = {"image": (6, 6, 3), "sequence": (12, width)}.get(kind, (width,))

    def build(seed: int) -> tuple[keras.Model, list[Any]]:
        keras.utils.set_random_seed(seed)
        rng = np.random.default_rng([seed, depth, width])
        elements = trunk(kind, depth, width)
        norms = [
            i for i, e in enumerate(elements) if getattr(e, "name", "")[:4] == "norm"
        ]
        place = int(rng.choice(norms[:-1] if len(norms) > 1 else norms)) + 1
        settle = layers.LayerNormalization(name="settle")
        model = assemble(
            style,
            shape or usual,
            elements[:place],
            [*part(), settle],
            [*elements[place:], *head(kind)],
        )
        return compiled(model), normal_batches(rng, shape or usual)

    return build
