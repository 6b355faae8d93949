# %% [markdown]
# # Smaller, faster, still right
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](COLAB_URL)
#
# A trained model can leave Keras for a runtime that only predicts, in float32, half
# precision or 8-bit integers. Which is fastest differs by model and processor, and
# integers may cost accuracy where nobody looks. [tfamp](REPOSITORY_URL) writes, loads
# and runs, compares and times before a file counts.
#
# You will learn
#
# - how to export a model with a check of its answers,
# - how to let the fastest right one be chosen,
# - how to predict without TensorFlow, and what that saves,
# - how to serve the file over HTTP,
# - how to train with the rounding of integers where they cost accuracy.
#
# It takes three minutes. Everything runs on the CPU, with or without a GPU.

# %%
# %pip install -q "tfamp[data,report,onnx,litert,serve] @ git+REPOSITORY_URL"

# %% tags=["parameters"]
EPOCHS = 10
SHADED_EPOCHS = 60
BUDGET_SECONDS = 40
NUM_CALLS = 300

# %%
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfamp

folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## A model to ship
#
# A small convolutional network on scikit-learn's digits, trained under whatever policy
# this machine computes fast.

# %%
status = tfamp.enable(policy="auto")
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8, 8, 1), name="image"),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.Dense(10, activation="softmax", name="digit"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
print(status.policy)

# %%
images, labels = load_digits(return_X_y=True)
images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
x, x_test, y, y_test = train_test_split(images, labels, test_size=0.3, random_state=0)
model.fit(x, y, epochs=EPOCHS, verbose=0)
print("test accuracy", round(model.evaluate(x_test, y_test, verbose=0)[1], 4))

# %% [markdown]
# ## Export it
#
# A copy goes back to float32, the runtime's own tools write it, the file is loaded and
# run, and its answers are compared with the model's on the test
# data. Nothing is written where it is worse than the tolerance allows.

# %%
data = {"calibration": x[:512], "validation": (x_test, y_test)}
plain = tfamp.export(model, folder / "plain", format="saved_model", **data)
print(plain)

# %% [markdown]
# ## Or let it choose
#
# `format="auto", dtype="auto"` writes every format that is installed in float32 and in
# integers, times them in turns, and keeps the fastest that is as good. What failed
# says why.

# %%
chosen = tfamp.export(
    model,
    folder / "chosen",
    format="auto",
    dtype="auto",
    budget_seconds=BUDGET_SECONDS,
    **data,
)
print(chosen)

# %% [markdown]
# Short test data cannot prove much: with some hundred examples a drop of half a percent
# is less than three of them. The verdict says so, and how many examples it would take.
#
# ## Predict without TensorFlow
#
# `load_exported` checks the files against their digests, runs nothing of them as
# Python, and imports the one runtime that the file needs.

# %%
loaded = tfamp.load_exported(folder / "chosen")
print(loaded.runtime, loaded.signature)
ours, theirs = loaded.predict(x_test), model.predict(x_test, verbose=0)
print("same digits:", np.mean(ours.argmax(axis=1) == theirs.argmax(axis=1)))


# %%
def microseconds(predict):
    """Returns how long one image takes: the median of many calls."""
    times = []
    for i in range(NUM_CALLS):
        image = x_test[i % len(x_test)][None]
        began = time.perf_counter()
        predict(image)
        times.append(1e6 * (time.perf_counter() - began))
    return np.median(times[len(times) // 10 :])


# %%
ways = {
    "model.predict": lambda image: model.predict(image, verbose=0),
    "SavedModel": tfamp.load_exported(folder / "plain").predict,
    f"chosen: {loaded.runtime}": loaded.predict,
}
times = {name: microseconds(predict) for name, predict in ways.items()}
figure, axes = plt.subplots(figsize=(6, 2))
bars = axes.barh(list(times), list(times.values()), color="tab:green")
axes.bar_label(bars, fmt="%.0f", padding=3)
axes.set(xscale="log", xlabel="microseconds for one image (median)")
axes.invert_yaxis()
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Integers by name
#
# int8 makes a file about four times smaller. Layers that integers spoil stay in
# float32, and are named.

# %%
small = tfamp.export(model, folder / "small", format="onnx", dtype="int8", **data)
print(f"{small.size_bytes / plain.size_bytes:.2f} of the SavedModel's bytes")
print("verdict:", small.verdict, "; kept in float32:", list(small.kept))

# %% [markdown]
# ## Serve it
#
# `tfamp serve` answers for these folders in the protocol of Triton and KServe, so that
# clients stay as they are when you move. It is a process of its own:

# %%
command = [sys.executable, "-m", "tfamp", "serve", str(folder / "chosen"), "--port=0"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
address = server.stdout.readline().split("Serving at ")[1].split(";")[0]

# %%
image = {"name": "image", "datatype": "FP32", "shape": [3, *x_test.shape[1:]]}
body = json.dumps({"inputs": [{**image, "data": x_test[:3].ravel().tolist()}]})
try:
    url = f"{address}/v2/models/chosen/infer"
    with urllib.request.urlopen(url, body.encode(), timeout=30) as answer:
        (output,) = json.load(answer)["outputs"]
    predictions = np.reshape(output["data"], output["shape"])
finally:
    server.terminate()
print("it says", predictions.argmax(axis=1), "and they are", y_test[:3])

# %% [markdown]
# ## Where integers cost accuracy
#
# The model above loses nothing; others do. Here the same digits stand in light and
# shade: 256 steps that reach up to the bright ones leave few to the dark ones.

# %%
light = np.random.default_rng(3).lognormal(0, 1.2, size=(len(images), 1))
shaded = (images.reshape(-1, 64) * light).astype("float32")
x, x_test, y, y_test = train_test_split(shaded, labels, test_size=0.4, random_state=0)
with tfamp.scope("float32"):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((64,))])
    model.add(keras.layers.Dense(64, activation="relu"))
    model.add(keras.layers.LayerNormalization())
    model.add(keras.layers.Dense(32, activation="relu"))
    model.add(keras.layers.Dense(10, activation="softmax"))
loss, rate = "sparse_categorical_crossentropy", keras.optimizers.Adam(3e-3)
model.compile(rate, loss, metrics=["accuracy"])
model.fit(x, y, batch_size=64, epochs=SHADED_EPOCHS, verbose=0)
print("float32", round(model.evaluate(x_test, y_test, verbose=0)[1], 3))


# %%
def accuracy_in_int8(name):
    """Returns the test accuracy of an int8 export of the model."""
    how = {"format": "onnx", "dtype": "int8", "scheme": "static"}
    made = tfamp.export(model, folder / name, calibration=x, **how)
    return np.mean(made.load().predict(x_test).argmax(axis=1) == y_test)


print("int8", round(accuracy_in_int8("rounded"), 3))

# %% [markdown]
# `quantize_aware` has the layers compute with the rounding of an int8 export, forward
# and backward, so that training can make up for it. `compile` and `fit` follow as
# always, at a lower rate, and the export takes the ranges over that training has seen.

# %%
tfamp.quantize_aware(model)
model.compile(keras.optimizers.Adam(3e-4), loss, metrics=["accuracy"])
model.fit(x, y, batch_size=64, epochs=max(1, 2 * SHADED_EPOCHS // 3), verbose=0)
print("with rounding", round(model.evaluate(x_test, y_test, verbose=0)[1], 3))
print("its int8 export", round(accuracy_in_int8("trained"), 3))

# %% [markdown]
# ## Where to go next
#
# - [Inference](REPOSITORY_URL/blob/main/docs/inference.md): what each format can hold,
#   and what counts as exported.
# - [Serving](REPOSITORY_URL/blob/main/docs/serving.md): settings, how fast
#   it answers, Triton, KServe, phones and browsers.
# - [A recipe](REPOSITORY_URL/blob/main/recipes/export_and_serve.py) that trains,
#   exports, serves and asks.
