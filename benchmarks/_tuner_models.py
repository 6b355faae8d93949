"""Trained models with layers that half precision spoils, at places drawn by a seed.

What spoils them is either a layer of its own that computes badly, put between others,
or an attention whose values were enlarged after the training, and its outputs made as
much smaller, which float32 does not see.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.wild.fault_cases import Branch, extend
from tests.wild.own_layers import Own
from tfamp.keras_hooks import structure

WIDTH, LENGTH, SIZE, WORDS = 16, 8, 8, 50
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "numbers": ((8,), "float32"),
    "images": ((SIZE, SIZE, 3), "float32"),
    "words": ((LENGTH,), "int32"),
}
# Values of an attention that float16 cannot hold.
ENLARGED = 3e5


def beyond(x: Any) -> Any:
    """Returns about the absolute value, by squares beyond 65504."""
    return ops.sqrt(ops.square(x * 3e3) + 1.0) / 3e3


def cancelled(x: Any) -> Any:
    """Returns its input, of which half precision keeps next to nothing."""
    return (x + 3000.0) - 3000.0


def graded(number: int) -> Callable[[Any], Any]:
    """Returns a function that bfloat16 rounds, twice as much each number."""
    level = 10.0 * 2**number
    return lambda x: (x + level) - level


def mlp(depth: int) -> list[Any]:
    """Returns dense layers."""
    return [
        layers.Dense(WIDTH, activation="relu", name=f"dense_{i}") for i in range(depth)
    ]


def cnn(depth: int, *, normalizes: bool = False) -> list[Any]:
    """Returns convolutions."""
    found: list[Any] = []
    for i in range(depth):
        found.append(layers.Conv2D(WIDTH, 3, padding="same", name=f"conv_{i}"))
        if normalizes:
            found.append(layers.BatchNormalization(momentum=0.8, name=f"norm_{i}"))
        found.append(layers.ReLU(name=f"relu_{i}"))
    return found


def transformer(depth: int) -> list[Any]:
    """Returns an embedding and blocks of a transformer."""

    def block(i: int) -> Branch:
        def function(x: Any) -> Any:
            normed = layers.LayerNormalization(name=f"norm_{i}a")(x)
            attention = layers.MultiHeadAttention(2, WIDTH // 2, name=f"attention_{i}")
            x = layers.Add(name=f"add_{i}a")([x, attention(normed, normed)])
            h = layers.LayerNormalization(name=f"norm_{i}b")(x)
            h = layers.Dense(2 * WIDTH, activation="gelu", name=f"up_{i}")(h)
            h = layers.Dense(WIDTH, name=f"down_{i}")(h)
            return layers.Add(name=f"add_{i}b")([x, h])

        return Branch(function)

    embedding = layers.Embedding(WORDS, WIDTH, name="embedding")
    return [embedding, *(block(i) for i in range(depth))]


def lstm(depth: int) -> list[Any]:
    """Returns an embedding and LSTMs, one on the other."""
    return [
        layers.Embedding(WORDS, WIDTH, name="embedding"),
        *(
            layers.LSTM(WIDTH, return_sequences=True, name=f"lstm_{i}")
            for i in range(depth)
        ),
    ]


@dataclasses.dataclass(frozen=True)
class Case:
    """Models of one kind, with as many guilty layers."""

    name: str
    policy: str  # to tune under
    inputs: str  # of `SHAPES`
    make: Callable[[], Any]  # the elements of the chain
    guilty: int = 0  # how many layers are spoiled
    fault: Callable[[Any], Any] | None = None  # what spoils one; None: see `enlarge`
    is_regression: bool = False  # judged by its loss, the mean squared error

    @property
    def metric(self) -> str | None:
        """What is tuned by, as `tfamp.tune` takes it."""
        return None if self.is_regression else "accuracy"

    @property
    def tolerance(self) -> float:
        """By how much it may be worse; of a loss, as a part of it."""
        return 0.05 if self.is_regression else 0.02

    def built(self, places: int, weights: int) -> tuple[keras.Model, frozenset[str]]:
        """Returns a model and the guilty layers that were put in, by the seeds."""
        keras.utils.set_random_seed(weights)
        elements = self.make()
        guilty = frozenset[str]()
        if self.fault is not None:
            rng = np.random.default_rng([places, len(self.name)])
            elements, guilty = spliced(elements, self.fault, self.guilty, rng)
        pool = {
            "images": [layers.GlobalAveragePooling2D(name="pool")],
            "words": [layers.GlobalAveragePooling1D(name="pool")],
        }.get(self.inputs, [])
        head = layers.Dense(1 if self.is_regression else 2, name="head")
        shape, dtype = SHAPES[self.inputs]
        inputs = keras.Input(shape, dtype=dtype)
        return keras.Model(inputs, extend(inputs, [*elements, *pool, head])), guilty

    def trained(
        self, places: int, seeds: Sequence[int], *, epochs: int = 3
    ) -> tuple[keras.Model, frozenset[str], list[list[np.ndarray]]]:
        """Returns a model, its guilty layers, and its weights after each training.

        Places are the seed of where the guilty layers are; `seeds` those of the weights
        at the beginning and of the data, one a training.
        """
        model, guilty = self.built(places, 0)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            keras.optimizers.Adam(5e-3), "mse" if self.is_regression else loss
        )
        model.optimizer.build(model.trainable_variables)
        first = [variable.numpy() for variable in model.optimizer.variables]
        found = []
        for seed in seeds:
            model.set_weights(self.built(places, seed)[0].get_weights())
            for variable, value in zip(model.optimizer.variables, first, strict=True):
                variable.assign(value)
            x, y = self.examples(seed, 4096)
            model.fit(x, y, batch_size=64, epochs=epochs, verbose=0)
            if self.guilty and self.fault is None:
                rng = np.random.default_rng([places, len(self.name)])
                guilty = enlarge(model, self.guilty, rng)
            found.append(model.get_weights())
        return model, guilty, found

    def examples(self, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and targets that a small model can learn."""
        rng = np.random.default_rng([seed, 19])
        if self.inputs == "words":
            x = rng.integers(0, WORDS, (number, LENGTH)).astype("int32")
            level = (x / WORDS).mean(axis=1) - 0.5
        elif self.inputs == "images":
            level = rng.uniform(-0.5, 0.5, number)
            x = rng.normal(size=(number, SIZE, SIZE, 3))
            x = (x + 2 * level[:, None, None, None]).astype("float32")
        else:
            x = rng.normal(size=(number, 8)).astype("float32")
            level = x[:, :2].sum(axis=1)
        if self.is_regression:
            return x, np.sin(level).astype("float32")
        return x, (level > 0).astype("int32")


def spliced(
    elements: Sequence[Any],
    fault: Callable[[Any], Any],
    number: int,
    rng: np.random.Generator,
) -> tuple[list[Any], frozenset[str]]:
    """Returns the elements with as many faults behind some of them, and their paths."""
    places = sorted(rng.choice(len(elements), number, replace=False) + 1)
    order = rng.permutation(number)
    found, names = list(elements), [f"{fault.__name__}_{i}" for i in order]
    for i, place, name in reversed(list(zip(order, places, names, strict=True))):
        function = fault(int(i)) if fault is graded else fault
        found.insert(place, Own(function, name=name))
    return found, frozenset(names)


def enlarge(
    model: keras.Model, number: int, rng: np.random.Generator
) -> frozenset[str]:
    """Enlarges values of some attentions, and makes their outputs as much smaller."""
    found = [
        (path, layer)
        for path, layer, _ in structure.walk(model)
        if isinstance(layer, layers.MultiHeadAttention)
    ]
    chosen = [found[i] for i in rng.choice(len(found), number, replace=False)]
    for _, layer in chosen:
        for weight in layer.weights:
            if "/value/" in weight.path:
                weight.assign(weight * ENLARGED)
            elif weight.path.endswith("output/kernel"):
                weight.assign(weight / ENLARGED)
    return frozenset(path for path, _ in chosen)


F16, BF16 = "mixed_float16", "mixed_bfloat16"
CASES = (
    Case("MLP", F16, "numbers", lambda: mlp(4)),
    Case("MLP, squares", F16, "numbers", lambda: mlp(5), 1, beyond),
    Case("MLP, differences", BF16, "numbers", lambda: mlp(4), 2, cancelled),
    Case("MLP, many squares", F16, "numbers", lambda: mlp(9), 4, beyond),
    Case(
        *("regression, graded rounding", BF16, "numbers", lambda: mlp(4), 4, graded),
        is_regression=True,
    ),
    Case("CNN", BF16, "images", lambda: cnn(2)),
    Case("CNN, squares", F16, "images", lambda: cnn(2), 1, beyond),
    Case("CNN with norm", BF16, "images", lambda: cnn(2, normalizes=True)),
    Case(
        *("CNN with norm, differences", BF16, "images"),
        lambda: cnn(2, normalizes=True),
        *(2, cancelled),
    ),
    Case("transformer", BF16, "words", lambda: transformer(2)),
    Case("transformer, squares", F16, "words", lambda: transformer(2), 2, beyond),
    Case("transformer, values", F16, "words", lambda: transformer(3), 2),
    Case("LSTM, differences", BF16, "words", lambda: lstm(2), 2, cancelled),
)
