"""Proofs: dtypes, layers, casts and causes of a step by hand; nothing changes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.refusals import refusals
from tests.replicas import two_replicas
from tests.styles import stock_policy
from tfamp import Proof, prove
from tfamp.machine.speeds import Device

L = keras.layers
A100 = Device("gpu", "NVIDIA A100", (8, 0))
V100 = Device("gpu", "Tesla V100", (7, 0))
OLD_CPU = Device("cpu", "Old Xeon", features=("avx2",))
AMX_CPU = Device("cpu", "New Xeon", features=("amx_bf16", "avx512_bf16"))


def compiled(model, **options):
    """Returns the model, compiled, with an optimizer that is built where it can be."""
    model.compile("sgd", "mse", **options)
    if model.built:
        model.optimizer.build(model.trainable_variables)
    return model


def stacked(shape, *layers, **options):
    """Returns a compiled model of some layers."""
    return compiled(keras.Sequential([keras.Input(shape), *layers], **options))


def dense_and_head(units=512, outputs=10, policy="mixed_bfloat16"):
    """Returns a product in half precision and a head in float32, on 512 inputs."""
    dense = L.Dense(units, dtype=policy, name="dense")
    head = L.Dense(outputs, dtype="float32", name="head")
    return stacked((512,), dense, head, name="two")


def batch_of(*shapes):
    return tuple(tf.zeros((8, *shape)) for shape in shapes)


ZEROS = batch_of((512,), (10,))


def num_products(proof):
    """Returns {layer: (products forward, products backward)}."""
    found = {}
    for product in proof.operations:
        counts = found.setdefault(product.layer, [0, 0])
        counts[product.direction != "forward"] += product.count
    return {layer: tuple(counts) for layer, counts in found.items()}


def causes(proof):
    """Returns {name: cause} of a proof."""
    return {cause.rule: cause for cause in proof.causes}


# The first layer needs no gradient of its inputs: two products, not three.
HEAD_FLOPS = 3 * 2 * 8 * 512 * 10
DENSE_FLOPS = 2 * 2 * 8 * 512 * 512


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_the_share_in_half_precision_is_exact(half):
    proof = prove(dense_and_head(policy=f"mixed_{half}"), ZEROS, batch_size=8)
    assert proof.flops == DENSE_FLOPS + HEAD_FLOPS
    assert proof.half_share_of_flops == DENSE_FLOPS / (DENSE_FLOPS + HEAD_FLOPS)
    found = [(p.layer, p.direction, p.dtype, p.count) for p in proof.operations]
    assert sorted(found) == [
        ("dense", "backward", half, 1),
        ("dense", "forward", half, 1),
        *[("head", "backward", "float32", 1)] * 2,
        ("head", "forward", "float32", 1),
    ]
    assert (proof.model, proof.step, proof.batch_size) == ("two", "train", 8)
    assert proof.notes == ()
    forward = proof.operations[0]
    assert (forward.op_type, forward.flops) == ("MatMul", 2 * 8 * 512 * 512)
    assert "dense" in forward.name and forward.name.endswith("/MatMul")
    assert "tfamp" not in forward.name
    assert (forward.shapes, forward.output_shape) == (((8, 512), (512, 512)), (8, 512))


def test_a_float32_model_has_no_casts_and_says_why_it_is_float32():
    model = dense_and_head(policy="float32")
    proof = prove(model, ZEROS, devices=[AMX_CPU])
    assert (proof.half_share_of_flops, proof.casts) == (0.0, ())
    assert [(cause.rule, cause.figure) for cause in proof.causes] == [("float32", 1.0)]
    (cause,) = proof.causes
    assert cause.message == (
        "Every matrix product and convolution runs in float32: 'dense' and 'head' "
        "(its dtype policy says so, no rule of tfamp)."
    )
    assert cause.remedy.startswith("Call `tfamp.apply(model, 'mixed_bfloat16')`")
    (slow,) = prove(model, ZEROS, devices=[OLD_CPU]).causes
    assert slow.remedy == (
        "Leave it: Old Xeon has no bfloat16 instructions (amx_bf16 or avx512_bf16)."
    )


def nested():
    """Returns a model with a layer used twice and a model inside."""
    shared = L.Dense(8, name="shared")
    # A name as TensorFlow would give the second use of "shared".
    other = L.Dense(8, name="shared_1")
    parts = [L.Dense(8, name="dense"), L.Dense(8, name="out")]
    inner = keras.Sequential([keras.Input((8,)), *parts], name="inner")
    inputs = keras.Input((8,))
    outputs = inner(other(shared(shared(inputs))))
    return keras.Model(inputs, L.Dense(8, name="dense")(outputs)), ((8,), (8,))


def recurrent():
    """Returns two ways of running over six steps."""
    inputs = keras.Input((6, 8))
    x = L.LSTM(4, return_sequences=True, name="lstm")(inputs)
    x = L.TimeDistributed(L.Dense(3, name="each"), name="over")(x)
    return keras.Model(inputs, x), ((6, 8), (6, 3))


# Layer -> products forward and backward. The inputs need no gradient, so the first
# layer that sees them has one backward where others have two.
INSIDE = dict.fromkeys(("shared_1", "inner/dense", "inner/out", "dense"), (1, 2))
ATTRIBUTED = {
    "nested": (nested, {"shared": (2, 3), **INSIDE}),
    # A step of the cell has two products; the inputs of the loop need no gradient.
    "recurrent": (recurrent, {"lstm/lstm_cell": (12, 18), "over/each": (6, 12)}),
}


@pytest.mark.parametrize("make, expected", ATTRIBUTED.values(), ids=ATTRIBUTED)
def test_every_product_is_attributed_to_its_layer(make, expected):
    with stock_policy("mixed_bfloat16"):
        model, shapes = make()
        found = num_products(prove(compiled(model), batch_of(*shapes)))
    assert found == expected
    assert set(found) <= {row.path for row in tfamp.assignment(model)}


def test_a_step_of_training_needs_what_compile_is_told():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    data = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    with pytest.raises(ValueError, match="is not compiled"):
        tfamp.prove(model, data)
    assert tfamp.prove(model, data, training=False).operations


def test_a_train_step_of_the_user_is_the_one_that_is_traced():
    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
                # A product that no layer makes.
                loss += tf.reduce_sum(tf.matmul(x, x, transpose_b=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    inputs = keras.Input((8,))
    model = compiled(Own(inputs, L.Dense(4, name="dense")(inputs)))
    proof = prove(model, batch_of((8,), (4,)))
    assert num_products(proof) == {"dense": (1, 1), "": (1, 0)}
    expected = "no layer (made by the loss, the optimizer or the train step itself)"
    assert expected in causes(proof)["float32"].message
    assert "(no layer)" in proof.table()


def test_replicas_count_as_one_step_of_the_whole_batch():
    data = tf.data.Dataset.from_tensors(ZEROS)
    alone = prove(dense_and_head(), data)
    with two_replicas().scope():
        model = dense_and_head()
    both = prove(model, data)
    assert both.half_share_of_flops == alone.half_share_of_flops
    assert [p.layer for p in both.operations] == [p.layer for p in alone.operations]
    assert {product.count for product in both.operations} == {2}
    assert both.operations[0].shapes == ((4, 512), (512, 512))


def test_a_proof_has_its_causes_and_goes_to_json_and_back():
    with tfamp.scope("mixed_bfloat16"):
        model = stacked((512,), L.Dense(100), L.Dense(10, name="head"))
    proof = prove(model, ZEROS, devices=[V100])
    assert Proof.from_json(proof.to_json()) == proof
    assert set(causes(proof)) == {"casts", "device", "float32"}
    told = causes(proof)["float32"].message
    assert "'head' (default: heads: makes an output of the model" in told


WRONG = {
    "no model": (
        lambda: prove("model", ZEROS),
        "`model` is 'model', of type str; expected a compiled `keras.Model`.",
    ),
    "a number": (
        lambda: prove(dense_and_head(), 7),
        "`data` is of type int; expected what `fit` takes: a `tf.data.Dataset` of",
    ),
}
test_wrong_arguments_are_named_with_a_remedy = refusals(WRONG, kind=TypeError)
