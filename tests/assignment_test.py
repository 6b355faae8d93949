"""Reading dtypes, changing them in place, and the errors of both."""

import re

import keras
import numpy as np
import pytest

import tfamp

layers = keras.layers
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 8)


def classifier():
    encoder = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, name="dense")], name="encoder"
    )
    x = keras.Input((4,))
    h = layers.LayerNormalization(name="norm")(encoder(x))
    y = layers.Dense(3, activation="softmax", name="head")(h)
    return keras.Model(x, y, name="classifier")


def compiled(optimizer="adam", **options):
    model = classifier()
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, jit_compile=False, **options)
    return model


def test_every_layer_is_listed_with_its_rule():
    with tfamp.scope("mixed_bfloat16"):
        model = classifier()
    found = {row.path: (row.compute_dtype, row.rule) for row in tfamp.assignment(model)}
    assert found == {
        "classifier": ("bfloat16", "policy mixed_bfloat16"),
        "encoder": ("bfloat16", "policy mixed_bfloat16"),
        "encoder/dense": ("bfloat16", "policy mixed_bfloat16"),
        "norm": ("float32", "default: LayerNormalization"),
        "head": ("float32", "default: heads"),
    }


def test_it_prints_as_a_table_and_survives_json(tmp_path):
    with tfamp.scope("mixed_bfloat16"):
        model = classifier()
    assignment = tfamp.assignment(model)
    assert tfamp.Assignment.from_json(assignment.to_json()) == assignment
    path = tmp_path / "assignment.json"
    assignment.to_json(path)
    assert tfamp.Assignment.from_json(path) == assignment
    lines = str(assignment).splitlines()
    row = next(line for line in lines if "encoder/dense" in line)
    assert "bfloat16" in row
    assert len(assignment) == 5


@pytest.mark.parametrize("value", [None, "model", 3])
def test_what_is_no_model(value):
    message = re.escape(
        f"Cannot read the dtypes of {value!r}; expected a Keras 3 model"
    )
    with pytest.raises(TypeError, match=message):
        tfamp.assignment(value)
    with pytest.raises(TypeError, match=message):
        tfamp.apply(value, "mixed_bfloat16")


def test_apply_and_back_gives_the_same_predictions_bit_for_bit():
    model = compiled()
    before = model.predict(X, verbose=0)
    tfamp.apply(model, "mixed_bfloat16")
    halved = model.predict(X, verbose=0)
    assert not np.array_equal(halved, before)
    tfamp.apply(model, "float32")
    np.testing.assert_array_equal(model.predict(X, verbose=0), before)


def test_apply_refuses_a_pattern_without_a_match_before_any_change():
    model = classifier()
    message = re.escape(
        "Pattern 'heads/.*' in `keep_float32` matches none of the 4 layers of model "
        "'classifier'; paths look like 'encoder/dense'."
    )
    with pytest.raises(ValueError, match=message):
        tfamp.apply(model, "mixed_bfloat16", keep_float32=["heads/.*"])
    assert {row.rule for row in tfamp.assignment(model)} == {"not managed"}


def test_a_rule_that_clashes_with_the_users_dtype_is_said():
    with tfamp.scope("mixed_bfloat16", keep_float32=["default", "mine"]):
        x = keras.Input((4,))
        h = layers.Dense(4, name="mine", dtype="mixed_bfloat16")(x)
        model = keras.Model(x, layers.Dense(1)(h))
    with pytest.warns(UserWarning, match="which wins. Leave out the layer's `dtype`"):
        tfamp.assignment(model)


def test_a_predicate_that_raises_names_the_layer():
    keep = ["default", lambda layer: layer.units > 4]
    with tfamp.scope("mixed_bfloat16", keep_float32=keep):
        layer = layers.ReLU(name="relu")
    with pytest.raises(RuntimeError, match="raised AttributeError on layer 'relu'"):
        layer(X)


SCALED = keras.optimizers.LossScaleOptimizer


def test_compile_never_scales_twice_and_obeys_auto_scale_loss():
    with tfamp.scope("mixed_float16"):
        model = compiled(SCALED(keras.optimizers.Adam()))
        assert not isinstance(model.optimizer.inner_optimizer, SCALED)
        model.compile("adam", "mse", auto_scale_loss=False)
    assert not isinstance(model.optimizer, SCALED)


def test_apply_gives_and_takes_the_loss_scale_with_the_same_optimizer_inside():
    model = compiled(run_eagerly=True)
    model.fit(X, Y, verbose=0)
    adam = model.optimizer
    tfamp.apply(model, "mixed_float16")
    assert isinstance(model.optimizer, SCALED)
    assert model.optimizer.inner_optimizer is adam
    model.fit(X, Y, verbose=0)
    assert int(adam.iterations) == 2
    tfamp.apply(model, "mixed_bfloat16")
    assert model.optimizer is adam
    model.fit(X, Y, verbose=0)
    assert int(adam.iterations) == 3


@pytest.mark.filterwarnings("ignore:'bfloat16' stores the weights")
def test_it_tells_the_dtype_weights_are_really_stored_in():
    with tfamp.scope("bfloat16"):
        x = keras.Input((4,))
        h = layers.LayerNormalization(name="norm")(layers.Dense(4, name="dense")(x))
        model = keras.Model(x, layers.Dense(1, name="head")(h))
    stored = {row.path: row.variable_dtype for row in tfamp.assignment(model)}
    # The head is found after its weights were made.
    assert stored["dense"] == stored["head"] == "bfloat16"
    assert stored["norm"] == "float32"
    assert tfamp.assignment(model)["head"].compute_dtype == "float32"


def paths_and_rules(layer):
    return {row.path: row.rule for row in tfamp.assignment(layer)}


def test_a_path_tells_layers_of_one_name_apart():
    def part(name):
        x = keras.Input((4,))
        return keras.Model(x, layers.Dense(4, name="dense")(x), name=name)

    with tfamp.scope("mixed_bfloat16", keep_float32=["default", "left/.*"]):
        x = keras.Input((4,))
        model = keras.Model(x, layers.Dense(1)(part("right")(part("left")(x))))
    rules = paths_and_rules(model)
    assert rules["left/dense"] == "keep_float32: 'left/.*'"
    assert rules["right/dense"] == "policy mixed_bfloat16"


def test_layers_made_from_a_config_inside_bidirectional_are_kept_by_the_same_rule():
    with tfamp.scope("mixed_bfloat16", keep_float32=["LSTM"]):
        layer = layers.Bidirectional(layers.LSTM(2, name="lstm"))
    rules = paths_and_rules(layer)
    assert rules["forward_lstm"] == rules["backward_lstm"] == "keep_float32: 'LSTM'"
    inside = {rule for path, rule in rules.items() if path.endswith("_cell")}
    assert inside == {"inside 'forward_lstm'", "inside 'backward_lstm'"}


@pytest.mark.filterwarnings("ignore:'bfloat16' stores the weights")
def test_the_states_of_a_kept_stateful_layer_are_float32():
    with tfamp.scope("bfloat16", keep_float32=["LSTM"]):
        layer = layers.LSTM(2, stateful=True)
    layer(np.ones((1, 3, 2)))
    assert {state.dtype for state in layer.states} == {"float32"}
    assert {weight.dtype for weight in layer.weights} == {"float32"}


def test_what_spectral_normalization_wraps_stays_in_half_precision():
    with tfamp.scope("mixed_float16"):
        outer = layers.SpectralNormalization(layers.Dense(4))
        outputs = outer(X, training=True)
    dtypes = outer.compute_dtype, outer.layer.compute_dtype, outputs.dtype
    assert dtypes == ("float32", "float16", "float16")


def test_integer_and_quantized_layers_are_left_alone():
    lookup = layers.IntegerLookup(vocabulary=[1, 2, 3])
    x = keras.Input((1,), dtype="int64")
    h = layers.Flatten()(layers.Embedding(5, 2)(lookup(x)))
    model = keras.Model(x, layers.Dense(1)(h))
    before = lookup.compute_dtype
    tfamp.apply(model, "mixed_bfloat16")
    assert lookup.compute_dtype == before
