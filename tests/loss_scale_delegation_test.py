"""What a wrapped optimizer is asked for or told reaches the one inside."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.arrays import assert_close

layers = keras.layers
optimizers = keras.optimizers
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
ADDED = hasattr(optimizers, "MultiOptimizer")


def wrapped(inner, **options):
    options = {"initial_scale": 8.0, **options}
    return tfamp.LossScaleOptimizer(inner, **options)


def step(optimizer, variables, gradients):
    """Applies gradients as a scaled loss has them."""
    scale = optimizer.scale
    optimizer.apply([tf.constant(g, "float32") * scale for g in gradients], variables)


# Inner optimizer, attribute, another value for it.
ATTRIBUTES = {
    "momentum": (optimizers.SGD, "momentum", 0.25),
    "nesterov": (optimizers.SGD, "nesterov", True),
    "beta_1": (optimizers.Adam, "beta_1", 0.5),
    "epsilon": (optimizers.Adam, "epsilon", 0.125),
    "weight_decay": (optimizers.AdamW, "weight_decay", 0.25),
    "clipnorm": (optimizers.SGD, "clipnorm", 0.5),
    "clipvalue": (optimizers.SGD, "clipvalue", 0.5),
    "global_clipnorm": (optimizers.SGD, "global_clipnorm", 0.5),
    "use_ema": (optimizers.SGD, "use_ema", True),
    "ema_momentum": (optimizers.SGD, "ema_momentum", 0.5),
    "ema_overwrite_frequency": (optimizers.SGD, "ema_overwrite_frequency", 3),
    "learning_rate": (optimizers.SGD, "learning_rate", 0.5),
    "lr by another name": (optimizers.RMSprop, "rho", 0.5),
}


@pytest.mark.parametrize("cls, name, value", ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_attributes_are_those_of_the_inner_optimizer(cls, name, value):
    inner = cls(0.125)
    optimizer = wrapped(inner)
    assert getattr(optimizer, name) == getattr(inner, name) != value
    setattr(optimizer, name, value)
    assert getattr(inner, name) == getattr(optimizer, name) == value
    assert inner.get_config()[name] == value
    assert name not in optimizer.get_config()


@pytest.mark.parametrize("how", ["var_list", "var_names"])
def test_variables_are_excluded_from_weight_decay(how):
    kernel = keras.Variable([1.0], name="kernel")
    bias = keras.Variable([1.0], name="bias")
    optimizer = wrapped(optimizers.SGD(0.5, weight_decay=0.5))
    chosen = {"var_list": [bias], "var_names": ["bias"]}[how]
    optimizer.exclude_from_weight_decay(**{how: chosen})
    optimizer.build([kernel, bias])
    step(optimizer, [kernel, bias], [[0.0], [0.0]])
    # Decay takes 0.5 * 0.5 of a weight.
    assert [float(kernel[0]), float(bias[0])] == [0.75, 1.0]


@pytest.mark.parametrize("of_inner", [True, False], ids=["inner", "wrapper"])
@pytest.mark.parametrize("name", ["loss_scale_factor", "gradient_accumulation_steps"])
def test_what_the_wrapper_does_itself_cannot_be_set(name, of_inner):
    variable = keras.Variable([1.0])
    optimizer = wrapped(optimizers.SGD(1.0))
    step(optimizer, [variable], [[0.5]])
    setattr(optimizer.inner_optimizer if of_inner else optimizer, name, 4)
    with pytest.raises(ValueError, match=f"`{name}` of .* is 4; expected None"):
        step(optimizer, [variable], [[0.5]])
    assert variable.numpy() == 0.5


def test_accumulation_of_the_inner_optimizer_is_taken_over():
    inner = optimizers.SGD(1.0, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="they name the same"):
        wrapped(inner, accumulation_steps=3)
    optimizer = wrapped(inner)
    assert inner.gradient_accumulation_steps is None
    assert optimizer.get_config()["accumulation_steps"] == 2
    variable = keras.Variable([0.0])
    step(optimizer, [variable], [[1.0]])
    assert variable.numpy() == 0
    step(optimizer, [variable], [[3.0]])
    assert variable.numpy() == -2


X = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")
Y = X.sum(-1, keepdims=True)


def regression(optimizer):
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.set_weights([np.zeros((2, 1), "float32"), np.zeros(1, "float32")])
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def split_optimizer():
    """Returns one optimizer for the kernel and another for the rest."""
    chosen = optimizers.OptimizerMap(optimizers.SGD(0.0625, momentum=0.5))
    chosen[".*kernel"] = optimizers.Adam(0.0625, clipnorm=0.5)
    return optimizers.MultiOptimizer(chosen)


@pytest.mark.skipif(not ADDED, reason="this Keras has no MultiOptimizer")
def test_several_optimizers_inside_one():
    x = X.copy()
    x[2] = np.inf
    model = regression(wrapped(split_optimizer()))
    for first in range(0, 8, 2):
        model.train_on_batch(x[first : first + 2], Y[first : first + 2])
    expected = regression(split_optimizer())
    for first in (0, 4, 6):
        expected.train_on_batch(X[first : first + 2], Y[first : first + 2])
    assert (model.optimizer.applied_steps, model.optimizer.skipped_steps) == (3, 1)
    assert_close(model, expected, rtol=1e-5, atol=1e-6)
