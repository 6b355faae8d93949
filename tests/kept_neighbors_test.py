"""What one layer in float32 hands to another one is not rounded in between."""

import keras
import numpy as np
import pytest

import tfamp
from tests.styles import STYLES, assembled

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
L = keras.layers
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(8, 2)).astype(np.float32)
# Of a float16 number, times the few operations after the layers in float32.
TOLERANCE = 8 * 2.0**-11
# Past the largest number of float16, 65504.
FACTOR = 1e5


def parts():
    return [
        L.Dense(8, name="inner"),
        L.Rescaling(FACTOR, name="producer"),
        L.LayerNormalization(name="consumer"),
        L.Dense(2, name="head"),
    ]


MODES = {
    "eager": {"run_eagerly": True},
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
}


@pytest.mark.quick("functional-graph", "subclassed-eager")
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("style", STYLES)
def test_a_number_beyond_float16_passes_from_layer_to_layer(style, options):
    model = assembled(parts(), style, (4,))
    model.compile(keras.optimizers.SGD(0.0), "mse", **options)
    outputs, loss = model.predict(X, verbose=0), model.evaluate(X, Y, verbose=0)
    tfamp.apply(model, "mixed_float16", keep_float32=[".*producer", ".*consumer"])
    found = model.predict(X, verbose=0)
    np.testing.assert_allclose(found, outputs, rtol=0, atol=TOLERANCE * 4)
    history = model.fit(X, Y, batch_size=8, verbose=0).history
    assert history["loss"][0] == pytest.approx(loss, rel=4 * TOLERANCE)
    assert int(model.optimizer.skipped_steps) == 0
