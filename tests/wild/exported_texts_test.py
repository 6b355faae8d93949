"""Models that take texts leave as SavedModels, however often, and XLA goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A process of its own: what went wrong here ended the whole of Python.
MODELS = """
import sys
import keras, numpy as np, tensorflow as tf, tfamp
from keras import layers

folder = sys.argv[1]
mails = np.array(["win money now", "meeting at noon", "money money", "see you"], object)
hours = np.array([[3.0], [12.0], [4.0], [18.0]], "float32")
spam = np.array([1, 0, 1, 0])

def spam_filter(seed):
    keras.utils.set_random_seed(seed)
    text = keras.Input((), dtype="string", name="mail")
    hour = keras.Input((1,), name="hour")
    words = layers.TextVectorization(output_mode="multi_hot")
    words.adapt(mails)
    x = layers.Concatenate()([words(text), layers.Rescaling(1 / 24)(hour)])
    model = keras.Model({"mail": text, "hour": hour},
                        layers.Dense(1, activation="sigmoid")(x))
    model.compile("adam", "binary_crossentropy")
    return model

def answers_alike(model, loaded, x, tensors):
    found, wanted = loaded.predict(x), np.asarray(model(tensors))
    np.testing.assert_allclose(found, wanted, atol=1e-6)

def under_xla():
    other = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    other.compile("sgd", "mse", jit_compile=True)
    other.fit(np.ones((8, 3)), np.ones((8, 1)), epochs=2, verbose=0)

x = {"mail": mails, "hour": hours}
tensors = {name: tf.constant(value) for name, value in x.items()}
"""
PROGRAM = """
for seed in (1, 2):  # the model, and the one trained anew, to one path
    model = spam_filter(seed)
    data = tf.data.Dataset.from_tensor_slices((x, spam)).batch(2)
    found = tfamp.export(model, f"{folder}/spam", format="saved_model", validation=data)
    assert found.parity is not None
    answers_alike(model, tfamp.load_exported(f"{folder}/spam"), x, tensors)
    under_xla()
"""


@pytest.mark.slow("a process for exports of two models")
def test_a_second_model_of_texts_and_xla_after_it_work(tmp_path):
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", f"{MODELS}{PROGRAM}", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
