"""From the fault to the cure: training fails, triage names why, recovery goes on.

Every fault strikes in every style of model, and `tfamp.triage` itself is asked.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import STYLES, Own, assembled
from tfamp.callbacks import NanRecovery

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
L = keras.layers
NUM_FEATURES, NUM_CLASSES, BATCH, STEPS, EPOCHS = 16, 4, 32, 25, 9
BAD_STEP = 30
RNG = np.random.default_rng(0)
TRUE = RNG.normal(size=(NUM_FEATURES, NUM_CLASSES))


def examples(num):
    x = RNG.normal(size=(num, NUM_FEATURES)).astype("float32")
    return x, (x @ TRUE).argmax(-1).astype("int32")


X, Y = examples(EPOCHS * STEPS * BATCH)
TEST = examples(4000)


def batches():
    """The batches of all epochs in a row."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


class Breaking(keras.callbacks.Callback):
    """Spoils something of the model once, after `BAD_STEP` steps."""

    def __init__(self, spoil):
        super().__init__()
        self.spoil, self.num_steps = spoil, 0

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        if self.num_steps == BAD_STEP:
            self.spoil(self.model)


def bad_slot(model):
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    slot = inner.variables[2]
    slot.assign(tf.fill(slot.shape, np.inf))


def far_mask(x):
    hidden = tf.cast(x < -1e4, x.dtype)
    return x + hidden * tf.cast(-1e9, x.dtype)


def there_and_back():
    return [L.Rescaling(1e6, name="huge"), L.Rescaling(1e-6, name="back")]


def adam(rate=0.01):
    return keras.optimizers.Adam(rate)


def too_high_a_scale():
    return tfamp.LossScaleOptimizer(
        adam(), initial_scale=2.0**30, dynamic=False, max_consecutive_skips=4
    )


# Fault -> policy, what is done, and the cause that is named.
F16 = "mixed_float16"
FAULTS = {
    "overflow": (F16, {"middle": there_and_back}, "precision"),
    "mask": (F16, {"middle": lambda: [Own(far_mask, name="mask")]}, "precision"),
    "loss scale": (F16, {"optimizer": too_high_a_scale}, "loss scale"),
    # Of this nothing is left in the snapshot from before.
    "a slot": ("float32", {"callback": bad_slot}, "none"),
}
REMEDIES = {
    "precision": "keep in float32",
    "loss scale": "move loss scale",
    "none": "drop batch",
}
LAYERS = {"overflow": ["huge", "back"], "mask": ["mask"]}


def made(style, policy, *, middle=list, optimizer=adam):
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy):
        layers = [
            L.Dense(32, activation="relu", name="first"),
            *middle(),
            L.Dense(NUM_CLASSES, name="head"),
        ]
        model = assembled(layers, style, (NUM_FEATURES,))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"])
    return model


def fit(model, data, *callbacks):
    settings = {"epochs": EPOCHS, "steps_per_epoch": STEPS, "verbose": 0}
    return model.fit(data, callbacks=list(callbacks), **settings)


def quality(model):
    return model.evaluate(*TEST, batch_size=500, verbose=0)[1]


@pytest.fixture(scope="module")
def undisturbed():
    """Accuracy of a run without a fault."""
    model = made("sequential", "float32")
    fit(model, batches())
    return quality(model)


# Each fault in one style; each style has one.
CASES = list(zip(FAULTS, itertools.cycle(STYLES)))


@pytest.mark.quick("overflow-*", "loss scale-*")
@pytest.mark.parametrize("fault, style", CASES)
def test_training_is_cured(fault, style, undisturbed, tmp_path):
    policy, what, cause = FAULTS[fault]
    what = dict(what)
    others = [Breaking(what.pop("callback"))] if "callback" in what else []
    model = made(style, policy, **what)
    recovery = NanRecovery(tmp_path / "good", every_seconds=0)
    run = fit(model, batches(), *others, recovery)
    assert [each.remedy for each in run.recoveries] == [REMEDIES[cause]]
    assert {each.cause for each in run.recoveries} == {cause}
    prefix = "inner/" if style == "nested" else ""
    kept = ", ".join(repr(prefix + name) for name in LAYERS.get(fault, ()))
    if kept:
        assert run.recoveries[0].detail == kept
    assert len(recovery.bundles) == 1
    assert np.isfinite(run.history["loss"]).all()
    assert quality(model) == pytest.approx(undisturbed, rel=0.01)


def test_a_fault_of_the_model_itself_ends_with_the_layer_and_the_way_out(tmp_path):
    def root():
        return [Own(tf.sqrt, name="root")]

    model = made("functional", "mixed_float16", middle=root)
    with pytest.raises(tfamp.callbacks.RecoveryError, match="'root': keep what it"):
        fit(model, batches(), NanRecovery(tmp_path, every_seconds=0))
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
