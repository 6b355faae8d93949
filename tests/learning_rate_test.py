"""Rates for other batch sizes, warm-ups, and the range test."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import STYLES, assembled

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")

L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(256, 8)).astype(np.float32)
Y = (X @ RNG.normal(size=(8, 1))).astype(np.float32)
DATA = tf.data.Dataset.from_tensor_slices((X, Y)).batch(32)


def model_of(style="functional", optimizer="sgd", **options):
    model = assembled([L.Dense(16, activation="relu"), L.Dense(1)], style, (8,))
    model.compile(optimizer, "mse", **options)
    return model


def bits(model):
    found = [*model.variables, *model.optimizer.variables]
    return [np.asarray(variable).copy() for variable in found]


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_rules_scale_numbers_and_schedules(rule, factor):
    sizes = {"batch_size": 1024, "base_batch_size": 256, "rule": rule}
    number = tfamp.training.scale_learning_rate(0.1, **sizes)
    assert float(number(7)) == pytest.approx(0.1 * factor)
    cosine = keras.optimizers.schedules.CosineDecay(0.1, 100)
    scaled = tfamp.training.scale_learning_rate(cosine, **sizes)
    for step in (0, 30, 100):
        expected = float(cosine(step)) * factor
        assert float(scaled(step)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
def test_a_model_trains_with_it_and_a_file_keeps_it(tmp_path):
    decay = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.5)
    rate = tfamp.training.scale_learning_rate(
        decay, batch_size=64, base_batch_size=32, warmup_steps=4
    )
    with tfamp.scope("mixed_float16"):
        model = model_of("sequential", keras.optimizers.Adam(rate))
    model.fit(DATA, verbose=0)
    now = float(model.optimizer.learning_rate)
    assert now == pytest.approx(2 * float(decay(8)), rel=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = tfamp.load_model(tmp_path / "model.keras").optimizer
    kept = loaded.inner_optimizer._learning_rate.get_config()
    assert kept == rate.get_config()
    assert float(loaded.learning_rate) == pytest.approx(now)


COSINE = keras.optimizers.schedules.CosineDecay(0.01, 100)


# That it leaves no trace is in wild/tools_and_seeds_test.py.
@pytest.mark.quick("schedule-mixed_float16-sequential")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("rate", [0.01, COSINE], ids=["number", "schedule"])
def test_the_suggestion_trains_and_is_below_a_tenth_of_the_best_rate(
    rate, policy, style
):
    with tfamp.scope(policy):
        model = model_of(style, keras.optimizers.SGD(rate))
    found = tfamp.training.lr_find(model, DATA)
    assert found.why_it_ended in ("it diverged", "a loss is not finite")
    assert 1e-3 < found.suggestion <= found.highest < 1
    assert found.rates == tuple(sorted(found.rates))
    assert len(found.rates) == len(found.losses) == len(found.smoothed)
    lowest = found.rates[int(np.argmin(found.smoothed))]
    assert found.highest == pytest.approx(lowest / 10)
    assert f"{found.highest:.3g}, is about the highest" in found.why

    trained = model_of("sequential", keras.optimizers.SGD(found.suggestion))
    losses = trained.fit(DATA, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * found.losses[0]


def test_what_cannot_be_tried_is_told():
    model, find = model_of(), tfamp.training.lr_find
    with pytest.raises(ValueError, match="Exchange them"):
        find(model, DATA, min_rate=1.0, max_rate=0.1)
    with pytest.raises(ValueError, match="num_steps"):
        find(model, DATA, num_steps=3)
    with pytest.raises(ValueError, match="not compiled"):
        find(keras.Sequential([keras.Input((8,)), L.Dense(1)]), DATA)
    with pytest.raises(TypeError, match="expected what"):
        find(model, X)
    with pytest.raises(ValueError, match="first loss of .* is not finite"):
        find(model, DATA.map(lambda x, y: (x, y * np.nan)))
    assert np.isfinite(bits(model)[0]).all()
