"""Models of which only gradients suffer, and models of which no layer is guilty."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from benchmarks.faults import parts
from benchmarks.faults.building import (
    BATCH,
    BATCHES,
    Raw,
    assemble,
    compiled,
    head,
    normal_batches,
    trunk,
)
from benchmarks.faults.making import make_case, trunk_case
from benchmarks.faults.records import Case

_LONG = 15
_BACK = ("backward", "overflow")


def _wrong_head(depth: int, *, activation: str, most: float) -> Any:
    """Returns a builder: a head that is sure, and often wrong where it is.

    The logit, or the difference of two, is at most `most`.
    """
    classes = 2 if activation == "softmax" else 1

    def build(seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        rng = np.random.default_rng([seed, depth])
        last = layers.Dense(classes, name="logits")
        model = assemble(
            "functional",
            (16,),
            trunk("dense", depth, 16),
            [
                last,
                layers.Activation("tanh", name="bounded"),
                layers.Rescaling(most / classes, name="spread"),
            ],
            [layers.Activation(activation, name="probability")],
        )
        x = rng.normal(size=(BATCHES, BATCH, 16)).astype("float32")
        taps = keras.Model(
            model.inputs, model.get_layer(f"norm_{depth // 3 - 1}").output
        )
        features = np.asarray(taps(x.reshape(-1, 16)))
        weights = rng.normal(size=16)
        weights = (1.5 * weights / np.std(features @ weights)).astype("float32")
        kernel = weights[:, None] if classes == 1 else np.stack([-weights, weights], 1)
        last.set_weights([kernel, np.zeros(classes, "float32")])
        sure = np.tanh(features @ weights)
        # Wrong where it is sure of the second class, right elsewhere.
        y = np.where(sure > 0.85, 0.0, sure > 0).astype("float32")
        y = y.reshape(BATCHES, BATCH, 1)
        loss = "binary_crossentropy"
        if classes == 2:
            y, loss = y[..., 0], "sparse_categorical_crossentropy"
        return compiled(model, loss), list(zip(x, y, strict=True))

    return build


BACKWARD = (
    trunk_case(
        "reciprocal_functional",
        "backward",
        parts.reciprocal,
        float16=("inverse",),
        reasons=_BACK,
        style="functional",
        depth=6,
    ),
    trunk_case(
        "reciprocal_deep",
        "backward",
        parts.reciprocal,
        float16=("inverse",),
        reasons=_BACK,
        style="subclassed",
        depth=18,
    ),
    trunk_case(
        "small_logarithm_sequential",
        "backward",
        parts.small_logarithm,
        float16=("decibel",),
        reasons=_BACK,
        style="sequential",
        depth=_LONG,
    ),
    trunk_case(
        "small_logarithm_stage",
        "backward",
        parts.small_logarithm,
        float16=("decibel",),
        reasons=_BACK,
        style="nested stage",
        depth=6,
    ),
    trunk_case(
        "negative_power_inside",
        "backward",
        parts.negative_power,
        float16=("inverse_power",),
        reasons=_BACK,
        style="nested",
        depth=_LONG,
    ),
    trunk_case(
        "smooth_absolute_subclassed",
        "backward",
        parts.smooth_absolute,
        float16=("smooth",),
        reasons=("backward", "constant", "underflow"),
        style="subclassed",
        depth=6,
    ),
    trunk_case(
        "smooth_absolute_sequence",
        "backward",
        parts.smooth_absolute,
        float16=("smooth",),
        reasons=("backward", "constant", "underflow"),
        style="nested",
        trunk="sequence",
        depth=6,
    ),
    make_case(
        "sigmoid_head_wrong",
        "backward",
        _wrong_head(6, activation="sigmoid", most=12.0),
        float16=("probability",),
        bfloat16=("probability",),
        reasons=("backward", "resolution"),
        style="functional",
        depth=10,
    ),
    make_case(
        "softmax_head_wrong",
        "backward",
        _wrong_head(6, activation="softmax", most=15.4),
        float16=("probability",),
        reasons=("backward", "underflow", "overflow"),
        style="functional",
        depth=10,
    ),
)


def _weak_loss(
    style: str, kind: str, depth: int, weight: float, shape: Any, *, units: int = 3
) -> Any:
    """Returns a builder: a healthy model of which the loss counts for little."""

    def build(seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        rng = np.random.default_rng([seed, depth])
        elements = trunk(kind, depth, 16 if kind != "image" else 8)
        model = assemble(
            style, shape, elements[:3], elements[3:], head(kind, units=units)
        )
        batches = normal_batches(rng, shape, units=units)
        weighted = [
            (x, y, np.full(len(x), weight, "float32") * rng.uniform(0.5, 1, len(x)))
            for x, y in batches
        ]
        weighted = [(x, y, w.astype("float32")) for x, y, w in weighted]
        return compiled(model), weighted

    return build


def _loss_scale_case(name: str, style: str, build: Any, depth: int) -> Case:
    empty = frozenset({frozenset[str]()})
    return Case(
        name=name,
        kind="loss scale",
        build=build,
        guilty={"float16": empty, "bfloat16": empty},
        verdict={"float16": "loss scale", "bfloat16": "safe"},
        reasons={"float16": frozenset(), "bfloat16": frozenset()},
        style=style.split()[0],
        depth=depth,
    )


LOSS_SCALE = (
    _loss_scale_case(
        "weak_loss_functional",
        "functional",
        _weak_loss("functional", "dense", 6, 1e-6, (16,)),
        7,
    ),
    _loss_scale_case(
        "weak_loss_sequential",
        "sequential",
        _weak_loss("sequential", "dense", 15, 1e-6, (16,)),
        16,
    ),
    _loss_scale_case(
        "weak_loss_subclassed",
        "subclassed",
        _weak_loss("subclassed", "residual", 16, 3e-6, (16,)),
        13,
    ),
    _loss_scale_case(
        "weak_loss_inside",
        "nested",
        _weak_loss("nested", "sequence", 9, 1e-6, (12, 16)),
        11,
    ),
    _loss_scale_case(
        "weak_loss_image",
        "functional",
        _weak_loss("functional", "image", 6, 1e-6, (6, 6, 3)),
        8,
    ),
    _loss_scale_case(
        "many_outputs",
        "functional",
        _weak_loss("functional", "dense", 6, 1e-3, (16,), units=4096),
        7,
    ),
)


def _chaos(style: str, depth: int, *, gain: float, logistic: bool) -> Any:
    """Returns a builder: every layer enlarges small differences."""

    def build(seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        rng = np.random.default_rng([seed, depth])

        def grow(x: Any) -> Any:
            return 1.0 - 1.9 * ops.square(x)

        elements: list[Any] = [layers.Activation("tanh", name="start")]
        for i in range(depth):
            if logistic:
                elements.append(Raw(grow, name=f"map_{i}"))
                continue
            turn = keras.initializers.Orthogonal(gain, seed=seed * 100 + i)
            elements.append(
                layers.Dense(
                    16, activation="tanh", kernel_initializer=turn, name=f"dense_{i}"
                )
            )
        third = len(elements) // 3
        model = assemble(
            style,
            (16,),
            [layers.Dense(16, name="first"), *elements[:third]],
            elements[third : 2 * third],
            [*elements[2 * third :], *head("dense")],
        )
        return compiled(model), normal_batches(rng, (16,))

    return build


def _amplification_case(name: str, style: str, build: Any, depth: int) -> Case:
    empty = frozenset({frozenset[str]()})
    both = ("float16", "bfloat16")
    return Case(
        name=name,
        kind="amplification",
        build=build,
        guilty={dtype: empty for dtype in both},
        verdict={dtype: "amplification" for dtype in both},
        reasons={dtype: frozenset() for dtype in both},
        style=style,
        depth=depth,
    )


AMPLIFICATION = tuple(
    _amplification_case(
        f"{'maps' if logistic else 'turns'}_{style}",
        style,
        _chaos(style, depth, gain=gain, logistic=logistic),
        depth + 3,
    )
    for style, depth, gain, logistic in (
        ("functional", 20, 3.0, True),
        ("sequential", 20, 4.0, False),
        ("subclassed", 24, 4.0, False),
        ("nested", 18, 3.0, True),
    )
)
CASES = (*BACKWARD, *LOSS_SCALE, *AMPLIFICATION)
