"""Replicas send gradients in half precision, and stay equal."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.arrays import assert_close
from tests.replicas import check_replicas_agree, on_both, two_replicas
from tfamp.loss_scale import gradients as sums

layers = keras.layers
F16, BF16, F32 = tf.float16, tf.bfloat16, tf.float32
X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(-1, keepdims=True)
# Six updates of weights near 1; the sum of two parts is rounded once in each.
SUM_TOLERANCE = {F16: 6 * 2.0**-11, BF16: 6 * 2.0**-8}

pytestmark = pytest.mark.filterwarnings("ignore:'.*float16' ")


@pytest.fixture(scope="module")
def strategy():
    return two_replicas()


@pytest.fixture(autouse=True)
def sent(monkeypatch):
    """The dtypes of the gradients that a replica sent last."""
    found, original = [], sums.summed

    def summed(context, values):
        found[:] = [v.dtype for v in values[:-2]]
        return original(context, values)

    monkeypatch.setattr(sums, "summed", summed)
    return found


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(
        sums.logging, "warning", lambda text, *values: lines.append(text % values)
    )
    sums._say_once.cache_clear()
    yield lines
    sums._say_once.cache_clear()


def network():
    keras.utils.set_random_seed(0)
    x = keras.Input((4,))
    h = layers.Dense(8, activation="tanh")(x)
    h = layers.LayerNormalization()(h)
    return keras.Model(x, layers.Dense(1)(h))


def trained(strategy, optimizer, *, make=network, **compiled):
    with strategy.scope():
        model = make()
        model.compile(optimizer(), "mse", **{"run_eagerly": True, **compiled})
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return model


def guarded(reduce_dtype="auto", *, scale=1024.0, **options):
    def make():
        return tfamp.LossScaleOptimizer(
            keras.optimizers.SGD(0.125, momentum=0.5),
            scale,
            reduce_dtype=reduce_dtype,
            **options,
        )

    return make


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "graph"])
def test_each_gradient_is_sent_in_the_dtype_its_layer_computed_in(
    strategy, sent, is_eager
):
    with tfamp.scope("mixed_float16"):
        model = trained(strategy, guarded(), run_eagerly=is_eager)
    # Kernel and bias of the layer in float16; the normalization and the head.
    assert sent == [F16, F16, F32, F32, F32, F32]
    check_replicas_agree(
        strategy, [*model.trainable_variables, *model.optimizer.variables]
    )
    with tfamp.scope("mixed_float16"):
        exact = trained(strategy, guarded(None), run_eagerly=is_eager)
    assert set(sent) == {F32}
    assert_close(model, exact, rtol=0, atol=SUM_TOLERANCE[F16])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "compiled"),
    [
        ({"accumulation_steps": 2}, {}),
        ({}, {"steps_per_execution": 3}),
        ({"accumulation_steps": 2}, {"steps_per_execution": 3}),
    ],
    ids=["accumulation", "three steps an execution", "both"],
)
def test_microbatches_and_steps_in_one_call_are_sent_likewise(
    strategy, sent, options, compiled
):
    def weights(reduce_dtype, **options):
        with tfamp.scope("mixed_float16"):
            make = guarded(reduce_dtype, **options)
            model = trained(strategy, make, run_eagerly=False, **compiled)
        num_applied = 3 if not options else 2  # the last window is flushed
        assert model.optimizer.applied_steps == num_applied
        check_replicas_agree(
            strategy, [*model.trainable_variables, *model.optimizer.variables]
        )
        return model.get_weights()

    found = weights("auto", **options)
    assert sent == [F16, F16, F32, F32, F32, F32]
    exact = weights(None, **options)
    assert set(sent) == {F32}
    assert_close(found, exact, rtol=0, atol=SUM_TOLERANCE[F16])
    assert any((own != wanted).any() for own, wanted in zip(found, exact, strict=True))


def test_a_step_of_one_device_is_compiled_with_it(said):
    with tfamp.scope("mixed_float16"):
        models = [
            trained(
                tf.distribute.get_strategy(),
                guarded(reduce_dtype),
                run_eagerly=False,
                jit_compile=True,
            )
            for reduce_dtype in ("auto", None)
        ]
    first, second = (model.get_weights() for model in models)
    assert_close(first, second)
    assert models[0].optimizer.applied_steps == 3
    assert len(said) == 1 and "has no effect" in said[0]


SENT_UNDER = {
    "mixed_bfloat16": [BF16, BF16, F32, F32, F32, F32],
    "float16": [F16, F16, F32, F32, F16, F16],
    "bfloat16": [BF16, BF16, F32, F32, BF16, BF16],
}


@pytest.mark.parametrize("policy", SENT_UNDER)
def test_enable_passes_it_on_under_every_policy(strategy, sent, said, policy):
    options = {"reduce_dtype": "auto"}
    with tfamp.scope(policy, loss_scale_options=options):
        model = trained(strategy, lambda: keras.optimizers.SGD(0.125))
    assert sent == SENT_UNDER[policy]
    optimizer = model.optimizer
    assert optimizer.dynamic == (policy == "float16")
    if not optimizer.dynamic:
        assert (optimizer.applied_steps, optimizer.scale) == (3, 1)
    check_replicas_agree(
        strategy, [*model.trainable_variables, *model.optimizer.variables]
    )
    assert not said


def test_one_replica_is_told_once_that_nothing_is_sent(said):
    for _ in range(2):
        trained(tf.distribute.get_strategy(), guarded("bfloat16"))
    assert [line.split(":")[0] for line in said] == [
        "`reduce_dtype='bfloat16'` has no effect"
    ]


def test_auto_is_told_to_do_nothing_where_no_layer_computes_in_half(strategy, said):
    trained(strategy, guarded())
    assert said == [
        "`reduce_dtype='auto'` leaves gradients in float32: none of 6 variables was "
        "read by a layer that computes in half precision."
    ]


@pytest.mark.parametrize(
    ("reduce_dtype", "by_hand", "expected"),
    [
        pytest.param("auto", False, [F16, F32], id="auto, tape"),
        pytest.param("auto", True, [F16, F32], id="auto, scaled by hand"),
        pytest.param("bfloat16", False, [BF16, BF16], id="bfloat16, tape"),
    ],
)
def test_loops_and_layers_of_stock_keras(
    strategy, sent, reduce_dtype, by_hand, expected
):
    with strategy.scope():
        half = layers.Dense(1, use_bias=False, dtype="mixed_float16")
        head = layers.Dense(1, use_bias=False, dtype="float32")
        half.build((None, 4)), head.build((None, 1))
        optimizer = guarded(reduce_dtype)()
    weights = [half.kernel, head.kernel]

    @tf.function
    def step():
        def on_replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(head(half(X)) ** 2)
                scaled = optimizer.scale_loss(loss) if by_hand else loss
            gradients = tape.gradient(scaled, [w.value for w in weights])
            optimizer.apply(gradients, weights)

        strategy.run(on_replica)

    step()
    assert sent == expected
    assert optimizer.applied_steps == 1


def test_a_weight_read_in_two_dtypes_is_sent_in_float32(strategy, sent):
    class Reader(layers.Layer):
        def __init__(self, kernel, dtype):
            super().__init__(dtype=dtype)
            self.kernel = kernel

        def call(self, x):
            return keras.ops.matmul(x, self.kernel)

    def tied():
        kernel = keras.Variable(np.eye(4, dtype="float32"), name="shared")
        x = keras.Input((4,))
        h = Reader(kernel, "mixed_float16")(x)
        return keras.Model(x, Reader(kernel, "float32")(h))

    trained(strategy, guarded(), make=tied)
    assert sent == [F32]


class Steps:
    """Two replicas with a weight, of which each is given its gradient."""

    def __init__(self, strategy, start, **options):
        self.strategy = strategy
        with strategy.scope():
            self.weight = keras.Variable(start)
            sgd = keras.optimizers.SGD(1.0)
            self.optimizer = tfamp.LossScaleOptimizer(sgd, **options)

    def take(self, *parts):
        """Takes a step; a part is a gradient, or (rows, indices) of a sparse one."""

        def part_of(context):
            return parts[context.replica_id_in_sync_group]

        def on_replica(part):
            value = self.weight.value
            with tf.GradientTape() as tape:
                if isinstance(part, tuple):
                    rows, indices = part
                    value = tf.gather(value, indices)
                else:
                    rows = part
                loss = tf.reduce_sum(value * rows)
            gradient = tape.gradient(loss, self.weight.value)
            self.optimizer.apply([gradient], [self.weight])

        given = self.strategy.experimental_distribute_values_from_function(part_of)
        self.strategy.run(on_replica, args=(given,))
        return on_both(self.strategy, self.weight)


def test_a_sum_that_overflows_in_float16_is_a_skipped_step(strategy):
    steps = Steps(strategy, [0.0], initial_scale=1024.0, reduce_dtype="float16")
    # At the scale 40960 on each: the sum is beyond 65504.
    part = np.array([40.0], "float32")
    assert steps.take(part, part) == [0.0]
    assert (steps.optimizer.skipped_steps, steps.optimizer.scale) == (1, 512.0)
    assert steps.take(part, part) == [-80.0]
    assert steps.optimizer.applied_steps == 1


def test_float16_is_sent_at_the_loss_scale(strategy):
    # 2**-26 is below the smallest number of float16, and so is a sum of two.
    part = np.array([2.0**-26], "float32")
    steps = Steps(strategy, [0.0], initial_scale=2.0**15, reduce_dtype="float16")
    assert steps.take(part, part) == [-(2.0**-25)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sparse_gradients_of_replicas_add_up(strategy, sent, dtype):
    steps = Steps(
        strategy, np.zeros((4, 1), "float32"), initial_scale=8.0, reduce_dtype=dtype
    )
    rows = np.array([[1.0], [2.0], [0.5]], "float32")
    weight = steps.take((rows, np.array([0, 0, 3])), (rows, np.array([3, 1, 0])))
    assert sent == [tf.as_dtype(dtype)]
    assert weight.ravel().tolist() == [-3.5, -2.0, 0.0, -1.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce_dtype": "fp16"}, "Unknown `reduce_dtype` 'fp16'; expected one of"),
        ({"reduce_dtype": "float32"}, "Unknown `reduce_dtype` 'float32'"),
    ],
)
def test_settings_out_of_range_are_told(options, message):
    for make in (
        lambda: tfamp.LossScaleOptimizer(keras.optimizers.SGD(), **options),
        lambda: tfamp.enable("mixed_float16", loss_scale_options=options),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            make()


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (
            "float32",
            {"reduce_dtype": "auto"},
            "`reduce_dtype` 'auto' has no effect under policy 'float32'",
        ),
        (
            "mixed_bfloat16",
            {"reduce_dtype": "auto", "initial_scale": 8.0},
            "`loss_scale` 'dynamic' has no effect under policy 'mixed_bfloat16'",
        ),
    ],
    ids=["auto", "scale"],
)
def test_options_that_would_do_nothing_are_refused(policy, options, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        tfamp.enable(policy, loss_scale_options=options)
