"""Losses see what they need: heads give the loss and gradient of float32.

References are the closed forms of the cross-entropies in float64.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.recorded_operations import recorded_operations
from tests.styles import assembled
from tests.wild.checking import made

layers = keras.layers
POLICIES = ("mixed_float16", "mixed_bfloat16")
WRONG_BY = (9.0, 12.0, 20.0)
# Weights go through one rounding to half precision on the way to the trunk; the
# head itself is float32, so only the float32 spacing is left over. The issue is
# orders of magnitude: stock gives a gradient of 0 or NaN.
RELATIVE = 1e-3


def final(kind, units):
    """Returns layers that end a model in probabilities, written in one way."""
    name = "sigmoid" if units == 1 else "softmax"
    if kind == "activation string":
        return [layers.Dense(units, activation=name, name="logits")]
    if kind == "Activation layer":
        return [layers.Dense(units, name="logits"), layers.Activation(name)]
    if kind == "Softmax layer":
        return [layers.Dense(units, name="logits"), layers.Softmax()]
    return [layers.Dense(units, name="logits"), getattr(keras.ops, name)]


KINDS = ["activation string", "Activation layer", "operation"]


def build(style, kind, units, loss, jit_compile=False):
    steps = final(kind, units)
    model = assembled(steps, style, (1,))
    if not steps[0].built:
        steps[0].build((None, 1))
    model.compile(keras.optimizers.SGD(1.0), loss, jit_compile=jit_compile)
    return model, steps[0]


def bias_gradient(model, dense, logits, y):
    """Returns (loss, gradient of the logits' bias) of one `fit` step."""
    before = np.array(logits, "float32")
    dense.set_weights([np.zeros((1, len(logits)), "float32"), before])
    history = model.fit(np.ones((1, 1), "float32"), y, verbose=0).history
    return history["loss"][0], before.astype("float64") - dense.bias.numpy()


CASES = {
    f"{style}-{kind}-{units}-{run}": (style, kind, units, run == "xla")
    for units in (1, 3)
    for style in ("functional", "sequential", "subclassed")
    for kind in (*KINDS, *(["Softmax layer"] if units > 1 else []))
    for run in ("graph", "xla")
    if not (style == "sequential" and kind == "operation")
    if not (style != "functional" and run == "xla")
}


@pytest.mark.quick("functional-activation string-*-graph-mixed_float16")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("style", "kind", "units", "jit_compile"), CASES.values(), ids=CASES
)
def test_loss_and_gradient_of_a_head(style, kind, units, policy, jit_compile):
    loss = "sparse_categorical_crossentropy" if units > 1 else "binary_crossentropy"
    with tfamp.scope(policy):
        model, dense = build(style, kind, units, loss, jit_compile)
    for wrong_by in WRONG_BY:
        # A sigmoid is a softmax over its logit and 0.
        logits, label = np.array([wrong_by, 0.0, 0.0][:units]), int(units > 1)
        loss, gradient = bias_gradient(model, dense, logits, np.array([[label]]))
        whole = np.logaddexp.reduce([*logits, 0.0] if units == 1 else logits)
        exact = np.exp(logits - whole)
        assert loss == pytest.approx(whole, rel=RELATIVE)  # the label's logit is 0
        if units > 1:
            exact[label] -= 1
        np.testing.assert_allclose(gradient, exact, rtol=RELATIVE, atol=1e-7)


class NoLayerAtTheEnd(keras.Model):
    """Multiplies by a large weight of its own at the end."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4, activation="relu")

    def build(self, input_shape):
        self.dense.build(input_shape)
        self.table = self.add_weight(shape=(4, 2**16), name="table")

    def call(self, x):
        return tf.matmul(self.dense(x), self.table)[:, :3]


class HeadIsAlsoUsedInside(keras.Model):
    """Combines the last layer's output with a half-precision tensor by hand."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(3, activation="relu")
        self.last = layers.Dense(3)

    def call(self, x):
        h = self.first(x)
        y = self.last(h)
        self.total = tf.reduce_mean(h * y)
        return y


@pytest.mark.quick("mixed_float16-HeadIsAlsoUsedInside")
@pytest.mark.parametrize("model_class", [NoLayerAtTheEnd, HeadIsAlsoUsedInside])
@pytest.mark.parametrize("policy", POLICIES)
def test_where_no_layer_can_be_the_head_the_output_alone_is_cast(
    policy, model_class, caplog
):
    with tfamp.scope(policy):
        model = model_class()
    model.compile("sgd", "mse", jit_compile=False)
    x, y = np.ones((4, 2), "float32"), np.ones((4, 3), "float32")
    with caplog.at_level("WARNING"):
        assert np.isfinite(model.fit(x, y, verbose=0).history["loss"][0])
    if model_class is HeadIsAlsoUsedInside:
        assert "its last layer stays in half precision" in caplog.text
        assert "Cast what is combined with it" in caplog.text
    assert model(x).dtype == tf.float32
    row = tfamp.assignment(model)[model.name]
    assert (row.rule, row.output_dtype) == ("default: heads", "float32")
    assert "the output alone is cast to float32" in row.note


class NeedsValues(keras.Model):
    """Looks at values, so it runs eagerly only."""

    def __init__(self, dense):
        super().__init__()
        self.dense = dense
        self.num_calls = 0

    def call(self, x):
        self.num_calls += 1
        return self.dense(x / float(tf.reduce_max(x)))


@pytest.mark.parametrize("has_head", [False, True])
def test_a_model_that_cannot_be_traced_runs_and_is_said(has_head, caplog):
    """Not of one whose Functional model inside has a head of its own in float32."""
    with tfamp.scope("mixed_bfloat16"):
        dense = layers.Dense(2)
        if has_head:
            dense = keras.Sequential([keras.Input((2,)), dense])
        model = NeedsValues(dense)
    x = np.ones((2, 2), "float32")
    model.dense.build((None, 2))
    model.built = True
    with caplog.at_level("WARNING"):
        outputs = [model(x) for _ in range(5)]
    assert {y.dtype for y in outputs} == {tf.float32}
    told = caplog.text.count("cannot be traced to find that layer")
    assert told == (0 if has_head else 1)
    assert "the output alone is cast" in tfamp.assignment(model).layers[0].note
    assert model.num_calls <= 5 + 3 + 2  # three traces, the first in float32 as well


def test_one_bad_call_does_not_hide_the_head():
    class Joins(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = layers.Dense(2, name="head")

        def call(self, x):
            return self.head(tf.concat([x, tf.ones((3, 1), x.dtype)], axis=-1))

    with tfamp.scope("mixed_bfloat16"):
        model = Joins()
    with pytest.raises(Exception, match="Dimension|shape"):
        model(np.ones((2, 2), "float32"))
    assert model(np.ones((3, 2), "float32")).dtype == tf.float32
    assert tfamp.assignment(model)["head"].rule == "default: heads"
    assert tfamp.assignment(model).layers[0].rule == "policy mixed_bfloat16"


def test_a_head_the_user_gave_a_dtype_keeps_it():
    with tfamp.scope("mixed_bfloat16"):
        x = keras.Input((2,))
        model = keras.Model(x, layers.Dense(3, dtype="mixed_bfloat16")(x))
    assert model(np.ones((4, 2))).dtype == tf.bfloat16
    assert tfamp.assignment(model).layers[-1].rule == "dtype argument"


def test_several_outputs_are_all_heads():
    with tfamp.scope("mixed_bfloat16"):
        x = keras.Input((4,))
        h = layers.Dense(4, activation="relu")(x)
        b = layers.Reshape((1, 3))(layers.Dense(3)(h))
        model = keras.Model(x, {"a": layers.Dense(2)(h), "b": b})
    outputs = model(np.ones((2, 4)))
    assert {y.dtype for y in outputs.values()} == {tf.float32}
    assert [tensor.dtype for tensor in model.outputs] == ["float32", "float32"]


@pytest.mark.parametrize("style", ["functional", "subclassed"])
def test_a_dear_head_gives_float32_after_a_half_product(style):
    with tfamp.scope("mixed_bfloat16"):
        steps = [
            layers.Dense(256, activation="relu"),
            layers.Dense(4000, activation="softmax", name="logits"),
        ]
        model = assembled(steps, style, (1,))
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    x = np.linspace(-1, 1, 8, dtype="float32")[:, None]
    output = model(x)
    assert output.dtype == tf.float32
    # Rounding each of 4000 terms near 2.5e-4 to bfloat16 would show in the sum.
    np.testing.assert_allclose(np.sum(output, axis=-1), 1, atol=1e-5)
    row = tfamp.assignment(model)["logits"]
    assert (row.compute_dtype, row.output_dtype) == ("bfloat16", "float32")
    assert "its product is" in row.note
    with recorded_operations() as operations:
        model.fit(x, np.arange(8), verbose=0)
        # A loss function given bare does not cast what it takes.
        tf.function(
            lambda: keras.losses.sparse_categorical_crossentropy(tf.range(8), model(x))
        ).get_concrete_function()
    loss_dtypes = operations.of("SparseSoftmaxCrossEntropyWithLogits")
    assert loss_dtypes == {"float32"}


def test_a_product_at_many_places_counts_as_often():
    # Of 19 million multiplications an image, 0.3 are the head's, as its weights are.
    with tfamp.scope("mixed_bfloat16"):
        parts = [
            layers.Conv2D(64, 3, padding="same"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(512),
            layers.Dense(600, name="logits"),
        ]
        model = assembled(parts, "functional", (32, 32, 32))
        model.compile("sgd", "mse")
    assert tfamp.assignment(model)["logits"].rule == "default: heads"
    assert tfamp.assignment(model)["logits"].compute_dtype == "float32"


def test_the_head_moves_when_a_sequential_model_grows():
    with tfamp.scope("mixed_bfloat16"):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(8, name="first")])
        model.compile("sgd", "mse")
        assert tfamp.assignment(model)["first"].rule == "default: heads"
        model.add(layers.Dense(1, name="second"))
        model.compile("sgd", "mse")
    found = {row.path: row.compute_dtype for row in tfamp.assignment(model)}
    assert (found["first"], found["second"]) == ("bfloat16", "float32")


@pytest.mark.filterwarnings("ignore:The layer of .* with no loss scale")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings("ignore:Dense 'logits' computes in float16")
def test_a_loss_object_sees_the_logits_of_half_probabilities(policy):
    with tfamp.scope(policy):
        layer = layers.Dense(
            3, activation="softmax", kernel_initializer="zeros", name="logits"
        )
    layer.build((None, 1))
    layer.bias.assign([20.0, 0.0, 0.0])
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def loss_and_gradient():
        with tf.GradientTape() as tape:
            probabilities = layer(tf.ones((1, 1)))  # a layer alone has no head
            loss = loss_of(tf.constant([1]), probabilities)
        return probabilities, loss, tape.gradient(loss, layer.bias)

    probabilities, loss, gradient = loss_and_gradient()
    assert probabilities.dtype == policy.removeprefix("mixed_")
    assert float(loss) == pytest.approx(20.0, rel=RELATIVE)
    np.testing.assert_allclose(gradient, [1, -1, 0], atol=1e-6)


def test_all_layers_that_an_output_is_made_of_are_heads():
    class Sum(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [layers.Dense(3, name="left"), layers.Dense(3, name="right")]

        def call(self, x):
            return self.parts[0](x) + self.parts[1](x)

    with tfamp.scope("mixed_bfloat16"):
        model = Sum()
    assert model(np.ones((2, 3), "float32")).dtype == tf.float32
    rows = tfamp.assignment(model)
    assert rows["left"].rule == rows["right"].rule == "default: heads"


class Tied(keras.Model):
    """Its logits are products with the table of its embedding."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(20, 8)
        self.dense = layers.Dense(8)

    def call(self, ids):
        hidden = self.dense(self.table(ids))
        return keras.ops.matmul(hidden, keras.ops.transpose(self.table.embeddings))


IDS = np.arange(12).reshape(3, 4)


def tied():
    model = Tied()
    model(IDS)
    return model


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["enable", "apply"])
def test_a_product_of_the_models_own_that_ends_it_is_float32(way, policy):
    keras.utils.set_random_seed(0)
    model = made(tied, way, policy)
    logits = model(IDS)
    hidden = tf.cast(model.dense(model.table(IDS)), tf.float64)
    table = tf.cast(model.table.embeddings.value, tf.float64)
    expected = tf.matmul(hidden, tf.tile(table[None], (3, 1, 1)), transpose_b=True)
    assert logits.dtype == tf.float32
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-7)
    rows = {row.class_name: row for row in tfamp.assignment(model).layers}
    assert rows["Tied"].rule == "default: heads"
    assert rows["Dense"].compute_dtype == policy.removeprefix("mixed_")


class Embedded(layers.Layer):
    """Tokens and their positions, added up by a plain sum."""

    def __init__(self):
        super().__init__()
        self.tokens = layers.Embedding(12, 8)
        self.positions = layers.Embedding(4, 8)

    def call(self, ids):
        return self.tokens(ids) + self.positions(np.arange(4))[None]


class MaskedHead(layers.Layer):
    """Holds the embedding of another layer for its last product."""

    def __init__(self, embedding):
        super().__init__()
        self.dense = layers.Dense(8, "gelu")
        self.embedding = embedding

    def call(self, hidden):
        table = keras.ops.transpose(self.embedding.embeddings)
        return keras.ops.matmul(self.dense(hidden), table)


def masked_language_model():
    ids = keras.Input((4,), dtype="int32")
    embedded = Embedded()
    backbone = keras.Model(ids, layers.Dense(8)(embedded(ids)))
    return keras.Model(ids, MaskedHead(embedded.tokens)(backbone(ids)))


@pytest.mark.quick("mixed_bfloat16-apply")
@pytest.mark.parametrize("way", ["enable", "apply"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_head_that_holds_the_embedding_of_another_layer(way, policy):
    model = made(masked_language_model, way, policy)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    assert np.isfinite(model.fit(IDS, IDS, verbose=0).history["loss"]).all()
    assert model.predict(IDS, verbose=0).dtype == "float32"
    rows = {row.class_name: row for row in tfamp.assignment(model).layers}
    assert rows["MaskedHead"].compute_dtype == "float32"
    assert rows["Embedded"].compute_dtype == policy.removeprefix("mixed_")
    # No error had to be caught for it.
    rules = [row.rule for row in rows.values()]
    assert "default: cannot run in half precision" not in rules


def test_looking_at_a_backbone_makes_it_no_model_with_a_head():
    with tfamp.scope("mixed_bfloat16"):
        x = keras.Input((8,))
        features = layers.Dense(8, name="features")(x)
        backbone = keras.Model(x, features, name="backbone")
        shown = tfamp.assignment(backbone)
        assert shown["features"].compute_dtype == "float32"  # a head, on its own
        assert backbone.get_layer("features").compute_dtype == "bfloat16"
        h = layers.Dense(8, name="stem")(x)
        model = keras.Model(x, layers.Dense(1, name="head")(h + backbone(h)))
        model.compile("sgd", "mse")
    dtypes = {row.path: row.compute_dtype for row in tfamp.assignment(model)}
    assert dtypes["backbone/features"] == "bfloat16"
    assert dtypes["head"] == "float32"
    loss = model.fit(np.ones((4, 8)), np.ones((4, 1)), verbose=0).history["loss"]
    assert np.isfinite(loss).all()


class Cast(layers.Layer):
    """A layer that was written for float16 alone."""

    def build(self, shape):
        self.inner = layers.Dense(4)
        self.kernel = self.add_weight(shape=(4, 2))

    def call(self, inputs):
        return tf.matmul(self.inner(inputs), tf.cast(self.kernel, tf.float16))


class Saved(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float16)])
    def serve(self, x):
        return x[:, :2]


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_last_layer_that_takes_half_precision_alone_is_given_it(is_saved, tmp_path):
    tf.saved_model.save(Saved(), str(tmp_path))
    with tfamp.scope("mixed_float16"):
        last = Cast(name="last")
        if is_saved:
            last = layers.TFSMLayer(str(tmp_path), call_endpoint="serve", name="last")
        model = keras.Sequential([layers.Dense(4), last])
        model.compile("sgd", "mse")
        x = np.ones((8, 4), "float32")
        model.fit(x, np.zeros((8, 2)), verbose=0)
    assert model.predict(x, verbose=0).dtype == "float32"
    assert tfamp.assignment(model)["last"].compute_dtype == "float16"
