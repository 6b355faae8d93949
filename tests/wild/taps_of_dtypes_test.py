"""What the corpus is judged by sees half precision where it is."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.wild import corpus, taps
from tests.wild.programs.registry import Program, Trained

pytestmark = pytest.mark.filterwarnings("ignore")


def classifier():
    x, y = np.ones((8, 4), "float32"), np.zeros(8, "int32")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, "softmax")])
    yield model
    model.compile("sgd", "sparse_categorical_crossentropy")
    yield Trained(model.fit(x, y, verbose=0).history["loss"], model, x)


def test_stock_softmax_and_head_are_seen_in_half():
    program = Program("classifier", "", "", classifier)
    seen = corpus.run(program, "stock", "mixed_bfloat16").in_half()
    assert {"Softmax in bfloat16", "MatMul in bfloat16"} <= seen
    assert corpus.run(program, "float32").in_half() == set()
    assert corpus.run(program, "enable", "mixed_bfloat16").in_half() == set()


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
def test_a_loss_in_half_is_seen(is_graph):
    w = tf.Variable([1.0])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(w, "float16")))
        tape.gradient(loss, w)

    with taps.seen() as seen:
        (tf.function(step) if is_graph else step)()
    assert "gradient of a float16" in seen.losses
    assert seen.num_targets == 1


def test_a_sum_in_half_on_the_way_to_a_float32_loss_is_seen():
    w = tf.Variable([1.0])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.cast(tf.reduce_mean(tf.cast(w, "float16")), "float32")
        return tape.gradient(loss, w)

    with taps.seen() as seen:
        step()
    assert seen.losses == {"Mean in float16"}
