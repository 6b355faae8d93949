"""Layers and models as users write them: with dropout inside, losses, embeddings."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from benchmarks.faults.building import BATCH, BATCHES, Raw, assemble, compiled

Function = Callable[[Any], Any]
WIDTH = 8
SEQUENCE = (6, WIDTH)
IGNORING = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)


class Dropped(layers.Layer):
    """A user's block: dropout, then a function of its own, or the other way round.

    Args:
        function: Takes and returns a tensor.
        is_last: Whether dropout comes after the function.
        **kwargs: As for every layer.
    """

    def __init__(
        self, function: Function, *, is_last: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.function, self.is_last = function, is_last
        self.dropout = layers.Dropout(0.2, name="dropout")

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns the function of what dropout leaves."""
        if self.is_last:
            return self.dropout(self.function(inputs), training=training)
        return self.function(self.dropout(inputs, training=training))


class OwnAttention(layers.Layer):
    """A user's attention: scores divided too late, dropout on their weights.

    Args:
        factor: Of queries and keys.
        mask: What is added to scores of what comes later.
        **kwargs: As for every layer.
    """

    def __init__(self, factor: float, mask: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor, self.mask = factor, mask
        self.dropout = layers.Dropout(0.2, name="dropout")

    def call(self, x: Any, training: bool = False) -> Any:
        """Returns the weighed inputs, with a shortcut."""
        q = self.factor * x
        scores = ops.matmul(q, ops.swapaxes(q, 1, 2)) / max(1.0, self.factor) ** 2
        if self.mask:
            seen = ops.cast(ops.tri(x.shape[1], x.shape[1]), x.dtype)
            # By way of float32, so that NumPy does not warn of what is meant.
            far = ops.cast(ops.convert_to_tensor(self.mask, "float32"), x.dtype)
            scores = scores + (1.0 - seen) * far
        return x + ops.matmul(self.dropout(ops.softmax(scores), training=training), x)


class Encoder(layers.Layer):
    """A user's encoder block, with a function of its own between its two halves.

    Args:
        function: Takes and returns a tensor.
        **kwargs: As for every layer.
    """

    def __init__(self, function: Function, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function
        self.attention = layers.MultiHeadAttention(2, 4, dropout=0.2, name="attention")
        self.norm = layers.LayerNormalization(name="norm")
        self.mix = layers.Dense(WIDTH, name="mix")

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns attention, the function and a dense layer, with a shortcut."""
        x = ops.add(inputs, self.attention(inputs, inputs, training=training))
        x = ops.cast(self.norm(x), self.compute_dtype)
        return ops.add(inputs, self.mix(self.function(x)))


class Whole(keras.Model):
    """A user's model that computes something itself, between its layers.

    Args:
        function: Takes and returns a tensor.
        **kwargs: As for every model.
    """

    def __init__(self, function: Function, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function
        self.first = layers.Dense(16, activation="tanh", name="first")
        self.dropout = layers.Dropout(0.2, name="dropout")
        self.norm = layers.LayerNormalization(name="norm")
        self.last = layers.Dense(3, name="last")

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns the last layer's output."""
        x = self.dropout(self.first(inputs), training=training)
        x = self.function(ops.cast(x, self.compute_dtype))
        return self.last(self.norm(x))


class Adding(layers.Layer):
    """A user's layer that passes on what it gets, and adds a loss of it.

    Args:
        function: Takes a tensor, returns a scalar.
        **kwargs: As for every layer.
    """

    def __init__(self, function: Function, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function

    def call(self, inputs: Any) -> Any:
        """Returns the inputs."""
        self.add_loss(self.function(inputs))
        return inputs


class Cell(layers.Layer):
    """A user's recurrent cell with a function of its own.

    Args:
        function: Takes and returns a tensor.
        **kwargs: As for every layer.
    """

    def __init__(self, function: Function, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function
        self.state_size = self.output_size = WIDTH

    def build(self, shape: Any) -> None:
        """Makes the kernels."""
        self.kernel = self.add_weight(shape=(shape[-1], WIDTH), name="kernel")
        self.recurrent = self.add_weight(shape=(WIDTH, WIDTH), name="recurrent")

    def call(self, inputs: Any, states: Any) -> Any:
        """Returns the new state, twice."""
        x = ops.matmul(inputs, self.kernel) + ops.matmul(states[0], self.recurrent)
        x = ops.tanh(self.function(x))
        return x, [x]


class Tied(keras.Model):
    """Ids, their embedding's mean, and logits by the embedding itself.

    Args:
        factor: What the table is multiplied by.
        rows: Of the table.
        **kwargs: As for every model.
    """

    def __init__(self, factor: float, rows: int = 40, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor
        table = keras.initializers.RandomNormal(stddev=1.0, seed=1)
        self.embedding = layers.Embedding(
            rows, WIDTH, embeddings_initializer=table, name="embedding"
        )
        self.mix = layers.Dense(WIDTH, name="mix")

    def call(self, inputs: Any) -> Any:
        """Returns the logits of each row."""
        x = self.mix(ops.mean(self.embedding(inputs), axis=1))
        table = ops.cast(self.embedding.embeddings, self.compute_dtype)
        x = ops.cast(x, self.compute_dtype)
        scores = ops.matmul(self.factor * x, ops.transpose(self.factor * table))
        return scores / self.factor**2


def batches(
    make: Callable[[np.random.Generator], tuple[Any, Any]], seed: int
) -> list[tuple[Any, Any]]:
    """Returns as many batches as a case has."""
    rng = np.random.default_rng([seed, 17])
    return [make(rng) for _ in range(BATCHES)]


def of_normal(
    *shape: int, units: int = 3, level: float = 0.0, spread: float = 1.0
) -> Callable[[np.random.Generator], tuple[Any, Any]]:
    """Returns what draws a batch of normal inputs and targets around a level."""

    def make(rng: np.random.Generator) -> tuple[Any, Any]:
        x = rng.normal(size=(BATCH, *shape)).astype("float32")
        y = level + spread * rng.normal(size=(BATCH, units))
        return x, y.astype("float32")

    return make


def of_classes(
    *shape: int, classes: int = 3, ignored: bool = False
) -> Callable[[np.random.Generator], tuple[Any, Any]]:
    """Returns what draws normal inputs and classes, of which -1 is to be ignored."""

    def make(rng: np.random.Generator) -> tuple[Any, Any]:
        x = rng.normal(size=(BATCH, *shape)).astype("float32")
        y = rng.integers(0, classes, BATCH)
        return x, np.where(np.arange(BATCH) % 4 == 3, -1, y) if ignored else y

    return make


def of_ids(
    rows: int, length: int = 5, classes: int = 0
) -> Callable[[np.random.Generator], tuple[Any, Any]]:
    """Returns what draws ids, and normal targets or classes."""

    def make(rng: np.random.Generator) -> tuple[Any, Any]:
        x = rng.integers(0, rows, (BATCH, length)).astype("int32")
        if classes:
            return x, rng.integers(0, classes, BATCH)
        return x, rng.normal(size=(BATCH, 3)).astype("float32")

    return make


def around(
    part: Callable[[], list[Any]],
    *,
    style: str = "sequential",
    shape: tuple[int, ...] = (WIDTH,),
    data: Any = None,
    loss: Any = "mse",
    settle: bool = True,
    last: Callable[[], list[Any]] | None = None,
) -> Callable[[int], Any]:
    """Returns a builder of a part between a dense layer, a normalization and a head.

    Args:
        part: Makes the part's elements anew.
        style: As for `assemble`.
        shape: Of an example.
        data: Draws a batch; normal inputs and targets if None.
        loss: As for `compile`.
        settle: Whether a normalization follows the part.
        last: Makes what ends the model; a dense head if None.
    """

    def build(seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        before = [layers.Dense(WIDTH, activation="tanh", name="first")]
        after: list[Any] = [layers.LayerNormalization(name="settle")] if settle else []
        if len(shape) > 1:
            after.append(layers.Flatten(name="flat"))
        after += last() if last else [layers.Dense(3, name="head")]
        model = assemble(style, shape, before, part(), after)
        return compiled(model, loss), batches(data or of_normal(*shape), seed)

    return build


def of_model(
    make: Callable[[], keras.Model], data: Any, loss: Any = "mse"
) -> Callable[[int], Any]:
    """Returns a builder of a model that is built by its first batch."""

    def build(seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        model, drawn = make(), batches(data, seed)
        model(drawn[0][0])
        return compiled(model, loss), drawn

    return build


def raw(name: str, function: Function) -> Callable[[], list[Any]]:
    """Returns what makes a user's layer of a function."""
    return lambda: [Raw(function, name=name)]


def dropped(
    name: str, function: Function, *, is_last: bool = False
) -> Callable[[], list[Any]]:
    """Returns what makes a user's block with dropout inside."""
    return lambda: [Dropped(function, is_last=is_last, name=name)]


def adding(name: str, function: Function) -> Callable[[], list[Any]]:
    """Returns what makes a user's layer that adds a loss."""
    return lambda: [Adding(function, name=name)]
