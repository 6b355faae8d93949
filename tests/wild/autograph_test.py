"""A `tf.function` made of layers, models and steps: AutoGraph has nothing to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]

# AutoGraph says of each function once in a process what it cannot rewrite.
PROGRAM = """
import json, sys
import keras, numpy as np, tensorflow as tf
from keras import layers
policy = sys.argv[1]
if policy != "stock":
    import tfamp
    tfamp.enable(policy)

def doubled(row):
    if tf.reduce_sum(row) > 0:  # AutoGraph makes a `tf.cond` of it, in stock Keras too
        return row * 2
    return row * 0

class Rows(layers.Layer):
    def call(self, x):
        return tf.map_fn(doubled, x)

class Residual(layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm = layers.LayerNormalization()
        self.mix = layers.Dense(4, kernel_initializer="identity")

    def call(self, x, training=None):
        return x + self.mix(self.norm(x))

class Small(keras.Model):
    def __init__(self):
        super().__init__()
        self.residual = Residual()
        self.head = layers.Dense(1, activation="sigmoid", kernel_initializer="ones")

    def call(self, x, training=None):
        return self.head(self.residual(x, training=training))

def functional():
    x = keras.Input((4,))
    h = layers.Dense(4, activation="softmax", kernel_initializer="identity")(x)
    return keras.Model(x, layers.Dense(1, kernel_initializer="ones")(h))

MADE = {
    "LSTM": lambda: keras.Sequential([layers.Reshape((4, 1)), layers.LSTM(3, seed=1)]),
    "Normalization": lambda: layers.Normalization(mean=1.0, variance=4.0),
    "CategoryEncoding": lambda: layers.CategoryEncoding(5, output_mode="count"),
    "Rows": Rows,
    "Small": Small,
    "functional": functional,
}
x = np.float32([[0, 1, 2, 3], [3, 2, 1, 0]])
found = {}
for name, make in MADE.items():
    layer = make()
    if name != "Rows":  # in eager code it is no graph
        layer(x)
    way = {"layer": layer, "call": layer.__call__}
    @tf.function
    def inside(inputs):
        if tf.reduce_sum(inputs) > 0:
            return layer(inputs)
        return layer(inputs * 2)
    answers = [tf.function(way)(tf.constant(x)) for way in way.values()]
    answers += [inside(tf.constant(x))]
    answers += list(tf.data.Dataset.from_tensors(x).map(layer))
    found[name] = [np.asarray(tf.cast(a, "float32")).tolist() for a in answers]

optimizers = {"SGD": keras.optimizers.SGD(0.0)}
if policy != "stock":
    optimizers["tfamp"] = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.0))
for name, optimizer in optimizers.items():
    model = functional()
    optimizer.build(model.trainable_variables)
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 3.0))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss
    # Four softmaxes sum to 1, and (1 - 3) ** 2 is 4.
    found[f"step of {name}"] = float(step(tf.constant(x)))

model = functional()
model.compile("sgd", "mse")
model.fit(x, np.full((2, 1), 3.0), verbose=0)
tf.function(model.test_step)((tf.constant(x), tf.ones((2, 1))))
tf.function(model.predict_step)(tf.constant(x))
for operation in ("softmax", "sigmoid", "log_softmax", "cumsum", "logsumexp"):
    tf.function(getattr(keras.ops, operation))(tf.constant(x))
print(json.dumps(found))
"""


def run(policy, folder):
    program = folder / "program.py"  # AutoGraph reads the source of functions
    program.write_text(PROGRAM)
    command = [sys.executable, "-W", "ignore", str(program), policy]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    assert "AutoGraph" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_what_a_tf_function_is_made_of_is_traced_in_silence(tmp_path):
    found = run("mixed_float16", tmp_path)
    for name, answers in found.items():
        if name.startswith("step"):
            assert answers == pytest.approx(4.0, abs=0.05)
            continue
        for answer in answers[1:]:
            np.testing.assert_allclose(answer, answers[0], atol=0.02, err_msg=name)
    assert found["Rows"][0] == [[0, 2, 4, 6], [6, 4, 2, 0]]
    assert found["CategoryEncoding"][0] == [[1, 1, 1, 1, 0]] * 2
    assert found["Normalization"][0][0] == [-0.5, 0, 0.5, 1]
