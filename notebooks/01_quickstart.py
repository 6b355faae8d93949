# %% [markdown]
# # tfamp in ten minutes
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](COLAB_URL)
#
# Half-precision arithmetic makes training faster and smaller, and now and then wrong
# without a word. [tfamp](REPOSITORY_URL) gives a Keras model the fast arithmetic where
# it is safe and float32 where it is not.
#
# You will learn
#
# - what one line, `tfamp.enable()`, changes in a model,
# - which layers stay in float32, and why,
# - that a model trains to the same accuracy,
# - how to save it so that it loads with the same dtypes.
#
# It takes about three minutes, on a GPU or on a CPU.

# %%
# %pip install -q "tfamp[data,report] @ git+REPOSITORY_URL"

# %% tags=["parameters"]
EPOCHS = 15

# %% [markdown]
# ## One line, before the model
#
# `tfamp.enable(policy="auto")` looks at the devices and picks the policy that suits
# them. That may be float32: a machine without half-precision arithmetic would only get
# slower. This notebook wants to show half precision on any machine, so it names a
# policy: float16 on a GPU, where every generation since 2017 has it, and bfloat16 on a
# CPU. The status says what is in force, and which layers stay in float32.

# %%
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import tfamp

GPU = bool(tf.config.list_physical_devices("GPU"))
POLICY = "mixed_float16" if GPU else "mixed_bfloat16"
print(tfamp.enable(policy=POLICY))

# %% [markdown]
# ## What does one line change?
#
# This is ordinary Keras code. It takes images as `uint8` and does the scaling inside,
# so that the cast runs in the compute dtype of the model.


# %%
def build_model():
    """Returns a small convolutional network for 8x8 digits."""
    images = keras.Input((8, 8, 1), dtype="uint8")
    x = keras.layers.Rescaling(1 / 16, name="scale")(images)
    x = keras.layers.Conv2D(32, 3, activation="relu", name="edges")(x)
    x = keras.layers.Conv2D(64, 3, activation="relu", name="strokes")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.LayerNormalization(name="norm")(x)
    x = keras.layers.Dense(64, activation="relu", name="hidden")(x)
    outputs = keras.layers.Dense(10, activation="softmax", name="digit")(x)
    model = keras.Model(images, outputs)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


# %% [markdown]
# Here is that model. `tfamp.assignment` lists the dtypes of every layer and the rule
# behind each exception.
#
# **What to see.** Convolutions and the hidden layer compute in half precision; that is
# where the time goes. Every weight is stored in float32, or small updates would be
# rounded away. The normalization and the last layer compute in float32.

# %%
print(tfamp.assignment(build_model()))

# %% [markdown]
# ## Does it train as well?
#
# Scikit-learn brings 1,797 digits, so nothing is downloaded. Every fifth one is kept
# for the test. `tfamp.data.Pipeline` puts its steps into the right order by itself and
# returns a plain `tf.data.Dataset`.

# %%
from sklearn.datasets import load_digits

digits = load_digits()
images = digits.images[..., np.newaxis].astype("uint8")
test = np.arange(len(images)) % 5 == 0
data = tfamp.data.Pipeline.from_arrays(images[~test], digits.target[~test])
train_data = data.shuffle(seed=0).batch(64).prefetch().build()
test_data = (images[test], digits.target[test])
print(train_data.element_spec)

# %% [markdown]
# The same function trains twice. The seed is the same, so the two runs start from the
# same weights and see the same batches.


# %%
def train(policy):
    """Returns the model and its history, trained under `policy`."""
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy):
        model = build_model()
        # The pipeline has shuffled; without this Keras 3.15 warns that it will not.
        settings = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
        history = model.fit(train_data, validation_data=test_data, **settings)
    return model, history.history


runs = {policy: train(policy) for policy in ("float32", POLICY)}

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for policy, (_, history) in runs.items():
    epochs = np.arange(1, EPOCHS + 1)
    left.plot(epochs, history["loss"], label=policy)
    right.plot(epochs, history["val_accuracy"], label=policy)
    print(f"{policy:15} test accuracy {history['val_accuracy'][-1]:.3f}")
left.set(title="Training loss", xlabel="epoch", yscale="log")
right.set(title="Test accuracy", xlabel="epoch")
right.legend()
plt.show()

# %% [markdown]
# **What to see.** The curves lie on each other but for the noise that a change in the
# last digits always brings. On data this small neither is faster; what a policy brings
# on a real model is in the repository's benchmarks.

# %% [markdown]
# ## Why does the last layer stay in float32?
#
# A network says "surely yes" (a logit of 9) where the answer is no. That is the example
# it has most to learn from: the gradient of the loss with respect to the logit is
# $\sigma(9) - 0$, nearly 1. The next cell measures it, in float32, in float16 as Keras
# does it, and in float16 with tfamp.


# %%
def head_gradient(logit, dtype=None):
    """Returns d loss / d logit of a sigmoid head that should have said 0."""
    head = keras.layers.Dense(1, "sigmoid", kernel_initializer="ones", dtype=dtype)
    model = keras.Sequential([keras.Input((1,)), head])
    model.compile(loss="binary_crossentropy")
    with tf.GradientTape() as tape:
        prediction = model(tf.constant([[logit]]), training=True)
        loss = model.compute_loss(y=tf.zeros((1, 1)), y_pred=prediction)
    return float(tape.gradient(loss, head.bias)[0])


logits = np.arange(0.0, 15.0)
exact = [head_gradient(logit, "float32") for logit in logits]

# %%
# A layer with a dtype of its own is left alone, so this one is stock Keras's.
stock = [head_gradient(logit, "mixed_float16") for logit in logits]
with tfamp.scope("mixed_float16"):
    ours = [head_gradient(logit) for logit in logits]

print(f"wrong by 9: float32 {exact[9]:.4f}, stock {stock[9]:.4f}, tfamp {ours[9]:.4f}")
plt.figure(figsize=(6, 3.5), layout="constrained")
plt.plot(logits, exact, "k-", label="float32")
plt.plot(logits, stock, "s--", label="mixed_float16, stock Keras")
plt.plot(logits, ours, "o", label="mixed_float16, tfamp")
plt.gca().set(xlabel="the head is wrong by", ylabel="gradient")
plt.legend()
# %% [markdown]
# **What to see.** In stock float16 the gradient is exactly 0 from some point on: the
# sigmoid rounds to 1, and the network stops learning from its worst mistakes. No NaN,
# no warning. With tfamp the curve is float32's.
#
# A warning above that float16 is slow on this CPU is right: an explicit policy is
# obeyed, and the better one is named.

# %% [markdown]
# ## How do I keep it?
#
# `model.save` writes the dtypes into the file. `tfamp.load_model` brings them back,
# with the optimizer and its loss scale, in a fresh process and with no `enable`.

# %%
import tempfile

model, _ = runs[POLICY]
path = pathlib.Path(tempfile.mkdtemp()) / "digits.keras"
model.save(path)
loaded = tfamp.load_model(path)

same_dtypes = list(tfamp.assignment(loaded)) == list(tfamp.assignment(model))
before, after = (m.predict(images[test], verbose=0) for m in (model, loaded))
print("same dtypes:", same_dtypes)
print("same predictions, bit for bit:", np.array_equal(before, after))

# %% [markdown]
# ## Where to go next
#
# - `tfamp doctor` on the command line: what this machine has, and what is in the way.
# - [README](REPOSITORY_URL#readme): what tfamp fixes, with the check that shows each.
# - [Recipes](REPOSITORY_URL/tree/main/recipes): complete scripts to start from.
# - `help(tfamp.enable)`: static loss scales, and `keep_float32` for layers of your own,
#   which is added to the default rules unless "none" is in it.
