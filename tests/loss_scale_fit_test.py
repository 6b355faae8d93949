"""`fit` with a loss scale: what a skipped step leaves behind, and how training ends."""

import functools
import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import COMPILED, OwnStep
from tests.replicas import two_replicas
from tests.styles import STYLES, Subclassed, assembled

layers = keras.layers
OURS = tfamp.LossScaleOptimizer
SGD = keras.optimizers.SGD
rng = np.random.default_rng(0)
X = rng.normal(size=(32, 4)).astype("float32")
Y = (X @ [1.0, -2.0, 0.5, 0.0]).astype("float32")[:, None]
BAD = np.full_like(X, np.nan)

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")

MODES = {**COMPILED, "bulk": {"steps_per_execution": 2, "jit_compile": False}}


def parts():
    return [
        layers.Dense(4, activation="tanh"),
        layers.BatchNormalization(momentum=0.5),
        layers.Dense(1),
    ]


class ToldOfTraining(Subclassed):
    """Without the argument Keras would leave the moving statistics alone."""

    def call(self, x, training=None):
        return super().call(x)


class Own(ToldOfTraining):
    scaled, train_step = OwnStep.scaled, OwnStep.train_step


def in_style(style):
    return assembled(parts(), style, (4,))


MODELS = {style: functools.partial(in_style, style) for style in STYLES}
MODELS["subclassed"] = lambda: ToldOfTraining(parts())
MODELS["own step"] = lambda: Own(parts())
functional = MODELS["functional"]


def linear():
    """A layer in half precision, and a head."""
    return keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(1)])


def compiled(build, inner=None, *, mode=MODES["graph"], **options):
    keras.utils.set_random_seed(0)
    model = build()
    optimizer = OURS(inner or keras.optimizers.Adam(0.05), **options)
    model.compile(optimizer, "mse", **mode)
    return model


def state(model):
    """Returns the bytes of the weights and of the inner optimizer's variables."""
    kept = [*model.weights, *model.optimizer.inner_optimizer.variables]
    return [np.asarray(v.value).tobytes() for v in kept]


def fit(model, x, **options):
    settings = {"batch_size": 8, "verbose": 0, "shuffle": False, **options}
    history = model.fit(x, Y[: len(x)], **settings).history
    return history.get("own_loss", history.get("loss"))


@pytest.mark.quick("functional-graph")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_bad_batches_change_no_bit_of_the_model(build, mode):
    model = compiled(build, mode=mode)
    fit(model, X)
    before = state(model)
    fit(model, BAD)
    assert state(model) == before
    assert model.optimizer.skipped_steps == 4
    assert np.isfinite(fit(model, X)).all()
    assert state(model) != before


@pytest.mark.quick("functional")
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_the_very_first_batch_may_be_bad(build):
    model = compiled(build)
    fit(model, BAD[:8])
    fit(model, X, epochs=2)
    moving = np.concatenate([w.numpy() for w in model.non_trainable_weights])
    assert np.isfinite(moving).all()


STOPPED = "Skipped 3 updates in a row, because their gradients were not finite"


@pytest.mark.quick("functional-graph")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(
    "build", [functional, MODELS["own step"]], ids=["functional", "own step"]
)
def test_fit_ends_after_too_many_skips_and_the_next_one_begins_clean(build, mode):
    model = compiled(build, mode=mode, initial_scale=8.0, max_consecutive_skips=3)
    fit(model, X)
    before = state(model)
    for _ in range(2):
        with pytest.raises(tfamp.LossScaleError, match=re.escape(STOPPED)) as caught:
            fit(model, BAD, epochs=2)
        assert "loss scale 8" in str(caught.value)
        assert "keep the overflowing layer in float32" in str(caught.value)
        assert state(model) == before
        assert model.optimizer.scale == 8
    losses = fit(model, X, epochs=15)
    assert losses[-1] < losses[0] / 2


def test_under_xla_train_on_batch_ends_a_few_steps_late():
    model = compiled(linear, SGD(0.1), mode=MODES["xla"], max_consecutive_skips=3)
    with pytest.raises(tfamp.LossScaleError, match=re.escape(STOPPED)):
        for _ in range(20):
            model.train_on_batch(BAD, Y)
    assert model.optimizer.skipped_steps == 16


def one_layer_in_float16():
    x = keras.Input((4,))
    h = layers.Dense(4, use_bias=False, dtype="mixed_float16")(x)
    return keras.Model(x, layers.Dense(1)(h))


def test_compile_wraps_with_our_class_wherever_a_layer_is_float16():
    with tfamp.scope("float32"):
        model = one_layer_in_float16()
        model.compile("adam", "mse")
    assert type(model.optimizer) is OURS
    with tfamp.scope("mixed_float16", keep_float32=["Dense", "BatchNormalization"]):
        model = functional()
        model.compile("adam", "mse")
    assert type(model.optimizer) is keras.optimizers.Adam


def test_all_options_reach_the_optimizer_and_wrong_ones_are_told_at_once():
    options = {
        "hysteresis": 2,
        "min_scale": 2.0,
        "max_scale": 2.0**20,
        "accumulation_steps": 3,
        "max_consecutive_skips": None,
        "initial_scale": 64.0,
    }
    with tfamp.scope("mixed_float16", loss_scale_options=options):
        model = functional()
        model.compile("adam", "mse")
    config = model.optimizer.get_config()
    assert {k: config[k] for k in options} == options
    with pytest.raises(ValueError, match="`hysteresis` is 0"):
        tfamp.enable("mixed_float16", loss_scale_options={"hysteresis": 0})
    with tfamp.scope(
        "mixed_float16", loss_scale=8.0, loss_scale_options={"accumulation_steps": 2}
    ):
        model = functional()
        model.compile("adam", "mse")
    assert (model.optimizer.accumulation_steps, model.optimizer.scale) == (2, 8)


def test_a_loss_scale_factor_becomes_a_static_scale():
    with tfamp.scope("mixed_float16"):
        model = functional()
        model.compile(keras.optimizers.Adam(loss_scale_factor=32.0), "mse")
    assert (model.optimizer.scale, model.optimizer.dynamic) == (32, False)


# --- epochs of which no step is applied, as callbacks that compare epochs see them ---

WAYS = {**MODES, "two replicas": {}}


def small_model(way="graph"):
    strategy = two_replicas() if way == "two replicas" else tf.distribute.get_strategy()
    with tfamp.scope("mixed_float16"), strategy.scope():
        model = linear()
        model.compile(SGD(0.1), "mse", metrics=["mae"], **WAYS[way])
    return model


@pytest.mark.quick("graph")
@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_without_an_applied_step_reports_nan(way):
    model = small_model(way)
    history = model.fit(BAD, Y, batch_size=8, epochs=2, verbose=0).history
    assert np.isnan(history["loss"]).all() and np.isnan(history["mae"]).all()
    good = model.fit(X, Y, batch_size=8, epochs=1, verbose=0).history
    assert np.isfinite(good["loss"]).all() and good["loss"][0] > 0


class Tracked(keras.Model):
    """Has a step and a metric of its own, as the examples of keras.io."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


@pytest.mark.parametrize("eager", [False, True])
def test_one_skipped_step_of_an_own_one_leaves_the_epoch_its_loss(eager, caplog):
    inputs = keras.Input(X.shape[1:])
    with tfamp.scope("mixed_float16"):
        hidden = keras.layers.Dense(4)(inputs)
        model = Tracked(inputs, keras.layers.Dense(Y.shape[-1])(hidden))
    model.compile(SGD(0.01), run_eagerly=eager)
    x, y = np.concatenate([X, BAD[:8]]), np.concatenate([Y, Y[:8]])
    history = model.fit(x, y, 8, 2, shuffle=False, verbose=0).history
    assert model.optimizer.applied_steps and model.optimizer.consecutive_skips == 1
    assert np.isfinite(history["loss"]).all()
    assert "No step of this epoch" not in caplog.text


@pytest.mark.slow
def test_callbacks_take_no_such_epoch_for_the_best_and_it_is_said_once(
    tmp_path, caplog
):
    x, y = np.concatenate([X, BAD, X, BAD]), np.concatenate([Y, Y, Y, Y])
    stop = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    best = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.keras", monitor="loss", save_best_only=True
    )
    with caplog.at_level(logging.WARNING, "absl"):
        history = (
            small_model()
            .fit(
                tf.data.Dataset.from_tensor_slices((x, y)).batch(8),
                steps_per_epoch=4,
                epochs=4,
                verbose=0,
                callbacks=[stop, best],
            )
            .history["loss"]
        )
    assert np.isnan(history).tolist() == [False, True, False, True]
    assert best.best == stop.best == min(history[0], history[2]) > 0
    told = [r.getMessage() for r in caplog.records if "No step of" in r.getMessage()]
    assert len(told) == 1 and "tfamp.triage" in told[0]
