"""What one layer in float32 hands to another one is not rounded in between."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

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


def sequential():
    return keras.Sequential([keras.Input((4,)), *parts()])


def functional():
    x = y = keras.Input((4,))
    for layer in parts():
        y = layer(y)
    return keras.Model(x, y)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = parts()

    def call(self, x):
        for layer in self.parts:
            x = layer(x)
        return x


class Nested(keras.Model):
    def __init__(self):
        super().__init__()
        first, *rest = parts()
        self.first = keras.Sequential([keras.Input((4,)), first, rest.pop(0)])
        self.rest = keras.Sequential(rest)

    def call(self, x):
        return self.rest(self.first(x))


MODELS = {
    "functional": functional,
    "sequential": sequential,
    "subclassed": Subclassed,
    "nested": Nested,
}
MODES = {
    "eager": {"run_eagerly": True},
    "graph": {},
    "xla": {"jit_compile": True},
}


def kept(build, names, **options):
    """A float32 model's outputs and loss, and those of it in mixed_float16."""
    keras.utils.set_random_seed(0)
    model = build()
    model.compile(keras.optimizers.SGD(0.0), "mse", **options)
    expected = model.predict(X, verbose=0), model.evaluate(X, Y, verbose=0)
    tfamp.apply(model, "mixed_float16", keep_float32=names)
    return model, expected


@pytest.mark.most(4)
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_a_number_beyond_float16_passes_from_layer_to_layer(build, options):
    names = [".*producer", ".*consumer"]
    model, (outputs, loss) = kept(build, names, **options)
    found = model.predict(X, verbose=0)
    np.testing.assert_allclose(found, outputs, rtol=0, atol=TOLERANCE * 4)
    history = model.fit(X, Y, batch_size=8, verbose=0).history
    assert history["loss"][0] == pytest.approx(loss, rel=4 * TOLERANCE)
    assert int(model.optimizer.skipped_steps) == 0


def test_a_layer_in_float16_gets_what_the_table_says():
    model, _ = kept(functional, ["producer"])
    assert tfamp.assignment(model)["producer"].output_dtype == "float16"
    assert not np.isfinite(model.predict(X, verbose=0)).all()


def test_a_users_own_operation_in_between_works_in_float16():
    class Between(Subclassed):
        def call(self, x):
            inner, producer, consumer, head = self.parts
            x = producer(inner(x))
            return head(consumer(x * tf.constant(1.0, x.dtype)))

    model, _ = kept(Between, [".*producer", ".*consumer"])
    assert not np.isfinite(model.predict(X, verbose=0)).all()
