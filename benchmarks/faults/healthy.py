"""Usual networks that both formats train well: none may raise an alarm."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from benchmarks.faults.building import (
    Chain,
    Raw,
    Stage,
    compiled,
    in_trunk,
    normal_batches,
)
from benchmarks.faults.healthy_data import (
    autoencoder,
    embedding,
    images_of_bytes,
    many_ways,
)
from benchmarks.faults.records import Case


def _control(name: str, style: str, depth: int, build: Callable[[int], Any]) -> Case:
    both = ("float16", "bfloat16")
    return Case(
        name=name,
        kind="healthy",
        build=build,
        guilty={dtype: frozenset({frozenset[str]()}) for dtype in both},
        verdict=dict.fromkeys(both, "safe"),
        reasons={dtype: frozenset() for dtype in both},
        style=style,
        depth=depth,
    )


def _on_normal(
    make: Callable[[], keras.Model], shape: Sequence[int], *, units: int = 3
) -> Callable[[int], Any]:
    """Returns a builder of a model with normal inputs and targets."""

    def build(seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        # One ReLU of few that switches moves a gradient by much: no small batches.
        rng = np.random.default_rng([seed, 3])
        batches = normal_batches(rng, shape, units=units, batch=32)
        return compiled(make()), [(x, y + 2.0) for x, y in batches]

    return build


def _functional(
    shape: Sequence[int], body: Callable[[Any], Any], *, units: int = 3
) -> Callable[[int], Any]:
    """Returns a builder of a graph that ends in a dense head."""

    def make() -> keras.Model:
        inputs = keras.Input(shape)
        return keras.Model(inputs, layers.Dense(units, name="head")(body(inputs)))

    return _on_normal(make, shape, units=units)


def _mlp() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(32, activation="relu"),
            layers.Dense(32, activation="relu"),
            layers.Dense(3),
        ]
    )


def _residual_cnn(x: Any) -> Any:
    """Convolutions with biases before BatchNormalization, twice around a shortcut."""
    x = layers.Conv2D(8, 3, padding="same")(x)
    for _ in range(2):
        h = layers.Conv2D(8, 3, padding="same")(x)
        h = layers.ReLU()(layers.BatchNormalization()(h))
        h = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(h))
        x = layers.ReLU()(layers.Add()([x, h]))
    return layers.GlobalAveragePooling2D()(x)


def _resnet(x: Any) -> Any:
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3)(x)))
    for stage in range(3):
        short = layers.Conv2D(8, 1, strides=2 if stage == 1 else 1)(x)
        h = layers.Conv2D(
            8, 3, strides=2 if stage == 1 else 1, padding="same", use_bias=False
        )(x)
        h = layers.ReLU()(layers.BatchNormalization()(h))
        h = layers.Conv2D(8, 3, padding="same", use_bias=False)(h)
        h = layers.BatchNormalization()(h)
        x = layers.ReLU()(layers.Add()([short, h]))
    return layers.GlobalAveragePooling2D()(x)


def _depthwise(x: Any) -> Any:
    x = layers.Conv2D(8, 3, padding="same")(x)
    for _ in range(3):
        x = layers.DepthwiseConv2D(3, padding="same")(x)
        x = layers.Activation("hard_silu")(layers.BatchNormalization()(x))
        x = layers.BatchNormalization()(layers.Conv2D(8, 1)(x))
    x = layers.Activation("hard_silu")(x)
    return layers.GlobalAveragePooling2D()(x)


def _unet(x: Any) -> Any:
    first = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    low = layers.Conv2D(8, 3, padding="same", activation="relu")(
        layers.MaxPooling2D()(first)
    )
    up = layers.UpSampling2D()(low)
    joined = layers.Concatenate()([first, up])
    joined = layers.Conv2D(8, 3, padding="same", activation="relu")(joined)
    return layers.Flatten()(joined)


def _encoder_block(x: Any, width: int, i: int) -> Any:
    h = layers.LayerNormalization(name=f"norm_{i}a")(x)
    h = layers.MultiHeadAttention(2, width // 2, name=f"attention_{i}")(h, h)
    x = layers.Add(name=f"add_{i}a")([x, h])
    h = layers.LayerNormalization(name=f"norm_{i}b")(x)
    h = layers.Dense(2 * width, activation="gelu", name=f"up_{i}")(h)
    return layers.Add(name=f"add_{i}b")([x, layers.Dense(width, name=f"down_{i}")(h)])


def _transformer(x: Any) -> Any:
    x = layers.Dense(16)(x)
    for i in range(3):
        x = _encoder_block(x, 16, i)
    return layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))


def _own_attention() -> keras.Model:
    """A user's attention with the right scale, in a subclassed model."""

    def attend(x: Any) -> Any:
        scores = ops.matmul(x, ops.swapaxes(x, 1, 2)) / math.sqrt(x.shape[-1])
        return x + ops.matmul(ops.softmax(scores), x)

    parts: list[Any] = [layers.Dense(16, name="enter")]
    for i in range(5):
        parts += [
            layers.LayerNormalization(name=f"norm_{i}"),
            Raw(attend, name=f"attend_{i}"),
            layers.Dense(16, name=f"mix_{i}"),
        ]
    parts += [layers.Flatten(name="flat"), layers.Dense(3, name="head")]
    model = Chain(parts, name="chain")
    model(np.zeros((2, 6, 4), "float32"))
    return model


def _recurrent(make: Callable[[], Any]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        return keras.Sequential([keras.Input((10, 6)), make(), layers.Dense(3)])

    return build


def _constants() -> keras.Model:
    """Constants out of range that harm nothing."""
    return keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(16, name="enter"),
            layers.LayerNormalization(epsilon=1e-12, name="norm"),
            Raw(lambda x: ops.clip(x, -1e6, 1e6), name="limit"),
            layers.Dense(16, activation="tanh", name="hidden"),
            layers.Dense(3, name="head"),
        ]
    )


def _dropout(x: Any) -> Any:
    for _ in range(2):
        x = layers.Dropout(0.2)(layers.Dense(32, activation="relu")(x))
    return x


def _large() -> list[Any]:
    """Activations of some thousand, far from any limit, and back."""
    return [
        layers.Rescaling(1e3, name="large"),
        layers.Dense(16, name="mix"),
        layers.ReLU(name="above"),
        layers.Rescaling(1e-3, name="back"),
    ]


def _stages() -> keras.Model:
    """Layers of layers of layers, with shortcuts."""

    def block(i: int) -> Any:
        inner = Stage(
            [
                layers.Dense(32, activation="gelu", name="up"),
                layers.Dense(16, name="down"),
            ],
            name="inner",
        )
        norm = layers.LayerNormalization(name="norm")
        return Stage([norm, inner], is_residual=True, name=f"block_{i}")

    model = Chain(
        [*(block(i) for i in range(5)), layers.Dense(3, name="head")], name="chain"
    )
    model(np.zeros((2, 16), "float32"))
    return model


def _operations(x: Any) -> Any:
    """A graph of operations that are fine."""
    x = layers.Dense(16)(x)
    gate = ops.sigmoid(layers.Dense(16)(x))
    x = ops.add(ops.multiply(x, gate), ops.tanh(x))
    mean = ops.mean(x, axis=-1, keepdims=True)
    return ops.subtract(x, ops.multiply(mean, 0.5))


CASES = (
    _control("mlp", "sequential", 3, _on_normal(_mlp, (16,))),
    _control("residual_cnn", "functional", 19, _functional((6, 6, 3), _residual_cnn)),
    _control("resnet", "functional", 29, _functional((8, 8, 3), _resnet)),
    _control("depthwise_cnn", "functional", 19, _functional((6, 6, 3), _depthwise)),
    _control("unet", "functional", 8, _functional((6, 6, 3), _unet)),
    _control("transformer", "functional", 22, _functional((8, 6), _transformer)),
    _control("own_attention", "subclassed", 18, _on_normal(_own_attention, (6, 4))),
    _control(
        "lstm",
        "sequential",
        2,
        _on_normal(_recurrent(lambda: layers.LSTM(12)), (10, 6)),
    ),
    _control(
        "gru",
        "sequential",
        2,
        _on_normal(_recurrent(lambda: layers.GRU(12)), (10, 6)),
    ),
    _control(
        "bidirectional",
        "sequential",
        2,
        _on_normal(
            _recurrent(lambda: layers.Bidirectional(layers.LSTM(8))),
            (10, 6),
        ),
    ),
    _control("embedding", "sequential", 4, embedding),
    _control("autoencoder", "nested", 4, autoencoder),
    _control("many_ways", "functional", 7, many_ways),
    _control("constants", "sequential", 5, _on_normal(_constants, (16,))),
    _control("dropout", "functional", 5, _functional((16,), _dropout)),
    _control(
        "large_activations",
        "subclassed",
        12,
        in_trunk(_large, style="subclassed", depth=6),
    ),
    _control("stages", "subclassed", 26, _on_normal(_stages, (16,))),
    _control("operations", "functional", 9, _functional((16,), _operations)),
    _control("images_of_bytes", "functional", 5, images_of_bytes),
    _control(
        "deep_residual",
        "nested",
        26,
        in_trunk(lambda: [], style="nested", kind="residual", depth=32),
    ),
)
