"""State of a loss-scale optimizer: ten steps are five, a save, a load and five more."""

import copy
import functools
import inspect
import pickle
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.arrays import assert_close
from tests.replicas import check_replicas_agree, two_replicas
from tests.styles import stock_policy
from tfamp.loss_scale.counters import COUNTERS, LEVELS

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
    "float32 guard": ("float32", dict(initial_scale=1, dynamic=False)),
    "float16 dynamic": ("mixed_float16", dict(dynamic_growth_steps=3)),
    "float16 static": ("mixed_float16", dict(initial_scale=64.0, dynamic=False)),
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
    history = optimizer.history()
    state = optimizer.scale_variables.numbers()._asdict()
    return {
        "weights": [w.tolist() for w in model.get_weights()],
        "variables": [v.numpy().tolist() for v in optimizer.variables],
        "scale": optimizer.scale,
        "counters": [state[name] for name in COUNTERS],
        "levels": [state[name] for name in LEVELS],
        "iterations": int(optimizer.iterations.numpy()),
        "history": {name: values.tolist() for name, values in history.items()},
        "blame": list(optimizer.nonfinite_counts.values()),
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


def by_weights_into_a_built_one(model, path, again):
    fresh = again()
    train(fresh, BATCHES[:1])
    return into(fresh, model, path)


def by_checkpoint(model, path, again):
    saved = tf.train.Checkpoint(optimizer=model.optimizer, model=model)
    prefix = saved.save(path / "checkpoint")
    fresh = again()
    fresh.optimizer.build(fresh.trainable_variables)
    status = tf.train.Checkpoint(optimizer=fresh.optimizer, model=fresh).restore(prefix)
    status.assert_existing_objects_matched()
    return fresh


def by_checkpoint_before_build(model, path, again):
    saved = tf.train.Checkpoint(optimizer=model.optimizer, model=model)
    prefix = saved.save(path / "checkpoint")
    fresh = again()
    tf.train.Checkpoint(optimizer=fresh.optimizer, model=fresh).restore(prefix)
    return fresh


def by_pickle(model, path, again):
    return pickle.loads(pickle.dumps(model))


def by_deepcopy(model, path, again):
    return copy.deepcopy(model)


def by_set_weights(model, path, again):
    fresh = again()
    fresh.set_weights(model.get_weights())
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.optimizer.set_weights([v.numpy() for v in model.optimizer.variables])
    return fresh


WAYS = {
    f.__name__.removeprefix("by_"): f
    for f in (
        by_keras_file,
        by_stock_loading,
        by_weights,
        by_weights_into_a_built_one,
        by_checkpoint,
        by_checkpoint_before_build,
        by_pickle,
        by_deepcopy,
        by_set_weights,
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


@pytest.mark.quick("by_checkpoint")
@pytest.mark.parametrize("way", [by_weights, by_checkpoint], ids=lambda f: f.__name__)
def test_a_loaded_window_can_be_flushed_at_once(way, tmp_path):
    case = CASES["float32 accumulation, hysteresis"]
    half = half_trained(*case)
    resumed = way(half, tmp_path, lambda: model_of(*case))
    resumed.build((None, 3))
    resumed.optimizer.build(resumed.trainable_variables)
    for model in (half, resumed):
        model.optimizer.flush()
    assert int(half.optimizer.iterations) == 2
    assert_same(facts_of(resumed), facts_of(half))


def test_a_window_that_cannot_be_gone_on_with_begins_anew(tmp_path):
    policy, options = CASES["float32 accumulation, hysteresis"]
    half = half_trained(policy, options)
    plain = into(model_of(policy, {**options, "accumulation_steps": 1}), half, tmp_path)
    train(plain, BATCHES[5:6])
    assert int(plain.optimizer.iterations) == 2  # one window, one step
    again = into(model_of(policy, options), plain, tmp_path)
    train(again, BATCHES[6:8])
    assert int(again.optimizer.iterations) == 2, "a window of three has two"
    train(again, BATCHES[5:6])
    assert int(again.optimizer.iterations) == 3


class Crash(keras.callbacks.Callback):
    """Raises as a machine that goes away does, in the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == (1, 4):
            raise KeyboardInterrupt


@pytest.mark.quick("float16 dynamic")
@pytest.mark.parametrize(
    "case", ["float16 dynamic", "float16 accumulation", "float32 guard"]
)
def test_backup_and_restore_after_a_crash(case, tmp_path):
    x, y = (np.concatenate(parts) for parts in zip(*BATCHES[:HALF_WAY], strict=True))

    def fit(*callbacks):
        model = model_of(*CASES[case], inner=keras.optimizers.SGD(0.5, momentum=0.5))
        callbacks = [keras.callbacks.BackupAndRestore(tmp_path / "backup"), *callbacks]
        options = dict(batch_size=4, epochs=2, shuffle=False, verbose=0)
        try:
            model.fit(x, y, callbacks=callbacks, **options)
        except KeyboardInterrupt:
            assert type(callbacks[-1]) is Crash
        return facts_of(model)

    straight = fit()
    assert fit(Crash()) != straight
    assert_same(fit(), straight)


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


def from_stock(inner, scale, path, *, is_wrapped=True, is_built=False):
    """Returns a trained model of stock Keras, and one with its saved weights."""
    stock = stock_model("float32", is_wrapped=is_wrapped)
    train(stock, BATCHES[3:5])
    ours = stock_model("float32", is_wrapped=False)
    optimizer = tfamp.LossScaleOptimizer(inner, scale)
    ours.compile(optimizer, "sparse_categorical_crossentropy", run_eagerly=True)
    if is_built:
        train(ours, BATCHES[3:4])
    return stock, into(ours, stock, path)


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


@pytest.mark.quick("wrapped-unbuilt")
@pytest.mark.parametrize("is_built", [False, True], ids=["unbuilt", "built"])
@pytest.mark.parametrize("is_wrapped", [True, False], ids=["wrapped", "bare"])
def test_weights_saved_by_stock_keras_load(is_wrapped, is_built, tmp_path):
    how = {"is_wrapped": is_wrapped, "is_built": is_built}
    stock, ours = from_stock(keras.optimizers.Adam(0.5), 16.0, tmp_path, **how)
    optimizer = ours.optimizer
    optimizer.build(ours.trainable_variables)
    found = stock_values(optimizer.variables)
    found = found[: 4 + len(optimizer.inner_optimizer.variables)]
    if not is_wrapped:
        found = found[4:]
    assert found == stock_values(stock.optimizer.variables)
    assert optimizer.scale == (1024 if is_wrapped else 16)


def test_slots_of_another_optimizer_are_left_out_with_a_warning(tmp_path):
    message = re.escape("14 variables that do not fit the 6 of 'loss_scale_optimizer")
    with pytest.warns(UserWarning, match=message):
        _, ours = from_stock(keras.optimizers.SGD(0.5), 16.0, tmp_path)
        ours.optimizer.build(ours.trainable_variables)
    optimizer = ours.optimizer
    assert optimizer.scale == 1024
    assert float(optimizer.learning_rate) == 0.5


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


@pytest.mark.quick(
    "growth_factor-get",
    "hysteresis-from_config",
    "min_scale-deserialize",
    "accumulation_steps-deserialize",
    "reduce_dtype-from_config",
)
@pytest.mark.parametrize("how", ["from_config", "deserialize", "get"])
@pytest.mark.parametrize("name", [*OTHER, "all", "none"])
def test_every_setting_survives_its_configuration(name, how):
    options = {"all": OTHER, "none": {}}.get(name, {name: OTHER.get(name)})
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
        holder = again if hasattr(again, field) else again.rule
        assert getattr(holder, field) == value
    assert again.rule == optimizer.rule
    assert again.is_frozen == optimizer.is_frozen
    assert again.scale == optimizer.scale


def test_settings_of_the_round_trip_are_all_of_the_constructor():
    parameters = set(inspect.signature(tfamp.LossScaleOptimizer).parameters)
    # A second name, which files do not have.
    beside = {"inner_optimizer", "kwargs", "gradient_accumulation_steps"}
    assert parameters == {*OTHER, *beside}


STATIC, MOVING = dict(initial_scale=4.0, dynamic=False), dict(initial_scale=256.0)


def freeze(optimizer):
    optimizer.freeze()


def freeze_at_8(optimizer):
    optimizer.freeze(8.0)


def unfreeze(optimizer):
    optimizer.unfreeze()


def leave(optimizer):
    """Does nothing."""


# What was saved, what was done to it, what loads it: the scale then, and whether
# it stays. One of the four steps overflows.
KINDS = {
    "dynamic into static": (MOVING, leave, STATIC, 4, True),
    "frozen into static": (MOVING, freeze_at_8, STATIC, 8, True),
    "static into dynamic": (STATIC, leave, MOVING, 256, False),
    "static into another static": (
        STATIC,
        leave,
        {**STATIC, "initial_scale": 2},
        2,
        True,
    ),
    "static set by hand": (STATIC, freeze_at_8, STATIC, 8, True),
    "static released": (STATIC, unfreeze, STATIC, 4, True),
    "dynamic frozen": (MOVING, freeze, MOVING, 256, True),
    "dynamic frozen at 8": (MOVING, freeze_at_8, MOVING, 8, True),
    "dynamic": (MOVING, leave, MOVING, 128, False),
}


@pytest.mark.quick("dynamic-unbuilt", "dynamic into static-built")
@pytest.mark.parametrize("is_built", [False, True], ids=["unbuilt", "built"])
@pytest.mark.parametrize("saved, do, loads, scale, stays", KINDS.values(), ids=KINDS)
def test_a_scale_goes_to_its_own_kind(
    saved, do, loads, scale, stays, is_built, tmp_path
):
    model = model_of("float32", saved)
    do(model.optimizer)
    train(model, BATCHES[:4])
    again = model_of("float32", loads)
    if is_built:
        again.optimizer.build(again.trainable_variables)
    into(again, model, tmp_path)
    again.optimizer.build(again.trainable_variables)
    optimizer = again.optimizer
    assert (optimizer.scale, bool(optimizer.is_frozen)) == (scale, stays)
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (3, 1)
    x, y = BATCHES[2]  # overflows
    again.train_on_batch(x, y)
    assert optimizer.scale == (scale if stays else scale / 2)


def test_weights_that_do_not_fit_are_an_error():
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(momentum=0.5))
    message = re.escape("`set_weights` came before the optimizer was built; expected")
    with pytest.raises(ValueError, match=message):
        optimizer.set_weights([])
    optimizer.build([keras.Variable(np.zeros((2, 3)))])
    arrays = [v.numpy() for v in optimizer.variables]
    message = re.escape(f"`weights` has 3 arrays for {len(arrays)} variables; expected")
    with pytest.raises(ValueError, match=message):
        optimizer.set_weights(arrays[:3])
    slot = [a.shape for a in arrays].index((2, 3))
    arrays[slot] = np.zeros((3, 2))
    message = r"an array of shape \(3, 2\) for variable '.*'; expected \(2, 3\)\."
    with pytest.raises(ValueError, match=message):
        optimizer.set_weights(arrays)
    arrays[slot] = np.ones((2, 3))
    optimizer.set_weights(arrays)
    assert optimizer.inner_optimizer.variables[-1].numpy().tolist() == [[1.0] * 3] * 2


@pytest.mark.slow
def test_a_file_reaches_every_replica(tmp_path):
    policy, options = CASES["float32 accumulation, hysteresis"]
    strategy = two_replicas()
    with strategy.scope():
        model = model_of(policy, options)
    x, y = BATCHES[0]
    model.fit(x, y, batch_size=2, verbose=0)
    model.optimizer.freeze(32.0)
    with strategy.scope():
        again = model_of(policy, options)
    into(again, model, tmp_path)
    with strategy.scope():
        again.optimizer.build(again.trainable_variables)
        assert again.optimizer.scale == 32
    assert_same(facts_of(again), facts_of(model))
    check_replicas_agree(strategy, again.optimizer.variables)


def test_loading_into_an_optimizer_that_is_not_built_warns_of_nothing(tmp_path):
    model = model_of("float32", {})
    train(model, BATCHES[:2])
    model.save_weights(tmp_path / "model.weights.h5")
    fresh = model_of("float32", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh.load_weights(tmp_path / "model.weights.h5")
    assert not fresh.optimizer.built
    assert fresh.optimizer.applied_steps == 2
    x, y = BATCHES[0]
    fresh.fit(x, y, batch_size=4, verbose=0)
    assert int(fresh.optimizer.iterations) == 3


@pytest.mark.slow
@pytest.mark.parametrize("case", ["float32 guard", "float32 accumulation, hysteresis"])
def test_state_that_waits_for_a_traced_step_is_set_once(case, tmp_path):
    policy, options = CASES[case]
    half = half_trained(policy, options)
    fresh = into(model_of(policy, options), half, tmp_path)
    measure = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = fresh.optimizer.scale_loss(measure(y, fresh(x, training=True)))
        variables = fresh.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        fresh.optimizer.apply(gradients, variables)

    for x, y in BATCHES[HALF_WAY:]:
        step(x, y)
    train(half, BATCHES[HALF_WAY:])
    assert facts_of(fresh)["counters"] == facts_of(half)["counters"]
    assert_close(fresh, half, rtol=1e-5, atol=1e-6)


def test_a_loaded_window_keeps_gradients_that_do_not_come_again():
    weights = {}
    for name in ("straight", "resumed"):
        first, second = keras.Variable([0.0]), keras.Variable([0.0])
        optimizer = tfamp.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), 1.0, accumulation_steps=2
        )
        optimizer.apply([tf.constant([4.0]), None], [first, second])
        if name == "resumed":
            arrays = [v.numpy() for v in optimizer.variables]
            optimizer = tfamp.LossScaleOptimizer(
                keras.optimizers.SGD(1.0), 1.0, accumulation_steps=2
            )
            optimizer.build([first, second])
            optimizer.set_weights(arrays)
        optimizer.apply([None, tf.constant([2.0])], [first, second])
        weights[name] = [first.numpy()[0], second.numpy()[0]]
    # Half of each gradient: a window of two microbatches.
    assert weights == {"straight": [-2.0, -1.0], "resumed": [-2.0, -1.0]}
