"""State of a loss-scale optimizer: ten steps are five, a save, a load and five more."""

import copy
import functools
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.arrays import assert_close
from tests.styles import stock_policy
from tfamp.loss_scale.state import COUNTERS, LEVELS

layers = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
rng = np.random.default_rng(0)
BATCHES = [
    (rng.normal(size=(4, 3)).astype("float32"), rng.integers(0, 2, 4)) for _ in range(8)
]
# The third batch overflows, so that there is something to count and to blame.
BATCHES[2][0][0, 0] = np.inf
HALF_WAY = 5

# Policy and options of the optimizer. Five steps, one of them skipped, leave a
# window of three half full.
CASES = {
    "float16 dynamic": ("mixed_float16", dict(dynamic_growth_steps=3)),
    "bfloat16 guard": ("mixed_bfloat16", dict(initial_scale=1, dynamic=False)),
    "float16 accumulation": (
        "mixed_float16",
        dict(initial_scale=256.0, dynamic_growth_steps=2, accumulation_steps=3),
    ),
    "float32 accumulation, hysteresis": (
        "float32",
        dict(initial_scale=8.0, hysteresis=2, accumulation_steps=3),
    ),
}


def model_of(policy, options, *, inner=None, run_eagerly=True):
    with tfamp.scope(policy):
        model = keras.Sequential(
            [
                keras.Input((3,)),
                layers.Dense(4, activation="relu"),
                layers.BatchNormalization(),
                layers.Dense(2, activation="softmax"),
            ]
        )
        # The same weights in every model.
        shapes = np.random.default_rng(1)
        model.set_weights([shapes.random(w.shape) for w in model.get_weights()])
        inner = inner or keras.optimizers.Adam(0.0625)
        optimizer = tfamp.LossScaleOptimizer(inner, **options)
        model.compile(
            optimizer, "sparse_categorical_crossentropy", run_eagerly=run_eagerly
        )
    return model


def train(model, batches):
    for x, y in batches:
        model.train_on_batch(x, y)


def facts_of(model):
    """Returns every number that training goes by."""
    optimizer = model.optimizer
    state = optimizer.scale_variables.numbers()._asdict()
    return {
        "weights": [w.tolist() for w in model.get_weights()],
        "variables": [v.numpy().tolist() for v in optimizer.variables],
        "scale": optimizer.scale,
        "counters": [state[name] for name in COUNTERS],
        "levels": [state[name] for name in LEVELS],
        "iterations": int(optimizer.iterations.numpy()),
        "static": [optimizer.dynamic, bool(optimizer.is_frozen)],
    }


def assert_same(found, expected):
    for name, value in expected.items():
        # NaN, the norm of a skipped step, is equal to itself here.
        np.testing.assert_equal(found[name], value, err_msg=name)


def into(fresh, model, path):
    """Returns a model with the weights and the optimizer's state of another."""
    model.save_weights(path / "model.weights.h5")
    fresh.load_weights(path / "model.weights.h5")
    return fresh


def half_trained(policy, options):
    model = model_of(policy, options)
    train(model, BATCHES[:HALF_WAY])
    return model


def by_keras_file(model, path, again):
    model.save(path / "model.keras")
    return tfamp.load_model(path / "model.keras")


def by_stock_loading(model, path, again):
    model.save(path / "model.keras")
    return keras.saving.load_model(path / "model.keras")


def by_weights(model, path, again):
    fresh = again()
    assert not fresh.optimizer.built
    return into(fresh, model, path)


def by_checkpoint(model, path, again):
    saved = tf.train.Checkpoint(optimizer=model.optimizer, model=model)
    prefix = saved.save(path / "checkpoint")
    fresh = again()
    fresh.optimizer.build(fresh.trainable_variables)
    status = tf.train.Checkpoint(optimizer=fresh.optimizer, model=fresh).restore(prefix)
    status.assert_existing_objects_matched()
    return fresh


def by_pickle(model, path, again):
    return pickle.loads(pickle.dumps(model))


WAYS = {
    f.__name__.removeprefix("by_"): f
    for f in (
        by_keras_file,
        by_stock_loading,
        by_weights,
        by_checkpoint,
        by_pickle,
    )
}


@functools.cache
def half_way_and_at_the_end(case):
    """Returns a model that is to go on, and the facts of one that trained straight."""
    straight = model_of(*CASES[case])
    train(straight, BATCHES)
    return half_trained(*CASES[case]), facts_of(straight)


@pytest.mark.quick(
    *("float16 dynamic-keras_file", "float16 dynamic-weights"),
    *("float16 dynamic-checkpoint", "float16 dynamic-pickle"),
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_bit_by_bit(case, way, tmp_path):
    half, expected = half_way_and_at_the_end(case)
    at_save = facts_of(half)
    if half.optimizer.accumulation_steps > 1:
        assert half.optimizer.scale_variables.numbers().microbatches == 1
    assert expected["variables"] != at_save["variables"]
    resumed = WAYS[way](half, tmp_path, lambda: model_of(*CASES[case]))
    train(resumed, BATCHES[HALF_WAY:])
    assert_same(facts_of(resumed), expected)
    assert type(resumed.optimizer) is tfamp.LossScaleOptimizer
    assert_same(facts_of(half), at_save)


def stock_model(policy, *, is_wrapped=True):
    """Returns a model trained by Keras alone, on finite batches."""
    with stock_policy(policy):
        head = layers.Dense(2, activation="softmax", dtype="float32")
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4), head])
    optimizer = keras.optimizers.Adam(0.0625)
    if is_wrapped:
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=1024.0, dynamic_growth_steps=4
        )
    model.compile(
        optimizer,
        "sparse_categorical_crossentropy",
        auto_scale_loss=False,
        run_eagerly=True,
    )
    return model


def stock_values(variables):
    return [v.numpy().tolist() for v in variables]


# Keras's own class is saved without slots when it is not trained.
@pytest.mark.quick("untrained")
@pytest.mark.filterwarnings("ignore:Skipping variable loading", "ignore:A total of")
@pytest.mark.parametrize("num_steps", [0, 5], ids=["untrained", "trained"])
def test_a_model_saved_by_stock_keras_loads(num_steps, tmp_path):
    model = stock_model("mixed_float16")
    train(model, BATCHES[3 : 3 + num_steps])
    model.save(tmp_path / "model.keras")
    loaded = tfamp.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.LossScaleOptimizer
    tfamp.apply(loaded, "mixed_float16", keep_float32="none")
    assert type(loaded.optimizer) is tfamp.LossScaleOptimizer
    ours = stock_values(loaded.optimizer.variables[: len(model.optimizer.variables)])
    if num_steps:
        assert ours == stock_values(model.optimizer.variables)
        assert loaded.optimizer.scale == 2048
    assert loaded.optimizer.dynamic_growth_steps == 4
    train(model, BATCHES[3:5])
    train(loaded, BATCHES[3:5])
    assert loaded.optimizer.iterations == num_steps + 2
    assert_close(loaded, model, rtol=1e-3, atol=1e-4)


OTHER = {
    "initial_scale": 128.0,
    "dynamic_growth_steps": 7,
    "name": "mine",
    "dynamic": False,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "hysteresis": 3,
    "min_scale": 0.5,
    "max_scale": 2.0**20,
    "accumulation_steps": 5,
    "max_consecutive_skips": None,
    "reduce_dtype": "bfloat16",
}


@pytest.mark.parametrize("how", ["from_config", "deserialize", "get"])
@pytest.mark.parametrize("name", ["all", "none"])
def test_every_setting_survives_its_configuration(name, how):
    options = OTHER if name == "all" else {}
    optimizer = tfamp.LossScaleOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.25, nesterov=True), **options
    )
    config = optimizer.get_config()
    common = {"name", "inner_optimizer", "initial_scale", "dynamic_growth_steps"}
    assert set(config) == common | set(options)
    before = copy.deepcopy(config)
    whole = keras.saving.serialize_keras_object(optimizer)
    again = {
        "from_config": lambda: tfamp.LossScaleOptimizer.from_config(config),
        "deserialize": lambda: keras.saving.deserialize_keras_object(whole),
        "get": lambda: keras.optimizers.get(whole),
    }[how]()
    assert config == before
    assert type(again) is tfamp.LossScaleOptimizer
    assert again.get_config() == config
    assert again.inner_optimizer.get_config() == optimizer.inner_optimizer.get_config()
    for field, value in options.items():
        assert getattr(again, field) == value
    assert again.rule == optimizer.rule
    assert again.is_frozen == optimizer.is_frozen
    assert again.scale == optimizer.scale


STATIC, MOVING = dict(initial_scale=4.0, dynamic=False), dict(initial_scale=256.0)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["moving", "frozen"])
@pytest.mark.parametrize(
    "saved, loads, scale",
    [(MOVING, STATIC, 4), (STATIC, MOVING, 256), (MOVING, MOVING, 128)],
    ids=["dynamic into static", "static into dynamic", "dynamic"],
)
def test_a_scale_goes_to_its_own_kind(saved, loads, scale, is_frozen, tmp_path):
    model = model_of("float32", saved)
    if is_frozen:
        model.optimizer.freeze(8.0)
    train(model, BATCHES[:4])  # one of them overflows
    again = into(model_of("float32", loads), model, tmp_path)
    optimizer = again.optimizer
    optimizer.build(again.trainable_variables)
    expected = 8 if is_frozen and saved is loads else scale
    assert optimizer.applied_steps == 3
    assert optimizer.skipped_steps == 1
    if saved is not STATIC or not is_frozen:
        assert optimizer.scale == expected
        assert bool(optimizer.is_frozen) == (loads is STATIC or expected == 8)


def test_weights_that_do_not_fit_are_an_error():
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(momentum=0.5))
    with pytest.raises(ValueError, match="of a built optimizer"):
        optimizer.set_weights([])
    optimizer.build([keras.Variable(np.zeros((2, 3)))])
    arrays = [v.numpy() for v in optimizer.variables]
    with pytest.raises(ValueError, match="`weights` has 3 arrays for"):
        optimizer.set_weights(arrays[:3])


def test_an_optimizer_holds_none_of_the_weights_that_it_trains():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam())
    optimizer.build(model.trainable_variables)
    held = {id(variable) for variable in optimizer.variables}
    assert held.isdisjoint(id(weight) for weight in model.weights)
    assert held >= {id(variable) for variable in optimizer.inner_optimizer.variables}
