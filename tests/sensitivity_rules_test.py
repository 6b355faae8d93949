"""`tfamp.sensitivity`: which guilty layers the default rules keep, and which not."""

import keras
import numpy as np
import pytest

import tfamp
from tfamp.numerics.sensitivity import sensitivity
from tfamp.numerics.sensitivity.errors import Sensitivity

L = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 8)).astype("float32")
Y = RNG.normal(size=(32, 1)).astype("float32")
FAR = keras.initializers.Constant(1500.0)


class Squares(L.Layer):
    """Squares beyond 65504 in the layer's own operations."""

    def call(self, x):
        return keras.ops.square(x * 1e3) * 1e-6


def made(*parts):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), L.Dense(8, "tanh"), *parts])
    model.compile("sgd", "mse")
    return model


def far_head():
    return L.Dense(1, bias_initializer=FAR, name="head")


def test_a_guilty_head_is_kept_by_a_default_rule():
    found = sensitivity(made(far_head()), (X, 1500 + Y))
    assert (found.verdict, list(found.guilty)) == ("layers", ["head"])
    assert found.layers[-1].rule == "default: heads"
    assert found.left == {}
    assert "keeps them in float32 by its default rules" in found.advice
    assert "keep_float32=" not in found.advice


def test_what_no_rule_keeps_is_left():
    huge, back = L.Rescaling(1e6, name="huge"), L.Rescaling(1e-6, name="back")
    found = sensitivity(made(huge, back, L.Dense(1)), (X, Y))
    assert found.left == found.guilty
    assert [layer.rule for layer in found.layers if layer.is_guilty] == ["", ""]


def test_advice_names_only_what_is_left():
    found = sensitivity(made(Squares(name="squares"), far_head()), (X, 1500 + Y))
    assert set(found.guilty) == {"squares", "head"}
    assert list(found.left) == ["squares"]
    assert "`keep_float32=['squares']`" in found.advice
    assert "'head'" not in found.advice


def test_an_operation_behind_a_head_is_kept_with_it():
    x = keras.Input((8,))
    y = L.Dense(1, name="head")(L.Dense(8, "tanh")(x))
    model = keras.Model(x, y + 1500.0)
    model.compile("sgd", "mse")
    found = sensitivity(model, (X, 1500 + Y))
    assert [path.partition("_")[0] for path in found.guilty] == ["add"]
    assert found.left == {}


def test_a_product_of_a_models_own_that_makes_its_output_is_kept():
    class Own(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.dense = L.Dense(8, "tanh", name="dense")

        def build(self, shape):
            self.kernel = self.add_weight(shape=(8, 1), name="kernel")

        def call(self, x):
            x = keras.ops.cast(self.dense(x), self.compute_dtype)
            return keras.ops.matmul(x, self.kernel) + 1500.0

    model = Own()
    model.compile("sgd", "mse")
    found = sensitivity(model, (X, 1500 + Y))
    assert list(found.guilty) == ["own"]
    assert found.left == {}


def test_a_dtype_that_the_user_gave_counts():
    with tfamp.scope("mixed_float16"):
        huge = L.Rescaling(1e6, dtype="float32", name="huge")
        back = L.Rescaling(1e-6, dtype="float32", name="back")
        model = made(huge, back, L.Dense(1))
    found = sensitivity(model, (X, Y))
    assert set(found.guilty) == {"huge", "back"}
    assert found.left == {}
    rows = [(row.compute_dtype, row.rule) for row in tfamp.assignment(model)]
    assert rows[2][0] == "float32"


@pytest.mark.quick("mixed_bfloat16")
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_nothing_of_the_rules_stays(policy):
    with tfamp.scope(policy):
        model = made(L.Dropout(0.1), Squares(name="squares"), far_head())

    def state():
        rows = [
            (layer.dtype_policy, layer.compute_dtype)
            for layer in [model, *model.layers]
        ]
        return rows, [str(output.dtype) for output in model.outputs]

    before = state(), tfamp.assignment(model)
    sensitivity(model, (X, 1500 + Y))
    assert (state(), tfamp.assignment(model)) == before


def test_the_table_says_that_it_is_without_rules():
    found = sensitivity(made(Squares(name="squares"), far_head()), (X, 1500 + Y))
    text = found.table()
    assert "in float16 without tfamp's rules: layers" in text
    assert "default: heads" in text
    assert max(map(len, text.splitlines())) <= 110
    assert Sensitivity.from_json(found.to_json()) == found
