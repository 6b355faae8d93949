"""Models of which is known what half precision spoils. `CASES` at the end has them.

A case is a chain of layers with a part in it that float16 or bfloat16 spoils, or a
healthy one, in one of four styles, built when asked for. The layers that stand alone
are those of tests/wild/own_layers.py.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.styles import Subclassed
from tests.wild import own_layers
from tests.wild.own_layers import Own

STYLES = ("functional", "sequential", "subclassed", "nested")
SHAPES = {"image": (6, 6, 3), "sequence": (12, 16), "dense": (16,), "residual": (16,)}
HALF, BOTH = ("float16",), ("float16", "bfloat16")


def through(parts, x):
    for part in parts:
        x = part(x)
    return x


class Stage(layers.Layer):
    """A user's layer: layers one after the other, their input added at the end."""

    def __init__(self, parts, **kwargs):
        super().__init__(**kwargs)
        self.parts = list(parts)

    def call(self, inputs):
        return ops.add(inputs, through(self.parts, inputs))


@dataclasses.dataclass(frozen=True)
class Branch:
    """A piece of a Functional graph: a function of a symbolic tensor."""

    function: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Residual:
    """Layers around which the input is added to the output."""

    name: str
    parts: Sequence[Any]


def extend(x, elements):
    """Returns the symbolic tensor after the elements of a chain."""
    for element in elements:
        if isinstance(element, Branch):
            x = element.function(x)
        elif isinstance(element, Residual):
            inner = extend(x, element.parts)
            x = layers.Add(name=f"{element.name}_add")([x, inner])
        else:
            x = element(x)
    return x


def assemble(style, shape, before, middle, after):
    """Returns a model of three parts of a chain, in one of `STYLES`.

    In "nested" the middle is a Functional model "inner".
    """
    if style in ("sequential", "subclassed"):
        parts = [
            Stage(each.parts, name=each.name) if isinstance(each, Residual) else each
            for each in (*before, *middle, *after)
        ]
        if style == "sequential":
            return keras.Sequential([keras.Input(shape), *parts])
        model = Subclassed(parts)
        model(np.zeros((2, *shape), "float32"))
        return model
    inputs = keras.Input(shape)
    x = extend(inputs, before)
    if style == "nested":
        inner = keras.Input(x.shape[1:])
        x = keras.Model(inner, extend(inner, middle), name="inner")(x)
        return keras.Model(inputs, extend(x, after))
    return keras.Model(inputs, extend(x, [*middle, *after]))


def group(kind, i, width):
    """Returns healthy layers, of which the last one normalizes."""
    if kind == "image":
        return [
            layers.Conv2D(width, 3, padding="same", name=f"conv_{i}"),
            layers.Activation("gelu", name=f"gelu_{i}"),
            layers.BatchNormalization(name=f"norm_{i}"),
        ]
    norm = layers.LayerNormalization(name=f"norm_{i}")
    second = layers.Dense(width, name=f"dense_{i}b")
    if kind == "residual":
        first = layers.Dense(width, activation="gelu", name=f"dense_{i}a")
        return [Residual(f"block_{i}", [first, second]), norm]
    first = layers.Dense(width, activation="tanh", name=f"dense_{i}a")
    if kind == "sequence" and i % 2:
        first = layers.Conv1D(width, 3, padding="same", name=f"dense_{i}a")
    return [first, second, norm]


def head(kind, units=3, **options):
    """Returns the layers that end a model of a kind."""
    pools = {"image": [layers.GlobalAveragePooling2D(name="pool")]}
    pools["sequence"] = [layers.Flatten(name="flat")]
    return [*pools.get(kind, []), layers.Dense(units, name="head", **options)]


def in_trunk(
    part, style, *, kind="dense", groups=2, width=16, shape=None, weight=0.0, units=3
):
    """Returns a builder of a healthy chain that has a part at a place of the seed.

    What the part gets is normalized, and so is what it gives. The loss counts by
    `weight`, all of it if 0.
    """
    given = tuple(shape or SHAPES[kind])

    def build(seed):
        keras.utils.set_random_seed(seed)
        rng = np.random.default_rng([seed, groups, width])
        own = [group(kind, i, width) for i in range(groups)]
        place = int(rng.integers(1, max(groups, 2)))
        before, after = sum(own[:place], []), sum(own[place:], [])
        middle = [*part(), layers.LayerNormalization(name="settle")]
        after = [*after, *head(kind, units)]
        model = compiled(assemble(style, given, before, middle, after))
        size = 8 if kind == "image" else 16
        shapes = ((size, *given), (size, units))
        batches = [
            tuple(rng.normal(size=each).astype("float32") for each in shapes)
            for _ in range(2)
        ]
        if weight:
            weights = (weight * rng.uniform(0.5, 1, size)).astype("float32")
            batches = [(*each, weights) for each in batches]
        return model, batches

    return build


def compiled(model):
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse")
    return model


# Parts that are spoilt. What they get is of size one.


def attend(x, factor=80.0):
    """Attends by scores that nobody divided."""
    q = x * factor
    return ops.matmul(ops.softmax(ops.matmul(q, ops.swapaxes(q, 1, 2))), x)


def masked(x):
    """Attends with a mask times -1e9, which is 0 times infinity in float16."""
    seen = ops.cast(ops.tri(x.shape[1], x.shape[1]), x.dtype)
    scores = ops.matmul(x, ops.swapaxes(x, 1, 2)) / math.sqrt(x.shape[-1])
    # By way of float32, so that NumPy does not warn of what is meant.
    far = ops.cast(ops.convert_to_tensor(-1e9, "float32"), x.dtype)
    return x + ops.matmul(ops.softmax(scores + (1.0 - seen) * far), x)


def length(x):
    """Divides by a norm whose squares pass 65504."""
    h = x * 300.0
    return h / ops.sqrt(ops.sum(ops.square(h), axis=-1, keepdims=True))


def likelihood(x):
    """Takes the logarithm of a mean of exponentials near e-20."""
    mean = ops.mean(ops.exp(x - 20.0), axis=-1, keepdims=True)
    return x - 2.0 * (ops.log(mean) + 20.0)


def joint(x):
    """Takes the logarithm of the product of 16 probabilities near 0.1."""
    p = 0.2 * ops.sigmoid(x)
    total = p[..., 0:1]
    for i in range(1, 16):
        total = total * p[..., i : i + 1]
    return x + ops.log(total) / 10.0


def moments(x):
    """Has the variance as mean of squares less square of the mean."""
    # Of every second channel: of all, a normalized row has the same variance.
    h = 100.0 + 3.0 * x[..., ::2]
    mean = ops.mean(h, axis=-1, keepdims=True)
    variance = ops.mean(ops.square(h), axis=-1, keepdims=True) - ops.square(mean)
    return ops.tanh(x + 18.0 / (9.0 + ops.maximum(variance, 0.0)) - 1.0)


def positions(x):
    """Adds sines of positions of some thousand."""
    position = ops.cast(ops.arange(x.shape[1]), x.dtype) * 97.0
    pace = 1.0 - ops.cast(ops.arange(x.shape[2]), x.dtype) * 0.1
    return x + 2.0 * ops.sin(position[:, None] * pace)


def average(x):
    """Follows a moving average whose steps are below the spacing of its value."""
    mean = ops.ones_like(x)
    for _ in range(64):
        mean = mean + 2e-4 * (x - mean)
    return (mean - 1.0) * 80.0


def shares(x):
    """Divides by 1e-8 and rows of zeros."""
    above = ops.relu(x - 1.5)
    return x + 3.0 * above / (ops.sum(above, axis=-1, keepdims=True) + 1e-8)


def levels(x):
    """Takes the logarithm of zeros and 1e-10."""
    used = ops.cast(ops.arange(x.shape[-1]) % 2, x.dtype)
    return x + 0.1 * ops.log(used * (1.5 + ops.tanh(x)) + 1e-10)


def cosine(x):
    """Takes Dot(normalize=True) of two branches of large values."""
    sides = [
        layers.Rescaling(1000.0, name=f"{name}_large")(layers.Dense(16, name=name)(x))
        for name in ("left", "right")
    ]
    found = layers.Dot(axes=-1, normalize=True, name="cosine")(sides)
    joined = layers.Add(name="join")([x, layers.Rescaling(3.0, name="more")(found)])
    return layers.Activation("tanh", name="bent")(joined)


# Layer -> what it computes, the dtypes that spoil it, and the trunk that it needs.
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...], str]] = {
    "length": (length, HALF, "dense"),
    "soft": (lambda x: ops.log(1.0 + ops.exp(15.0 * x)) / 15.0, HALF, "dense"),
    "cube": (lambda x: (x * 50.0) ** 3 / 1e4, HALF, "dense"),
    "attend": (attend, HALF, "sequence"),
    "masked": (masked, HALF, "sequence"),
    "power": (lambda x: ops.square(x * 1e-5) * 1e5 * 1e5, HALF, "dense"),
    "kernel": (lambda x: -ops.log(ops.exp(-30.0 * ops.tanh(x) ** 2)), HALF, "dense"),
    "likelihood": (likelihood, HALF, "dense"),
    "joint": (joint, HALF, "dense"),
    "moments": (moments, BOTH, "dense"),
    "bend": (lambda x: (ops.sqrt(1.0 + 1e-4 * x**2) - 1.0) * 2e4, BOTH, "dense"),
    "angle": (lambda x: (1.0 - ops.cos(0.02 * x)) * 5e3, BOTH, "dense"),
    "positions": (positions, BOTH, "sequence"),
    "average": (average, BOTH, "dense"),
    "levels": (levels, HALF, "dense"),
    "inverse": (lambda x: 1.0 / (1e-3 * (1.5 + ops.tanh(x))), HALF, "dense"),
    "decibel": (lambda x: ops.log(1e-5 * (1.2 + ops.tanh(x))), HALF, "dense"),
    "offset": (lambda x: (x + 3000.0) - 3000.0, BOTH, "dense"),
}


def _widening():
    kernel = keras.initializers.RandomNormal(stddev=3e4, seed=1)
    wide = layers.Dense(16, kernel_initializer=kernel, name="widen")
    return [wide, layers.Rescaling(1e-5, name="shrink")]


def _offset():
    return layers.Rescaling(1.0, offset=3000.0, name="offset")


def _center():
    return [_offset(), Own(lambda x: x - ops.mean(x, -1, keepdims=True), name="center")]


def _small():
    scales = {"small": 1e-4, "smaller": 1e-5, "back": 3e4, "again": 3e4}
    return [layers.Rescaling(scale, name=name) for name, scale in scales.items()]


def _far():
    return [_offset(), layers.BatchNormalization(name="batch_norm")]


def _unit(scale):
    large = layers.Rescaling(scale, name="scaled")
    return [large, layers.UnitNormalization(name="unit")]


def _two():
    between = layers.LayerNormalization(name="between")
    cube = Own(FUNCTIONS["cube"][0], name="cube")
    return [cube, between, Own(length, name="length")]


# Part -> its layers, those that are guilty, where, and in which styles.
PARTS: dict[str, tuple[Callable[[], list[Any]], tuple[str, ...], tuple, tuple]] = {
    "widening": (_widening, ("widen", "shrink"), HALF, STYLES),
    "center": (_center, ("offset", "center"), BOTH, STYLES),
    "small products": (_small, ("smaller", "back"), HALF, STYLES),
    "far normalization": (_far, ("offset", "batch_norm"), BOTH, STYLES),
    "unit": (lambda: _unit(1500.0), ("unit",), HALF, STYLES),
    "little unit": (lambda: _unit(1e-4), ("unit",), HALF, STYLES[:2]),
    "cosine": (lambda: [Branch(cosine)], ("cosine",), HALF, ("functional", "nested")),
    "two": (_two, ("cube", "length"), HALF, STYLES),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of which is known what half precision would spoil, paths by dtype.

    `build` takes a seed and returns (compiled float32 model, list of batches).
    """

    name: str
    build: Callable[[int], tuple[Any, list[Any]]]
    guilty: Mapping[str, frozenset[str]]
    verdict: str = "safe"

    @property
    def is_healthy(self):
        """Whether no dtype spoils anything in it."""
        return self.verdict == "safe" and not any(self.guilty.values())

    def verdict_in(self, dtype):
        """Returns what `sensitivity` has to say."""
        if self.guilty[dtype]:
            return "layers"
        is_scale = (self.verdict, dtype) == ("loss scale", "bfloat16")
        return "safe" if is_scale else self.verdict


NOBODY: Any = {dtype: frozenset() for dtype in BOTH}


def _guilty(names, dtypes, style):
    prefix = "inner/" if style == "nested" else ""
    paths = frozenset(prefix + name for name in names)
    return {dtype: paths if dtype in dtypes else frozenset() for dtype in BOTH}


def _own(table, guilty, kind):
    """Returns the models of layers that stand alone, known in float16."""

    def builder(function, x):
        def build(seed):
            model, y = own_layers.model_of(function, x)
            return model, [(x[at : at + 32], y[at : at + 32]) for at in (0, 32)]

        return build

    known = {"float16": guilty}
    return [Case(f"{kind} {n}", builder(*given), known) for n, given in table.items()]


def _faulty():
    found = []
    for number, (name, (function, dtypes, kind)) in enumerate(FUNCTIONS.items()):
        long = {"shape": (64, 8), "width": 8} if name == "positions" else {}
        how = {"kind": kind, "groups": 2 + 3 * (number % 2), **long}
        part = functools.partial(
            lambda *given: [Own(given[1], name=given[0])], name, function
        )
        for style in (STYLES[number % 4], STYLES[(number + 1) % 4]):
            build, guilty = in_trunk(part, style, **how), _guilty([name], dtypes, style)
            found.append(Case(f"{name}, {style}", build, guilty))
    for name, (part, names, dtypes, styles) in PARTS.items():
        for number, style in enumerate(styles):
            build = in_trunk(part, style, groups=2 + 3 * (number % 2))
            found.append(Case(f"{name}, {style}", build, _guilty(names, dtypes, style)))
    return found


def _whole():
    """Models of which no layer is guilty by itself."""

    def weak(style, kind):
        build = in_trunk(list, style, kind=kind, weight=1e-6)
        return Case(f"weak loss, {style}", build, NOBODY, "loss scale")

    def maps():
        grow = [Own(lambda x: 1.0 - 1.9 * x**2, name=f"map_{i}") for i in range(20)]
        return [layers.Activation("tanh", name="start"), *grow]

    def chaos(style):
        return Case(f"maps, {style}", in_trunk(maps, style), NOBODY, "amplification")

    kinds = ("dense", "residual", "image")
    return [*map(weak, STYLES, kinds), *map(chaos, STYLES[:2])]


# Healthy networks.


def _convolutions(x):
    x = layers.Conv2D(8, 3, padding="same")(x)
    for _ in range(2):
        h = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(x))
        h = layers.Conv2D(8, 3, padding="same")(layers.Activation("gelu")(h))
        x = layers.Activation("gelu")(x + layers.BatchNormalization()(h))
    return layers.GlobalAveragePooling2D()(x)


def _unet(x):
    first = layers.Conv2D(8, 3, padding="same", activation="gelu")(x)
    low = layers.Conv2D(8, 3, padding="same")(layers.MaxPooling2D()(first))
    joined = layers.Concatenate()([first, layers.UpSampling2D()(low)])
    return layers.Flatten()(layers.Conv2D(8, 3, padding="same")(joined))


def _transformer(x):
    x = layers.Dense(16)(x)
    for _ in range(2):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 8)(h, h)
        h = layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(16)(h)
    return layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))


def _gated(x):
    x = layers.Dense(16)(x)
    gate = ops.sigmoid(layers.Dense(16)(x))
    x = x * gate + ops.tanh(x)
    return x - 0.5 * ops.mean(x, axis=-1, keepdims=True)


NETWORKS: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "convolutions": ((6, 6, 3), _convolutions),
    "U-Net": ((6, 6, 3), _unet),
    "transformer": ((8, 6), _transformer),
    "gates": ((16,), _gated),
    "LSTM": ((10, 6), layers.LSTM(12)),
    "GRU": ((10, 6), layers.GRU(12)),
    "both ways": ((10, 6), layers.Bidirectional(layers.LSTM(8))),
    "dropout": ((16,), lambda x: layers.Dropout(0.2)(layers.Dense(32, "gelu")(x))),
    "large numbers": (
        (16,),
        lambda x: layers.Rescaling(1e-3)(layers.Dense(16)(layers.Rescaling(1e3)(x))),
    ),
    "pixels": (
        (6, 6, 3),
        lambda x: layers.Flatten()(layers.Conv2D(8, 3)(layers.Rescaling(1 / 255)(x))),
    ),
}


def _healthy():
    def network(name):
        def build(seed):
            keras.utils.set_random_seed(seed)
            shape, body = NETWORKS[name]
            if isinstance(body, layers.Layer):
                body = type(body).from_config(body.get_config())
            inputs = keras.Input(shape)
            model = keras.Model(inputs, layers.Dense(3, name="head")(body(inputs)))
            rng = np.random.default_rng([seed, 3])
            draw = rng.uniform if name == "pixels" else rng.normal
            x = draw(0, 255.0 if name == "pixels" else 1.0, (2, 32, *shape))
            y = rng.normal(2.0, 1.0, (2, 32, 3)).astype("float32")
            return compiled(model), list(zip(x.astype("float32"), y, strict=True))

        return Case(name, build, NOBODY)

    def trunk(kind, style, groups):
        how = {"kind": kind, "groups": groups, "width": 8 if kind == "image" else 16}
        build = in_trunk(lambda: [layers.ReLU(name="above")], style, **how)
        return Case(f"{kind}, {style}, {groups} groups", build, NOBODY)

    trunks = [
        trunk(kind, style, groups)
        for kind in SHAPES
        for style in STYLES
        for groups in (2, 5)
        if kind != "image" or groups == 2
    ]
    return [*map(network, NETWORKS), *trunks]


# Float16 leaves the first as it is; variables that a layer assigns are read in float32.
_MENDED = ("harmonic mean", "running squares", "step counter")
_SPOILT = {k: v for k, v in own_layers.SPOILT.items() if k not in _MENDED}
CASES: tuple[Case, ...] = (
    *_faulty(),
    *_whole(),
    *_own(_SPOILT, frozenset({"own"}), "spoilt"),
    *_healthy(),
    *_own(own_layers.HEALTHY, frozenset(), "healthy"),
)
