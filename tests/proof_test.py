"""Proofs: dtypes, layers, casts and causes of a step by hand; nothing changes."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.graphs_test import operation
from tests.lint_rules_test import stock
from tests.refusals import refusals
from tests.replicas import two_replicas
from tfamp import Proof, prove
from tfamp.machine.speeds import Device
from tfamp.stepping.step_traces import Roofline, computing, num_bytes

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
    return stacked(
        (512,), dense, L.Dense(outputs, dtype="float32", name="head"), name="two"
    )


ZEROS = tuple(tf.zeros((8, n)) for n in (512, 10))


def batch_of(*shapes, size=8):
    """Returns a batch (x, y) of zeros."""
    return tuple(tf.zeros((size, *shape)) for shape in shapes)


def rows(proof):
    """Returns {(layer, direction): [(dtype, count), ...]} of a proof's products."""
    found = {}
    for product in proof.operations:
        key = product.layer, product.direction
        found.setdefault(key, []).append((product.dtype, product.count))
    return found


def num_products(proof):
    """Returns {layer: (products forward, products backward)}."""
    found = {}
    for product in proof.operations:
        counts = found.setdefault(product.layer, [0, 0])
        counts[product.direction != "forward"] += product.count
    return {layer: tuple(counts) for layer, counts in found.items()}


def causes(proof):
    """Returns {name: cause} of a proof."""
    return {cause.name: cause for cause in proof.causes}


# The first layer needs no gradient of its inputs: two products, not three.
HEAD_FLOPS = 3 * 2 * 8 * 512 * 10
DENSE_FLOPS = 2 * 2 * 8 * 512 * 512


@pytest.mark.parametrize(
    "policy, half", [("mixed_bfloat16", "bfloat16"), ("mixed_float16", "float16")]
)
def test_the_share_in_half_precision_is_exact(policy, half):
    proof = prove(dense_and_head(policy=policy), ZEROS, batch_size=8)
    assert proof.flops == DENSE_FLOPS + HEAD_FLOPS
    assert proof.half_share_of_flops == DENSE_FLOPS / (DENSE_FLOPS + HEAD_FLOPS)
    assert rows(proof) == {
        ("dense", "forward"): [(half, 1)],
        ("dense", "backward"): [(half, 1)],
        ("head", "forward"): [("float32", 1)],
        ("head", "backward"): [("float32", 1)] * 2,
    }
    assert (proof.model, proof.step, proof.batch_size) == ("two", "train", 8)
    assert proof.notes == ()


def test_products_tell_their_shapes_and_types():
    proof = prove(dense_and_head(), ZEROS)
    forward = proof.operations[0]
    assert forward.op_type == "MatMul"
    assert forward.name.endswith("dense_1/MatMul")
    assert "tfamp" not in forward.name
    assert (forward.shapes, forward.output_shape) == (((8, 512), (512, 512)), (8, 512))
    assert forward.flops == 2 * 8 * 512 * 512


def test_convolutions_tell_both_factors_of_a_gradient():
    layers = L.Conv2D(3, 3, name="first"), L.Conv2D(4, 3, name="second")
    proof = prove(stacked((6, 6, 2), *layers), batch_of((6, 6, 2), (2, 2, 4)))
    assert {(p.layer, p.op_type): p.shapes for p in proof.operations} == {
        ("first", "Conv2D"): ((8, 6, 6, 2), (3, 3, 2, 3)),
        ("first", "Conv2DBackpropFilter"): ((8, 6, 6, 2), (8, 4, 4, 3)),
        ("second", "Conv2D"): ((8, 4, 4, 3), (3, 3, 3, 4)),
        ("second", "Conv2DBackpropInput"): ((3, 3, 3, 4), (8, 2, 2, 4)),
        ("second", "Conv2DBackpropFilter"): ((8, 4, 4, 3), (8, 2, 2, 4)),
    }


def test_a_float32_model_has_no_casts_and_says_why_it_is_float32():
    model = dense_and_head(policy="float32")
    proof = prove(model, ZEROS, devices=[AMX_CPU])
    assert proof.half_share_of_flops == 0.0
    assert proof.casts == ()
    assert {name: cause.figure for name, cause in causes(proof).items()} == {
        "float32": 1.0
    }
    cause = causes(proof)["float32"]
    assert cause.message == (
        "Every matrix product and convolution runs in float32: 'dense' and 'head' "
        "(its dtype policy says so, no rule of tfamp)."
    )
    assert cause.remedy.startswith("Call `tfamp.apply(model, 'mixed_bfloat16')`")
    slow = prove(model, ZEROS, devices=[OLD_CPU])
    assert causes(slow)["float32"].remedy == (
        "Leave it: Old Xeon has no bfloat16 instructions (amx_bf16 or avx512_bf16)."
    )


def classifier():
    """Returns a model with a head that only tfamp keeps in float32."""
    hidden = L.Dense(32, activation="relu", name="hidden")
    return stacked((16,), hidden, L.Dense(4, name="head"))


def test_stock_keras_and_tfamp_show_their_own_dtypes():
    data = batch_of((16,), (4,))
    with stock("mixed_bfloat16"):
        theirs = prove(classifier(), data)
    with tfamp.scope("mixed_bfloat16"):
        ours = prove(classifier(), data)
    assert theirs.half_share_of_flops == 1.0
    assert "float32" not in causes(theirs)
    hidden, head = 2 * 2 * 8 * 16 * 32, 3 * 2 * 8 * 32 * 4
    assert ours.half_share_of_flops == hidden / (hidden + head)
    assert causes(ours)["float32"].figure == head / (hidden + head)
    assert causes(ours)["float32"].message.endswith(
        "'head' (default: heads: makes an output of the model, which feeds the loss)."
    )
    assert "(default: heads: makes an output" in ours.table().replace("\n   ", " ")


class InFloat32(L.Layer):
    """Multiplies in float32, whatever it computes in."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4))

    def call(self, x):
        return tf.matmul(tf.cast(x, tf.float32), tf.cast(self.kernel, tf.float32))


def test_code_that_multiplies_in_float32_is_named():
    layer = InFloat32(dtype="mixed_bfloat16", name="own")
    proof = prove(stacked((16,), layer), batch_of((16,), (4,)))
    expected = "'own' (computes in bfloat16, its own code in float32)."
    assert causes(proof)["float32"].message.endswith(expected)


def nested():
    """Returns a model with a layer used twice and a model inside."""
    shared = L.Dense(8, name="shared")
    # A name as TensorFlow would give the second use of "shared".
    other = L.Dense(8, name="shared_1")
    inner = keras.Sequential(
        [keras.Input((8,)), L.Dense(8, name="dense"), L.Dense(8, name="out")],
        name="inner",
    )
    inputs = keras.Input((8,))
    outputs = inner(other(shared(shared(inputs))))
    outputs = L.Dense(8, name="dense")(outputs)
    return keras.Model(inputs, outputs), ((8,), (8,))


def attending():
    """Returns attention over six tokens."""
    inputs = keras.Input((6, 8))
    x = L.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    return keras.Model(inputs, L.Dense(8, name="dense")(x)), ((6, 8), (6, 8))


def recurrent():
    """Returns two ways of running over six steps."""
    inputs = keras.Input((6, 8))
    x = L.LSTM(4, return_sequences=True, name="lstm")(inputs)
    x = L.TimeDistributed(L.Dense(3, name="each"), name="over")(x)
    return keras.Model(inputs, x), ((6, 8), (6, 3))


class Block(L.Layer):
    """A block of two layers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = L.Dense(8, name="a"), L.Dense(8, name="b")

    def call(self, x):
        return self.second(self.first(x))


class Subclassed(keras.Model):
    """A subclassed model with a list of blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = [Block(name="block_0"), Block(name="block_1")]

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x @ tf.ones((8, 8), x.dtype)


def subclassed():
    return Subclassed(), ((8,), (8,))


def recomputed():
    """Returns a layer whose forward pass runs again backwards."""

    class Recomputed(L.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = L.Dense(8, name="inside", activation="tanh")

        def call(self, x):
            return tf.recompute_grad(self.dense)(x)

    layers = [L.Dense(8, name="before"), Recomputed(name="again")]
    return keras.Sequential([keras.Input((8,)), *layers]), ((8,), (8,))


# Layer -> products forward and backward. The inputs need no gradient, so the first
# layer that sees them has one backward where others have two.
ATTRIBUTED = {
    "nested": (
        nested,
        {
            "shared": (2, 3),
            "shared_1": (1, 2),
            "inner/dense": (1, 2),
            "inner/out": (1, 2),
            "dense": (1, 2),
        },
    ),
    "attention": (
        attending,
        {
            "attention/query": (1, 1),
            "attention/key": (1, 1),
            "attention/value": (1, 1),
            "attention": (2, 4),
            "attention/attention_output": (1, 2),
            "dense": (1, 2),
        },
    ),
    # A step of the cell has two products; the inputs of the loop need no gradient.
    "recurrent": (recurrent, {"lstm/lstm_cell": (12, 18), "over/each": (6, 12)}),
    "subclassed": (
        subclassed,
        {
            "block_0/a": (1, 1),
            "block_0/b": (1, 2),
            "block_1/a": (1, 2),
            "block_1/b": (1, 2),
            "subclassed": (1, 1),
        },
    ),
    "recomputed": (recomputed, {"before": (1, 1), "again/inside": (2, 2)}),
}


@pytest.mark.quick("mixed_bfloat16-attention", "float32-subclassed")
@pytest.mark.parametrize("make, expected", ATTRIBUTED.values(), ids=ATTRIBUTED)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_every_product_is_attributed_to_its_layer(make, expected, policy):
    with stock(policy):
        model, shapes = make()
        compiled(model)
        found = num_products(prove(model, batch_of(*shapes)))
        again = num_products(prove(model, batch_of(*shapes)))
    paths = {row.path for row in tfamp.assignment(model)}
    if "subclassed" in expected:
        expected = {
            model.name if k == "subclassed" else k: v for k, v in expected.items()
        }
    assert found == again == expected
    assert set(found) <= paths


def test_functions_that_were_traced_before_are_told_by_names():
    class Traced(L.Layer):
        def __init__(self):
            super().__init__(name="traced")
            self.dense = L.Dense(8, name="inside")
            self.other = L.Dense(8, name="inside_1")

        @tf.function
        def call(self, x):
            return self.other(self.dense(x))

    model = keras.Sequential([keras.Input((8,)), Traced()])
    model(tf.zeros((8, 8)))
    proof = prove(model, batch_of((8,), (8,)), training=False)
    assert num_products(proof) == {"traced/inside": (1, 0), "traced/inside_1": (1, 0)}


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


def test_casts_are_counted_with_their_bytes():
    model = stacked((3,), L.Dense(4, dtype="mixed_bfloat16", name="dense"))
    proof = prove(model, batch_of((3,), (4,)))
    found = {
        (c.layer, c.what, c.source_dtype): (c.count, c.elements, c.moved_bytes)
        for c in proof.casts
    }
    # A kernel of 3 x 4 and a bias of 4; six bytes for each number, read and written.
    assert found["dense", "weights", "float32"] == (2, 16, 16 * 6)
    assert found["dense", "weight gradients", "bfloat16"] == (2, 16, 16 * 6)
    assert found["dense", "activations", "float32"] == (1, 24, 24 * 6)
    # The loss takes the outputs in float32.
    assert found["", "activations", "bfloat16"] == (1, 32, 32 * 6)
    assert found["", "activation gradients", "float32"] == (1, 32, 32 * 6)
    assert len(found) == 5
    sizes = [cast.moved_bytes for cast in proof.casts]
    assert sizes == sorted(sizes, reverse=True)


def test_casts_in_a_loop_count_each_step():
    inputs = keras.Input((6, 8))
    layer = L.LSTM(4, dtype="mixed_bfloat16", name="lstm")
    model = compiled(keras.Model(inputs, layer(inputs)))
    proof = prove(model, batch_of((6, 8), (4,)))
    found = {
        cast.what: (cast.count, cast.elements)
        for cast in proof.casts
        if cast.layer == "lstm/lstm_cell"
    }
    weights = 8 * 16 + 4 * 16 + 16
    assert found == {
        "weights": (18, 6 * weights),
        "weight gradients": (18, 6 * weights),
    }


def state_of(model):
    """Returns every bit that a training step could change."""
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    return [np.asarray(variable).tobytes() for variable in variables]


class Drawing(L.Layer):
    """Draws from Python and NumPy whenever it is traced."""

    def call(self, x):
        return x * (1.0 + random.random()) + np.random.rand()


@pytest.mark.quick("float32")
@pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow:UserWarning")
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_nothing_changes(policy):
    with tfamp.scope(policy):
        layers = L.Dense(8), L.BatchNormalization(), L.Dropout(0.5, seed=1), Drawing()
        model = keras.Sequential([keras.Input((8,)), *layers, L.Dense(4)])
        model.compile("adam", "mse", metrics=["mae"])
    data = tuple(tf.random.stateless_normal((8, n), (n, 1)) for n in (8, 4))
    prove(model, data)
    before, called = state_of(model), keras.layers.Layer.__call__
    dtypes = tfamp.assignment(model)
    random.seed(3)
    first, first_of_numpy = random.getstate(), np.random.get_state()[1].tobytes()
    prove(model, data)
    assert state_of(model) == before
    assert keras.layers.Layer.__call__ is called
    assert random.getstate() == first
    assert np.random.get_state()[1].tobytes() == first_of_numpy
    assert tfamp.assignment(model) == dtypes
    assert getattr(model, "train_function", None) is None


def test_nothing_stays_marked_after_an_error():
    class Failing(L.Layer):
        def call(self, x, training=False):
            if training:
                raise RuntimeError("not today")
            return x

    model = stacked((8,), Failing(), L.Dense(4))
    called = keras.layers.Layer.__call__
    with pytest.raises(RuntimeError, match="not today"):
        prove(model, batch_of((8,), (4,)))
    assert keras.layers.Layer.__call__ is called


def test_replicas_count_as_one_step_of_the_whole_batch():
    data = tf.data.Dataset.from_tensors(ZEROS)
    alone = prove(dense_and_head(), data)
    strategy = two_replicas()
    with strategy.scope():
        model = dense_and_head()
        before = state_of(model)
    both = prove(model, data)
    assert both.flops == alone.flops
    assert both.half_share_of_flops == alone.half_share_of_flops
    assert [p.layer for p in both.operations] == [p.layer for p in alone.operations]
    assert {product.count for product in both.operations} == {2}
    assert both.operations[0].shapes == ((4, 512), (512, 512))
    assert state_of(model) == before


def test_a_step_that_xla_compiles_is_told_where_its_program_is():
    layer = L.Dense(16, dtype="mixed_bfloat16")
    model = compiled(keras.Sequential([keras.Input((512,)), layer]), jit_compile=True)
    (note,) = prove(model, batch_of((512,), (16,))).notes
    assert note.startswith("XLA compiles this step and may compute in other dtypes")
    assert "profile" in note


def cause_of(name, *, devices, model=None, size=8):
    """Returns one cause of the model of 512 units, None where it is not named."""
    model = model or dense_and_head()
    data = batch_of((512,), (10,), size=size)
    proof = prove(model, data, batch_size=size, devices=devices)
    figures = [cause.figure for cause in proof.causes]
    assert figures == sorted(figures, reverse=True)
    assert all(0 <= figure <= 1 for figure in figures)
    return causes(proof).get(name)


def test_a_device_without_the_instruction_is_a_cause():
    cause = cause_of("device", devices=[V100, OLD_CPU])
    assert cause.message == (
        "'mixed_bfloat16' will be slow or gain nothing here: Tesla V100 emulates "
        "bfloat16 (compute capability 7.0, needs 8.0)."
    )
    assert cause.remedy == "Use 'mixed_float16'."
    assert cause_of("device", devices=[A100]) is None
    # The CPU beside a GPU computes nothing.
    assert cause_of("device", devices=[A100, OLD_CPU]) is None


TF32 = {"A100": ([A100], True), "V100": ([V100], False), "CPU": ([AMX_CPU], False)}


@pytest.mark.parametrize("devices, expected", TF32.values(), ids=TF32)
def test_tf32_is_a_cause_where_the_device_has_it(devices, expected):
    assert (cause_of("TF32", devices=devices) is not None) is expected


def test_tf32_that_is_switched_off_is_no_cause():
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        assert cause_of("TF32", devices=[A100]) is None
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)


def test_shapes_are_a_cause_on_tensor_cores():
    model = dense_and_head(units=100)
    cause = cause_of("shapes", devices=[A100], model=model, size=20)
    assert cause.message == (
        "Sizes that are not multiples of 8 keep tensor cores from full speed: 'dense' "
        "rows 20 -> 24 and units 100 -> 104."
    )
    assert cause_of("shapes", devices=[AMX_CPU], model=model) is None
    assert cause_of("shapes", devices=[A100]) is None


def test_casts_and_float32_are_causes_with_their_figures():
    model = dense_and_head(outputs=256)
    proof = prove(model, batch_of((512,), (256,)), devices=[AMX_CPU])
    by_name = causes(proof)
    weights = 512 * 512 + 512
    inputs = 8 * 512
    # The head takes activations in float32, and hands gradients of them back.
    moved = 6 * (2 * weights + 3 * inputs)
    assert sum(cast.moved_bytes for cast in proof.casts) == moved
    share = moved / proof.moved_bytes
    assert by_name["casts"].message.startswith("7 casts move 3.1 MiB a step, ")
    assert f"{100 * share:.1f} % of all bytes" in by_name["casts"].message
    assert by_name["casts"].figure == share
    # Three products of the head for 256 columns, two of the other for 512.
    share = (3 * 256) / (3 * 256 + 2 * 512)
    assert by_name["float32"].figure == share
    assert by_name["float32"].message == (
        f"{100 * share:.1f} % of the FLOPs run in float32: 'head' (its dtype policy "
        "says so, no rule of tfamp)."
    )


def test_inference_has_no_gradients_and_needs_no_compile():
    model = keras.Sequential([L.Dense(4, name="dense")])
    proof = prove(model, batch_of((8,), (4,)), training=False)
    assert proof.step == "inference"
    assert num_products(proof) == {"dense": (1, 0)}
    model = compiled(model)
    again = prove(model, batch_of((8,), (4,)), training=False)
    assert again.flops == proof.flops == 2 * 8 * 8 * 4


def test_a_model_without_products_has_no_share():
    model = stacked((8,), L.LayerNormalization())
    proof = prove(model, batch_of((8,), (8,)))
    assert (proof.flops, proof.half_share_of_flops, proof.operations) == (0, 0.0, ())
    assert proof.causes == ()
    assert proof.notes == ("The step has no matrix product and no convolution.",)
    assert "convolutions: none" in proof.table()


def test_loops_that_data_end_are_noted():
    class Halving(L.Layer):
        def call(self, x):
            y = tf.while_loop(
                lambda y: tf.reduce_max(y) > 1.0,
                lambda y: tf.matmul(y, y) / 2,
                [tf.matmul(x, x, transpose_a=True)],
            )[0]
            return x @ y

    model = stacked((4,), L.Dense(4), Halving())
    (note,) = prove(model, batch_of((4,), (4,))).notes
    assert note.startswith("The FLOPs of 3 products are not known, the first is ")


def test_a_proof_goes_to_json_and_back():
    model = dense_and_head(units=100, outputs=100)
    proof = prove(model, batch_of((512,), (100,)), devices=[V100])
    assert Proof.from_json(proof.to_json()) == proof
    assert hash(Proof.from_json(proof.to_json())) == hash(proof)
    assert {"casts", "device", "shapes", "float32"} <= set(causes(proof))


def test_the_table_fits_and_leaves_out_what_is_too_much():
    layers = [L.Dense(4, name=f"layer_{i}") for i in range(40)]
    layers.insert(0, L.Dense(4, name=f"long_{'x' * 100}"))
    model = stacked((8,), *layers)
    text = str(prove(model, batch_of((8,), (4,)), devices=[A100]))
    assert max(map(len, text.splitlines())) <= 110
    table = text[: text.index("Why it is not faster")]
    assert "layer_38 " in table and "layer_39" not in table
    assert "and 1 layers more" in table


class Repeated(L.Layer):
    """Multiplies 20 times, in a loop of the graph or of Python."""

    def __init__(self, in_graph):
        super().__init__(name="repeated")
        self.in_graph = in_graph

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        if not self.in_graph:
            for _ in range(20):
                x = x @ self.kernel
            return x
        _, x = tf.while_loop(
            lambda i, x: i < 20, lambda i, x: (i + 1, x @ self.kernel), [0, x]
        )
        return x


def test_a_loop_counts_as_much_as_its_steps():
    for in_graph in (True, False):
        model = stacked((64,), Repeated(in_graph))
        proof = prove(model, batch_of((64,), (64,)), training=False, devices=[OLD_CPU])
        assert proof.flops == 20 * 2 * 8 * 64 * 64


MOVED = {
    "cast": (
        operation("Cast", ((3,),), ((3,),), SrcT="float32", DstT="bfloat16"),
        3 * 4 + 3 * 2,
    ),
    "product": (
        operation("MatMul", ((2, 3), (3, 4)), ((2, 4),), T="bfloat16"),
        2 * (6 + 12 + 8),
    ),
    "element-wise": (operation("Relu", ((5,),), ((5,),), T="float32"), 4 * 10),
    "unknown size": (operation("Relu", ((None,),), (None,), T="float32"), 0),
    "integers": (operation("AddV2", ((5,), (5,)), ((5,),), T="int32"), 0),
    "same memory": (operation("Reshape", ((5,), (1,)), ((5,),), T="float32"), 0),
}


def test_a_cpu_computes_only_when_it_is_alone():
    assert computing([A100, OLD_CPU]) == (A100,)
    assert computing([OLD_CPU]) == (OLD_CPU,)


@pytest.mark.parametrize("each, expected", MOVED.values(), ids=MOVED)
def test_moved_bytes_are_those_by_hand(each, expected):
    assert num_bytes(each) == expected


def test_a_product_costs_the_longer_of_computing_and_moving():
    small = operation("MatMul", ((2, 3), (3, 4)), ((2, 4),), T="float32")
    large = operation("MatMul", ((512, 512), (512, 512)), ((512, 512),), T="float32")
    roofline = Roofline([V100])
    assert roofline.cost(small) == num_bytes(small)
    assert roofline.cost(large) == pytest.approx(2 * 512**3 / 17)
    assert roofline.cost(large, "float16") == pytest.approx(
        max(2 * 512**3 / 140, num_bytes(large))
    )
    # It has no bfloat16, and the slower of two devices counts.
    assert roofline.flops_per_byte("bfloat16") == 17
    assert Roofline([A100, V100]).flops_per_byte("bfloat16") == 17
    assert Roofline([A100], tf32=True).flops_per_byte("float32") == 100


# Arguments in the place of good ones.
WRONG = {
    "no model": (
        {"model": "model"},
        "`model` is 'model', of type str; expected a compiled `keras.Model`.",
        TypeError,
    ),
    "not compiled": (
        {"model": keras.Sequential(name="raw")},
        "Model 'raw' is not compiled; expected one that `fit` takes.",
    ),
    "empty": (
        {"data": tf.data.Dataset.from_tensors(ZEROS).take(0)},
        "`dataset` holds no batches; expected at least one.",
    ),
    "generator": (
        {"data": (batch for batch in [])},
        "`data` holds no batches; expected at least one.",
    ),
    "one array": (
        {"data": np.zeros((8, 512))},
        "expected what `fit` takes",
        TypeError,
    ),
    "a number": (
        {"data": 7},
        "`data` is of type int; expected what `fit` takes: a `tf.data.Dataset` of",
        TypeError,
    ),
    "lengths": (
        {"data": (np.zeros((8, 512)), np.zeros((7, 10)))},
        "`data` holds arrays of shapes ((8, 512), (7, 10)); expected the same number "
        "of examples in each. Cut them to one length.",
    ),
    "single examples": (
        {"data": tf.data.Dataset.from_tensors((tf.zeros(512), tf.zeros(())))},
        "expected batches, as `fit` takes them. Add `.batch(32)`.",
    ),
    "batch size": (
        {"batch_size": 0},
        "`batch_size` is 0; expected an integer of at least 1.",
    ),
}


test_wrong_arguments_are_named_with_a_remedy = refusals(
    WRONG,
    lambda given: prove(**{"model": dense_and_head(), "data": ZEROS, **given}),
)
