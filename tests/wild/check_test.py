"""`tfamp.check`: one call on a model as it is, and what its one table tells."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfamp

RNG = np.random.default_rng(5)
SALES = RNG.normal(size=(48, 6)).astype("float32")
RETURNED = (SALES.sum(axis=1, keepdims=True) > 0).astype("float32")
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


def shop(*middle):
    """Predicts whether an order is sent back."""
    keras.utils.set_random_seed(3)
    hidden = layers.Dense(24, activation="relu", name="hidden")
    head = layers.Dense(1, activation="sigmoid", name="returned")
    model = keras.Sequential([keras.Input((6,)), hidden, *middle, head], name="shop")
    model.compile("adam", "binary_crossentropy")
    return model


class Cents(layers.Layer):
    """Counts in hundredths of a cent for a moment."""

    def call(self, amount):
        return ops.square(amount * 1e4) * 1e-8


def places(found, rule):
    return [(each.severity, each.layer) for each in found if each.rule == rule]


def test_a_healthy_model_has_notes_only():
    found = tfamp.check(shop(), (SALES, RETURNED), policy="mixed_float16")
    assert (found.errors, found.warnings, found.skipped) == ((), (), ())
    assert {note.rule for note in found} == {"in-float32", "half-share", "ranges"}
    assert "mixed_float16" in found.title


def test_a_layer_that_float16_spoils_is_an_error_with_what_keeps_it():
    model = shop(Cents(name="cents"))
    found = tfamp.check(model, (SALES, RETURNED), policy="mixed_float16")
    assert places(found, "guilty-layer") == [("error", "cents")]
    (guilty,) = found.of(rule="guilty-layer")
    assert "overflow" in guilty.message
    assert "keep_float32=['cents']" in guilty.remedy
    assert max(map(len, found.table().splitlines())) <= 110
    assert tfamp.Findings.from_json(found.to_json()) == found
    # The range of bfloat16 is that of float32.
    assert not tfamp.check(model, (SALES, RETURNED), policy="mixed_bfloat16").errors


def test_a_spoilt_layer_that_the_user_keeps_already_is_a_note():
    with tfamp.scope("mixed_float16", keep_float32=["cents"]):
        model = shop(Cents(name="cents"))
    found = tfamp.check(model, (SALES, RETURNED))
    assert places(found, "guilty-layer") == [("note", "cents")]
    assert "as it was built" in found.title


def test_a_mask_beyond_the_range_is_named():
    """-1e9 is -inf in float16, and 0 times that is NaN."""

    class Masked(layers.Layer):
        def call(self, x):
            mask = ops.cast(x > 0, x.dtype)
            return x * ops.softmax(x + (1 - mask) * ops.cast(-1e9, x.dtype))

    model = shop(Masked(name="masked"))
    found = tfamp.check(model, (SALES, RETURNED), policy="mixed_float16")
    assert places(found, "guilty-layer") == [("note", "masked")]
    assert not tfamp.check(model, (SALES, RETURNED), policy="mixed_bfloat16").errors


def head_behind(is_operation):
    """A head whose outputs differ by less than float16 has there."""
    x = keras.Input((6,))
    far = keras.initializers.Constant(0.0 if is_operation else 1500.0)
    y = layers.Dense(1, bias_initializer=far, name="head")(layers.Dense(8, "tanh")(x))
    return keras.Model(x, y + 1500.0 if is_operation else y)


@pytest.mark.parametrize("is_operation", [False, True])
def test_a_spoilt_head_that_a_default_rule_keeps_is_a_note(is_operation):
    keras.utils.set_random_seed(0)
    model = head_behind(is_operation)
    model.compile("sgd", "mse")
    found = tfamp.check(model, (SALES, 1500 + RETURNED), policy="mixed_float16")
    assert [each.severity for each in found.of(rule="guilty-layer")] == ["note"]


def test_what_amplifies_rounding_is_a_note_before_the_first_step():
    grow = [layers.Lambda(lambda x: 1 - 1.9 * ops.square(x)) for _ in range(20)]
    model = shop(layers.Activation("tanh"), *grow)
    for severity, remedy in (("note", "Check again after"), ("warning", "Each layer")):
        found = tfamp.check(model, (SALES, RETURNED), policy="mixed_float16")
        (told,) = found.of(rule="guilty-layer")
        assert told.severity == severity and told.remedy.startswith(remedy)
        assert "'amplification'" in told.message
        model.fit(SALES, RETURNED, verbose=0)


def test_it_tells_what_computes_in_float32_and_why():
    model = shop(layers.LayerNormalization(name="norm"))
    found = tfamp.check(model, policy="mixed_bfloat16")
    (told,) = found.of(rule="in-float32")
    assert told.message.startswith("2 of 3 layers compute in float32: 'norm' (default:")
    assert "'returned' (default: heads" in told.message
    assert told.figure == 2


def test_its_numbers_are_those_of_the_single_tools():
    with tfamp.scope("mixed_float16"):
        model = shop(Cents(name="cents"))
    data = SALES[:32], RETURNED[:32]
    found = tfamp.check(model, data)
    share, *_ = found.of(rule="half-share")
    assert share.figure == tfamp.prove(model, data).half_share_of_flops
    ranges, layers_of = tfamp.ranges(model, data), tfamp.sensitivity(model, data)
    assert ranges.best_loss_scale in [e.figure for e in found.of(rule="ranges")]
    low, high = ranges.loss_scales
    assert low <= layers_of.loss_scale <= high
    guilty = {each.layer for each in found.of(rule="guilty-layer")}
    assert guilty == set(layers_of.guilty)
    assert set(tfamp.lint(model, data)) <= set(found)


def test_every_tool_names_the_same_spoilt_layer():
    data = SALES[:32], RETURNED[:32]
    with tfamp.scope("mixed_float16", check=None):
        model = shop(Cents(name="cents"))
        blamed = tfamp.triage(model, data)
    assert (blamed.cause, blamed.layers) == ("precision", ("cents",))
    assert [*tfamp.sensitivity(model, data).guilty] == ["cents"]
    assert places(tfamp.check(model, data), "guilty-layer") == [("error", "cents")]
    whole = SALES, RETURNED
    plan = tfamp.tune(model, whole, policy="mixed_float16", max_evaluations=3)
    assert plan.layers["cents"] == "float32"
    with tfamp.scope("mixed_float16"):
        model = shop(Cents(name="cents"))
        model.fit(*data, verbose=0)
    assert tfamp.assignment(model)["cents"].rule == "check"


def test_a_learning_rate_that_throws_the_loss_up_is_told_as_triage_tells_it():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e6), "mse")
    found = tfamp.check(model, (SALES, RETURNED), policy="mixed_bfloat16")
    blamed = tfamp.triage(model, (SALES[:32], RETURNED[:32]))
    assert blamed.cause == "learning rate"
    (told,) = found.of(rule="learning-rate")
    assert (told.severity, told.figure, told.remedy) == ("warning", 1e6, blamed.remedy)
    assert blamed.evidence[0] in told.message
    assert not found.errors and not tfamp.sensitivity(model, (SALES, RETURNED)).guilty
    assert not tfamp.check(shop(), (SALES, RETURNED)).of(rule="learning-rate")


class Regressor(keras.Model):
    """Written as in Keras's guide, and built by its first call."""

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([layers.Dense(16, "tanh"), Cents(name="cents")])
        self.out = layers.Dense(1, name="out")

    def call(self, x):
        return self.out(self.body(x))


def test_a_subclassed_model_that_was_never_called_is_checked():
    model = Regressor()
    model.compile("sgd", "mse")
    found = tfamp.check(model, (SALES, RETURNED), policy="mixed_float16")
    assert places(found, "guilty-layer") == [("error", f"{model.body.name}/cents")]


def test_without_data_or_half_precision_it_says_what_it_could_not_look_at():
    found = tfamp.check(shop(), (SALES, RETURNED), policy="float32")
    assert "All 2 layers" in found.of(rule="in-float32")[0].message
    assert found.of(rule="half-share")[0].figure == 0.0
    assert [text for text in found.skipped if text.startswith("guilty-layer: ")]
    found = tfamp.check(shop(), policy="mixed_bfloat16")
    assert {note.rule for note in found} == {"in-float32"}
    for rule in ("half-share", "ranges", "guilty-layer"):
        assert f"{rule}: no `data` were passed" in found.skipped
    assert "Not checked: half-share" in found.table()


def test_data_that_fail_in_float32_are_told_with_their_cause():
    spoilt = SALES.copy()
    spoilt[4, 2] = np.nan
    found = tfamp.check(shop(), (spoilt, RETURNED), policy="mixed_bfloat16")
    (bad,) = found.of(rule="not-finite")
    assert bad.severity == "error"
    assert "data" in bad.message and "number 4" in bad.message


def test_a_plan_is_judged_as_it_says(tmp_path):
    with tfamp.scope("mixed_float16", keep_float32=["hidden"]):
        plan = tfamp.PrecisionPlan.from_model(shop())
    plan.to_json(tmp_path / "plan.json")
    found = tfamp.check(shop(), (SALES, RETURNED), policy=tmp_path / "plan.json")
    (told,) = found.of(rule="in-float32")
    assert "'hidden'" in told.message and "'returned'" in told.message


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="expected a `keras.Model`"):
        tfamp.check(shop, (SALES, RETURNED))
    with pytest.raises(ValueError, match="Unknown `policy` 'fp16'"):
        tfamp.check(shop(), policy="fp16")


def test_a_float16_program_behind_a_check_hears_nothing_of_it():
    model = shop(layers.Dense(4, activation="relu"))
    tfamp.check(model, (SALES, RETURNED), policy="mixed_float16")
    head = layers.Activation("sigmoid", dtype="float16")
    logit = tf.constant([[9.0]], "float16")
    with tf.GradientTape() as tape:
        tape.watch(logit)
        loss = tf.reduce_mean(head(logit) - 1.0)
    assert np.isfinite(tape.gradient(loss, logit)).all()  # a warning is an error here
