"""Cells that are run again, out of order, and after an error, as in notebooks."""

import keras
import numpy as np
import pytest

import tfamp

layers = keras.layers
x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
y = x[:, :1]
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


@pytest.fixture(autouse=True)
def switched_off_afterwards():
    yield
    tfamp.disable()


def enable(policy="mixed_float16", **options):
    return tfamp.enable(policy, **options)


def build():
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, "relu"), layers.Softmax(), layers.Dense(1)]
    )


def compiled(model):
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    return model


def fit(model):
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    return history["loss"][0]


def dtypes(model):
    return [layer.compute_dtype for layer in model.layers]


@pytest.mark.slow
def test_every_cell_three_times():
    losses, seen = [], []
    for _ in range(3):
        enable()
        enable()
        model = compiled(build())
        compiled(model)
        losses.append(fit(model))
        seen.append(dtypes(model))
    assert losses == [losses[0]] * 3
    assert seen == [["float16", "float32", "float32"]] * 3


def test_one_disable_ends_what_many_cells_enabled():
    init = keras.layers.Layer.__init__
    for _ in range(3):
        enable()
    tfamp.disable()
    assert keras.layers.Layer.__init__ is init
    assert keras.config.dtype_policy().name == "float32"
    assert dtypes(build()) == ["float32"] * 3


def test_a_model_of_an_earlier_cell_goes_on_under_another_policy():
    enable()
    first = compiled(build())
    before = fit(first)
    enable("mixed_bfloat16")
    second = compiled(build())
    fit(second)
    assert dtypes(first) == ["float16", "float32", "float32"]
    assert dtypes(second) == ["bfloat16", "float32", "float32"]
    assert isinstance(first.optimizer, tfamp.LossScaleOptimizer)
    assert fit(first) < before


@pytest.mark.slow
def test_the_session_is_cleared_between_cells():
    enable()
    fit(compiled(build()))
    keras.backend.clear_session()
    model = compiled(build())
    assert dtypes(model) == ["float16", "float32", "float32"]
    assert np.isfinite(fit(model))


def test_the_model_comes_before_the_line():
    model = build()
    enable()
    with pytest.warns(UserWarning, match=r"was built before `tfamp\.enable`"):
        compiled(model)
    assert dtypes(model) == ["float32"] * 3
    tfamp.apply(model, "mixed_float16")
    assert dtypes(compiled(model)) == ["float16", "float32", "float32"]


def test_a_cell_that_fails_is_run_again():
    enable()
    model = compiled(build())
    with pytest.raises(ValueError):
        model.fit(np.ones((8, 3)), y[:8], verbose=0)
    assert np.isfinite(fit(compiled(model)))


@pytest.mark.slow
def test_a_cell_is_interrupted_in_training_and_run_again():
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    enable()
    model = compiled(build())
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[Interrupt()])
    plain = compiled(build())
    assert np.isfinite(fit(model))
    assert fit(plain) == pytest.approx(fit(compiled(build())))


@pytest.mark.slow
def test_keeping_a_layer_is_tried_out_cell_by_cell():
    for keep, expected in [
        ("default", ["float16", "float32", "float32"]),
        ([layers.Dense], ["float32", "float32", "float32"]),
        ("none", ["float16", "float16", "float16"]),
        ("default", ["float16", "float32", "float32"]),
    ]:
        enable(keep_float32=keep)
        assert dtypes(compiled(build())) == expected
