"""Training steps that went wrong, in each way that triage has to tell apart."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.faults import parts
from benchmarks.faults.building import Raw
from benchmarks.faults.failure_making import WIDTH, batch, failure, network


def _damaged(
    damage: Callable[[Any, Any], Any], **options: Any
) -> Callable[[np.random.Generator], Any]:
    """Returns a maker of a healthy model and a batch that was damaged."""
    classes = options.pop("classes", 0)
    if classes:
        options |= {
            "loss": "sparse_categorical_crossentropy",
            "activation": "softmax",
            "units": classes,
        }

    def make(rng: np.random.Generator) -> Any:
        x, y = batch(rng, options.get("shape", (WIDTH,)), classes=classes)
        return network(**options), damage(x, y)

    return make


def _nan_in_x(x: Any, y: Any) -> Any:
    x[3, ..., 2] = np.nan
    return x, y


def _infinity_in_x(x: Any, y: Any) -> Any:
    x[5, ..., 0] = np.inf
    return x, y


def _nan_in_y(x: Any, y: Any) -> Any:
    y[7] = np.nan
    return x, y


def _nan_in_weight(x: Any, y: Any) -> Any:
    weight = np.ones(len(x), "float32")
    weight[2] = np.nan
    return x, y, weight


def _infinite_weight(x: Any, y: Any) -> Any:
    weight = np.ones(len(x), "float32")
    weight[4] = np.inf
    return x, y, weight


def _label_out_of_range(x: Any, y: Any) -> Any:
    y[1] = 99
    return x, y


def _huge_target(x: Any, y: Any) -> Any:
    y[6] = 1e30
    return x, y


def _huge_input(x: Any, y: Any) -> Any:
    x[6] = 1e30 * np.abs(x[6])
    return x, y


def _entered(rng: np.random.Generator) -> Any:
    """Returns a network that does not hide a huge input behind a tanh."""
    x, y = batch(rng)
    parts_of_it = [
        layers.Dense(WIDTH, activation="relu", name=f"dense_{i}") for i in range(3)
    ]
    head = layers.Dense(1, name="head")
    model = keras.Sequential([keras.Input((WIDTH,)), *parts_of_it, head])
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse")
    return model, _huge_input(x, y)


DATA = (
    failure("nan_in_x", "data", _damaged(_nan_in_x)),
    failure(
        "nan_in_x_bfloat16",
        "data",
        _damaged(_nan_in_x, style="subclassed", depth=15),
        policy="mixed_bfloat16",
    ),
    failure(
        "infinity_in_x_float16",
        "data",
        _damaged(_infinity_in_x, style="sequential"),
        policy="mixed_float16",
    ),
    failure(
        "nan_in_sequence",
        "data",
        _damaged(_nan_in_x, kind="sequence", shape=(6, WIDTH), style="nested"),
    ),
    failure("nan_in_y", "data", _damaged(_nan_in_y, style="nested", depth=15)),
    failure("nan_in_y_float16", "data", _damaged(_nan_in_y), policy="mixed_float16"),
    failure("nan_in_weight", "data", _damaged(_nan_in_weight)),
    failure(
        "infinite_weight_bfloat16",
        "data",
        _damaged(_infinite_weight, style="subclassed"),
        policy="mixed_bfloat16",
    ),
    failure("label_out_of_range", "data", _damaged(_label_out_of_range, classes=4)),
    failure("huge_target", "data", _damaged(_huge_target, style="sequential")),
    failure("huge_input", "data", _entered),
)


def _with_part(
    part: Callable[[], list[Any]], **options: Any
) -> Callable[[np.random.Generator], Any]:
    """Returns a maker of a model with a part in it and a good batch."""

    def make(rng: np.random.Generator) -> Any:
        return network(part(), **options), batch(rng, options.get("shape", (WIDTH,)))

    return make


def _raw(name: str, function: Callable[[Any], Any]) -> Callable[[], list[Any]]:
    return lambda: [Raw(function, name=name), layers.LayerNormalization(name="settle")]


def _root_of_zero(x: Any) -> Any:
    return ops.sqrt(ops.relu(x))


def _logarithm_of_zero(x: Any) -> Any:
    return ops.log(ops.relu(x))


def _share_of_nothing(x: Any) -> Any:
    above = ops.relu(x - 100.0)
    return x + above / ops.sum(above, axis=-1, keepdims=True)


def _logarithm_of_negative(x: Any) -> Any:
    return x * ops.log(x)


def _exponential(x: Any) -> Any:
    return ops.log1p(ops.exp(200.0 * ops.abs(x)))


def _norm_of_zero(x: Any) -> Any:
    nothing = ops.relu(x - 100.0)
    return x + ops.sqrt(ops.sum(ops.square(nothing), axis=-1, keepdims=True))


def _spoilt_weights(
    value: float, layer: str, **options: Any
) -> Callable[[np.random.Generator], Any]:
    """Returns a maker of a model of which one weight of one layer is not finite.

    A ReLU follows, which on CPUs in graph mode makes NaN 0: the loss is finite.
    """

    def make(rng: np.random.Generator) -> Any:
        fused = [
            layers.Dense(WIDTH, activation="relu", name="hidden"),
            layers.Dense(WIDTH, activation="relu", name="after"),
        ]
        model = network(fused, **options)
        for part in fused:
            if part.name == layer:
                kernel, bias = part.get_weights()
                kernel[1, 2] = value
                part.set_weights([kernel, bias])
        return model, batch(rng)

    return make


MODEL = (
    failure(
        "root_of_zero",
        "model",
        _with_part(_raw("root", _root_of_zero)),
        layers=["root"],
    ),
    failure(
        "root_of_zero_float16",
        "model",
        _with_part(_raw("root", _root_of_zero), style="subclassed", depth=15, place=3),
        policy="mixed_float16",
        layers=["root"],
    ),
    failure(
        "norm_of_zero_inside",
        "model",
        _with_part(_raw("norm", _norm_of_zero), style="nested"),
        layers=["inner/norm"],
    ),
    failure(
        "logarithm_of_zero",
        "model",
        _with_part(_raw("levels", _logarithm_of_zero), depth=15, place=4),
        layers=["levels"],
    ),
    failure(
        "logarithm_of_zero_bfloat16",
        "model",
        _with_part(_raw("levels", _logarithm_of_zero), style="sequential"),
        policy="mixed_bfloat16",
        layers=["levels"],
    ),
    failure(
        "share_of_nothing",
        "model",
        _with_part(_raw("shares", _share_of_nothing), style="nested stage"),
        layers=["stage/shares"],
    ),
    failure(
        "logarithm_of_negative",
        "model",
        _with_part(_raw("entropy", _logarithm_of_negative), style="subclassed"),
        layers=["entropy"],
    ),
    failure(
        "exponential",
        "model",
        _with_part(_raw("grow", _exponential), style="sequential", depth=15, place=2),
        layers=["grow"],
    ),
    failure(
        "nan_weight_behind_relu",
        "model",
        _spoilt_weights(np.nan, "hidden"),
        layers=["hidden"],
    ),
    failure(
        "nan_weight_behind_relu_deep",
        "model",
        _spoilt_weights(np.nan, "after", depth=15, place=3, style="sequential"),
        layers=["after"],
    ),
    failure(
        "infinite_weight_in_layer",
        "model",
        _spoilt_weights(np.inf, "hidden", style="nested"),
        policy="mixed_bfloat16",
        layers=["inner/hidden"],
    ),
)


def _exploded(optimizer: Callable[[], Any], depth: int = 4) -> Callable[..., Any]:
    """Returns a maker of a model that trained until a step was not finite."""

    def make(rng: np.random.Generator) -> Any:
        model = keras.Sequential(
            [keras.Input((WIDTH,))]
            + [
                layers.Dense(WIDTH, activation="relu", name=f"dense_{i}")
                for i in range(depth)
            ]
            + [layers.Dense(1, name="head")]
        )
        model.compile(optimizer=optimizer(), loss="mse")
        x, y = batch(rng)
        for _ in range(100):
            weights = [variable.numpy() for variable in model.variables]
            if not step(model, (x, y)):
                for variable, value in zip(model.variables, weights, strict=True):
                    variable.assign(value)
                return model, (x, y)
        raise RuntimeError(
            "The weights stayed finite for 100 steps; expected them to explode. Raise "
            "the learning rate of the case."
        )

    return make


def step(model: keras.Model, given: Any) -> bool:
    """Takes one training step, eagerly; returns whether everything stayed finite.

    A step whose gradients are not finite writes nothing, as under a loss scale.
    """
    x, y, *weight = given
    optimizer = model.optimizer
    scale = getattr(optimizer, "scale_loss", lambda loss: loss)
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        loss = model.compute_loss(
            x=x, y=y, y_pred=predicted, sample_weight=weight[0] if weight else None
        )
        scaled = scale(loss)
    variables = model.trainable_variables
    gradients = tape.gradient(scaled, [v.value for v in variables])
    arrays = [np.asarray(tf.cast(g, "float32")) for g in gradients if g is not None]
    if not all(np.isfinite(v).all() for v in [np.asarray(loss), *arrays]):
        return False
    optimizer.apply(gradients, variables)
    return all(np.isfinite(v.numpy()).all() for v in variables)


LEARNING_RATE = (
    failure(
        "learning_rate_sgd",
        "learning rate",
        _exploded(lambda: keras.optimizers.SGD(100.0)),
    ),
    failure(
        "learning_rate_momentum",
        "learning rate",
        _exploded(lambda: keras.optimizers.SGD(30.0, momentum=0.9), depth=8),
    ),
    failure(
        "learning_rate_adam",
        "learning rate",
        _exploded(lambda: keras.optimizers.Adam(1e6)),
    ),
    failure(
        "learning_rate_bfloat16",
        "learning rate",
        _exploded(lambda: keras.optimizers.SGD(100.0)),
        policy="mixed_bfloat16",
    ),
)


def _zero_epsilon(optimizer: Callable[[], Any]) -> Callable[..., Any]:
    """Returns a maker: a gradient that is exactly 0 is divided by a slot of 0."""

    def make(rng: np.random.Generator) -> Any:
        x, y = batch(rng)
        x[:, 0] = 0.0
        return network(optimizer=optimizer()), (x, y)

    return make


def _spoilt_slot(
    optimizer: Callable[[], Any], value: float, layer: str, **options: Any
) -> Callable[..., Any]:
    """Returns a maker: the optimizer's state of one kernel holds one bad number."""

    def make(rng: np.random.Generator) -> Any:
        model = network(optimizer=optimizer(), **options)
        given = batch(rng)
        step(model, given)
        for slot in model.optimizer.variables:
            if f"{layer}_kernel" in slot.path and "momentum" in slot.path:
                spoilt = slot.numpy()
                spoilt[0, 0] = value
                slot.assign(spoilt)
        return model, given

    return make


OPTIMIZER = (
    failure(
        "adam_without_epsilon",
        "optimizer",
        _zero_epsilon(lambda: keras.optimizers.Adam(1e-3, epsilon=0.0)),
        layers=["dense_0a"],
    ),
    failure(
        "rmsprop_without_epsilon",
        "optimizer",
        _zero_epsilon(lambda: keras.optimizers.RMSprop(1e-3, epsilon=0.0)),
        policy="mixed_bfloat16",
        layers=["dense_0a"],
    ),
    failure(
        "nan_in_slot",
        "optimizer",
        _spoilt_slot(lambda: keras.optimizers.Adam(1e-3), np.nan, "dense_1a"),
        layers=["dense_1a"],
    ),
    failure(
        "infinity_in_slot",
        "optimizer",
        _spoilt_slot(
            lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
            np.inf,
            "dense_2b",
            style="sequential",
            depth=15,
        ),
        layers=["dense_2b"],
    ),
)

LOSS_SCALE = (
    failure(
        "static_scale",
        "loss scale",
        _damaged(lambda x, y: (x, y)),
        policy="mixed_float16",
        loss_scale=2.0**24,
    ),
    failure(
        "initial_scale",
        "loss scale",
        _damaged(lambda x, y: (x, y), style="subclassed", depth=15),
        policy="mixed_float16",
        loss_scale_options={"initial_scale": 2.0**24},
    ),
    failure(
        "scale_of_large_loss",
        "loss scale",
        _damaged(lambda x, y: (x, 1e3 * y), style="sequential"),
        policy="mixed_float16",
        loss_scale=2.0**16,
    ),
    failure(
        "scale_of_sequence",
        "loss scale",
        _damaged(
            lambda x, y: (x, y), kind="sequence", shape=(6, WIDTH), style="nested"
        ),
        policy="mixed_float16",
        loss_scale=2.0**24,
    ),
)


def _settled(part: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    return lambda: [*part(), layers.LayerNormalization(name="settle")]


def _deviation(x: Any) -> Any:
    """A root of a variance that rounding makes negative or zero."""
    h = 300.0 + x
    mean = ops.mean(h, axis=-1, keepdims=True)
    variance = ops.mean(ops.square(h), axis=-1, keepdims=True) - ops.square(mean)
    return x / ops.sqrt(variance)


def _small_angle(x: Any) -> Any:
    """A quotient whose divisor rounds to zero."""
    return x * 1e-4 / (1.0 - ops.cos(0.02 + 0.0 * x))


PRECISION = (
    failure(
        "cube",
        "precision",
        _with_part(_settled(parts.cubic), depth=15, place=3),
        policy="mixed_float16",
        layers=["cube"],
    ),
    failure(
        "unscaled_attention",
        "precision",
        _with_part(
            _settled(lambda: parts.unscaled_attention(200.0)),
            kind="sequence",
            shape=(6, WIDTH),
            style="subclassed",
        ),
        policy="mixed_float16",
        layers=["attend"],
    ),
    failure(
        "soft",
        "precision",
        _with_part(_settled(parts.own_softplus), style="nested"),
        policy="mixed_float16",
        layers=["inner/soft"],
    ),
    failure(
        "mask_constant",
        "precision",
        _with_part(
            _settled(parts.mask_constant),
            kind="sequence",
            shape=(6, WIDTH),
            style="sequential",
        ),
        policy="mixed_float16",
        layers=["masked"],
    ),
    failure(
        "mask_constant_nodes",
        "precision",
        _with_part(_settled(parts.mask_constant_nodes)),
        policy="mixed_float16",
        layers=["far"],
    ),
    failure(
        "inverse",
        "precision",
        _with_part(_settled(parts.reciprocal), style="nested stage"),
        policy="mixed_float16",
        layers=["stage/inverse"],
    ),
    failure(
        "small_angle",
        "precision",
        _with_part(_raw("angle", _small_angle), style="sequential"),
        policy="mixed_bfloat16",
        layers=["angle"],
    ),
    failure(
        "deviation",
        "precision",
        _with_part(_raw("deviation", _deviation), depth=15, place=4),
        policy="mixed_bfloat16",
        layers=["deviation"],
    ),
)


def _healthy(policy: str, style: str, **options: Any) -> Any:
    return failure(
        f"healthy_{policy}_{style}",
        "none",
        _damaged(lambda x, y: (x, y), style=style, **options),
        policy=policy,
    )


NONE: Sequence[Any] = (
    _healthy("float32", "functional"),
    _healthy("mixed_bfloat16", "subclassed", depth=15),
    _healthy("mixed_float16", "sequential"),
    _healthy("float32", "nested", classes=4),
)
FAILURES = (
    *(*DATA, *MODEL, *LEARNING_RATE, *OPTIMIZER),
    *(*LOSS_SCALE, *PRECISION, *NONE),
)
