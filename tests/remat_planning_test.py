"""`tfamp.remat` with a target: as little is computed again as the memory needs."""

import keras
import numpy as np
import pytest

import tfamp
from tests.refusals import refusals
from tfamp.memory.segments import Savings, peak_bytes, ranked

BATCH = 2048


def deep(num_layers=8, **options):
    layers = [keras.layers.Dense(128, activation="gelu") for _ in range(num_layers)]
    model = keras.Sequential([keras.Input((128,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


def peak(model):
    return peak_bytes(model, BATCH, None)


def test_a_step_that_fits_computes_nothing_again():
    model = deep()
    before = peak(model)
    assert tfamp.remat(model, max_memory_bytes=before, batch_size=BATCH) is model
    assert peak(model) == before


def test_the_target_is_met_and_less_than_all_is_computed_again():
    model, whole = deep(16), deep(16)
    before = peak(model)
    tfamp.remat(model, max_memory_bytes=int(0.85 * before), batch_size=BATCH)
    tfamp.remat(whole)
    assert peak(whole) < peak(model) <= 0.85 * before


@pytest.mark.anchors("graph")
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "XLA"])
def test_losses_are_those_of_the_plain_model(jit_compile):
    x = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    losses = []
    for is_again in (False, True):
        keras.utils.set_random_seed(0)
        model = deep(jit_compile=jit_compile)
        if is_again:
            target = int(0.7 * peak(model))
            tfamp.remat(model, max_memory_bytes=target, batch_size=BATCH)
        losses.append(model.fit(x, x[:, :1], epochs=3, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_a_target_that_cannot_be_met_changes_nothing():
    model = deep()
    before = peak(model)
    text = "pieces computed again"
    with pytest.raises(ValueError, match=text):
        tfamp.remat(model, max_memory_bytes=2**20, batch_size=BATCH)
    assert peak(model) == before


class Blocks(keras.Model):
    """A subclassed model whose blocks are the pieces."""

    def __init__(self):
        super().__init__()
        self.blocks = [
            keras.Sequential(
                [keras.layers.Dense(256, activation="gelu"), keras.layers.Dense(64)]
            )
            for _ in range(4)
        ]

    def call(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_blocks_of_a_subclassed_model_are_pieces():
    model = Blocks()
    model(np.ones((2, 64), np.float32))
    model.compile("sgd", "mse")
    before = peak(model)
    tfamp.remat(model, max_memory_bytes=int(0.8 * before), batch_size=BATCH)
    assert peak(model) <= 0.8 * before


def test_layers_that_are_named_are_the_pieces():
    model = deep()
    before = peak(model)
    tfamp.remat(
        model,
        only=keras.layers.Dense,
        max_memory_bytes=int(0.9 * before),
        batch_size=BATCH,
    )
    assert peak(model) <= 0.9 * before


def test_pieces_that_save_most_for_their_time_come_first():
    model = deep(3)
    names = [layer.name for layer in model.layers]
    kept = dict(zip(names, (100, 400, 300, 0), strict=True))
    cost = dict(zip(names, (1.0, 8.0, 2.0, 1.0), strict=True))
    # 100, 50 and 150 for a unit of time; the last keeps nothing.
    savings = Savings(0, kept, cost)
    assert ranked([savings.of(model, [each]) for each in model.layers]) == [2, 0, 1]


ERRORS = {
    "no size": ({"max_memory_bytes": 2**30}, "expected both"),
    "no target": ({"batch_size": 32}, "expected both"),
    "negative": ({"max_memory_bytes": -1, "batch_size": 8}, "`max_memory_bytes` is -1"),
    "switched off": (
        {"max_memory_bytes": 2**30, "batch_size": 8, "enabled": False},
        "came without a compiled model, or with `enabled=False`",
    ),
}


test_wrong_targets_are_refused = refusals(
    ERRORS, lambda arguments: tfamp.remat(deep(), **arguments)
)


def test_layers_have_no_target():
    with pytest.raises(ValueError, match="came without a compiled model"):
        tfamp.remat(deep().layers, max_memory_bytes=2**30, batch_size=8)
