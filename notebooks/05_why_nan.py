# %% [markdown]
# # Why is my loss NaN?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](COLAB_URL)
#
# A NaN has many fathers: a bad example, a layer beyond float16's range, a learning rate
# that is too high, a loss scale, a log of zero. By the time the loss shows it the
# weights are gone, and half precision hides some of it: a ReLU turns NaN into 0, and a
# loss scale turns a broken model into steps that are skipped without a word.
# [tfamp](REPOSITORY_URL) finds what half precision would break before you train, names
# the cause when a step has failed, and puts a run back on its feet.
#
# You will learn
#
# - which layers of a model are unsafe in float16, and why,
# - which numbers lie beyond which format,
# - what to read from a step that failed, and how to look into it days later,
# - how training goes on after a failure, without losing what was good.
#
# It takes two minutes on a CPU or a GPU.

# %%
# %pip install -q "tfamp[data,report] @ git+REPOSITORY_URL"

# %% tags=["parameters"]
EPOCHS = 8

# %%
import os
import pathlib
import tempfile
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tfamp

# %%
# float16 is slow on CPUs, which does not matter here: the network is small.
warnings.filterwarnings("ignore", message="'mixed_float16' will be slow")
print("Keras", keras.__version__, "on TensorFlow", tf.__version__)

# %% [markdown]
# ## The data and a model with a weak spot
#
# Scikit-learn's digits, 64 numbers each, need no network. The layer `energy` squares
# activations that are scaled up: harmless in float32, and beyond 65504, the largest
# number of float16.

# %%
digits = load_digits()
images = (digits.data / 16).astype("float32")
is_test = np.arange(len(images)) % 5 == 0
train = (images[~is_test], digits.target[~is_test])
test = (images[is_test], digits.target[is_test])


class Energy(keras.layers.Layer):
    """Returns the size of x, by way of numbers a million times as large."""

    def call(self, x):
        """Returns numbers of the size of the inputs."""
        return keras.ops.sqrt(keras.ops.square(x * 1000.0) + 1.0) / 1000.0


# %%
def build_model():
    """Returns a small compiled network for digits."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu", name="trunk"),
            Energy(name="energy"),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            keras.layers.Dense(10, activation="softmax", name="head"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


# %% [markdown]
# ## Before training: what would half precision break?
#
# `sensitivity` runs one float32 step on a few batches, and then every layer again,
# alone, in float16, forward and backward, on what it got in float32. An error counts
# against the spread over the batch, since that is what the next layer learns from.

# %%
keras.utils.set_random_seed(0)
model = build_model()
found = tfamp.sensitivity(model, train, dtype="float16")
print(found)

# %% [markdown]
# **What to see.** One layer is named, with the number that does not fit; all others
# are off by a thousandth or less. bfloat16 has float32's range, so there the same model
# is safe, with fewer digits:

# %%
print(tfamp.sensitivity(model, train, dtype="bfloat16").verdict)

# %% [markdown]
# ## How large are the numbers?
#
# `ranges` counts weights, activations and gradients by exponent. Each bar is where the
# numbers of a layer lie; the bands are what each format holds. Gradients are small, and
# a loss scale shifts them up: the best one is told.

# %%
from IPython.display import Image, display

folder = pathlib.Path(tempfile.mkdtemp())
seen = tfamp.ranges(model, train)
seen.plot(folder / "ranges.png")
display(Image(folder / "ranges.png"))
print("best loss scale:", seen.best_loss_scale)

# %% [markdown]
# ## What does a look at the model say?
#
# `lint` needs no step: it reads layers, loss, optimizer and a trace for traps that are
# known, each with its remedy. Under stock Keras the head of a `mixed_float16` model is
# one of them; under tfamp's policy it stays in float32 by itself.

# %%
before = keras.config.dtype_policy().name
keras.config.set_dtype_policy("mixed_float16")
stock = build_model()
keras.config.set_dtype_policy(before)
print(tfamp.lint(stock, data=train))

# %% [markdown]
# ## A run that fails
#
# Now the advice is ignored: the same model under `mixed_float16`.

# %%
keras.utils.set_random_seed(0)
with tfamp.scope("mixed_float16"):
    broken = build_model()
why = tfamp.triage(broken, (train[0][:64], train[1][:64]))
print(why)

# %% [markdown]
# **What to see.** The step is replayed as it is, in float32, and without a loss scale.
# Only float32 is finite, so precision is to blame; kept in float32, the layer is cured,
# and so is the step. The file and line are those of its `call`.
#
# A damaged example looks the same from outside, a loss of NaN, and is told apart:

# %%
damaged = (train[0].copy(), train[1])
damaged[0][500, 20] = np.nan
print(tfamp.triage(broken, (damaged[0][480:512], damaged[1][480:512])))

# %% [markdown]
# ## What if it fails at night?
#
# `NanRecovery` keeps good snapshots and the batches since, and writes the step that
# fails into a folder. Here it meets the damaged example, in float32, and only keeps
# it: with `max_recoveries=0` nothing is mended.

# %%
keras.utils.set_random_seed(0)
with tfamp.scope("float32"):
    left_alone = build_model()
keeper = tfamp.callbacks.NanRecovery(
    folder / "kept", max_recoveries=0, on_exhausted="stop"
)
left_alone.fit(*damaged, batch_size=32, epochs=1, verbose=0, callbacks=[keeper])
bundle = keeper.bundles[0]
print(sorted(path.name for path in pathlib.Path(bundle).iterdir()))

# %% [markdown]
# The loss was finite to the end: the ReLU had made 0 of NaN. The weights were not,
# which the callback saw.
#
# Any later process can ask about it, with the model at hand or with the one in the
# bundle, `tfamp.load_model(f"{bundle}/model.keras")`:

# %%
print(tfamp.triage(left_alone, bundle))

# %% [markdown]
# ## What if it should just go on?
#
# By itself it goes back to the last snapshot that was verified good and does what the
# triage advises. This run has both faults, the layer and the damaged example, which
# comes again in every epoch. `every_seconds=0` takes a snapshot at every step,
# which suits a model as small as this; without it they take 1 % of the time.

# %%
keras.utils.set_random_seed(0)
with tfamp.scope("mixed_float16"):
    guarded = build_model()
recovery = tfamp.callbacks.NanRecovery(
    folder / "good", every_seconds=0, max_recoveries=12
)
run = guarded.fit(
    *damaged, batch_size=32, epochs=EPOCHS, verbose=0, callbacks=[recovery]
)
for each in recovery.recoveries:
    print(each.line())

# %%
keras.utils.set_random_seed(0)
with tfamp.scope("float32"):
    healthy = build_model()
healthy.fit(*train, batch_size=32, epochs=EPOCHS, verbose=0)
for name, each in {"healthy": healthy, "with two faults": guarded}.items():
    print(f"{name:18} accuracy {each.evaluate(*test, verbose=0)[1]:.3f}")

# %% [markdown]
# **What to see.** Each failure has its cause and its remedy, and the run ends about as
# well as one without faults. `History` has the number of recoveries of each epoch, and
# a file in the folder has each of them, so that nobody takes a mended run for a clean
# one.
#
# ## Where to go next
#
# - [Recipes](REPOSITORY_URL/tree/main/recipes): complete scripts to break and to mend.
# - [docs/lint.md](REPOSITORY_URL/blob/main/docs/lint.md): every trap that `lint`
#   knows, with its remedy.
# - [docs/triage.md](REPOSITORY_URL/blob/main/docs/triage.md): what is in a bundle.
# - [The loss-scale notebook](REPOSITORY_URL/blob/main/notebooks/02_loss_scale.ipynb):
#   why steps are skipped, and when that is a sign.
