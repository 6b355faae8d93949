# %% [markdown]
# # Which layers need float32?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](COLAB_URL)
#
# Rules that keep a softmax in float32 know Keras's layers, and not yours. One layer
# that goes beyond float16's range is enough for a model that does not learn, and to
# keep "everything that looks risky" in float32 gives away what half precision was for.
# [tfamp](REPOSITORY_URL) measures instead: which policy is faster for this very step,
# and which layers have to stay in float32 for a metric to stay what it is.
#
# You will learn
#
# - what a layer that overflows looks like from outside: like nothing at all,
# - how `tfamp.enable` finds such a layer by itself,
# - how to time your own training step under each policy,
# - how to find the layers that need float32, and to read what was tried,
# - how to keep the answer in a file and train under it,
# - what default rules cost you, and what a model that only predicts may do,
# - how a run that repaired itself hands on what it found.
#
# It takes a minute on a CPU or a GPU.

# %%
# %pip install -q "tfamp[data,report] @ git+REPOSITORY_URL"

# %% tags=["parameters"]
EPOCHS = 4
SECONDS = 6
NUM_SEEDS = 2

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
folder = pathlib.Path(tempfile.mkdtemp())
# float16 is slow on CPUs, which does not matter here: the network is small.
warnings.filterwarnings("ignore", message="'mixed_float16' will be slow")
print("Keras", keras.__version__, "on TensorFlow", tf.__version__)

# %% [markdown]
# ## The data and a model with a layer of its own
#
# Scikit-learn's digits with pixels of 0 to 255, as images have them. `UnitLength`
# divides by the length of each example, so that brightness does not matter. Its sum of
# squares is of no concern in float32, and beyond 65504, the largest number of float16.

# %%
digits = load_digits()
images = (digits.data * 255 / 16).astype("float32")
is_test = np.arange(len(images)) % 5 == 0
train = (images[~is_test], digits.target[~is_test])
test = (images[is_test], digits.target[is_test])


class UnitLength(keras.layers.Layer):
    """Divides each example by its length."""

    def call(self, x):
        """Returns examples of length 1, or 0 where they are 0."""
        squares = keras.ops.sum(keras.ops.square(x), axis=-1, keepdims=True)
        return x / keras.ops.sqrt(squares + 1.0)


# %%
def build_model(seed=0, unit_length=UnitLength):
    """Returns a small compiled network for digits."""
    keras.utils.set_random_seed(seed)
    pixels = keras.Input((64,))
    x = keras.layers.Dense(64, activation="relu", name="trunk")(pixels)
    x = unit_length(name="length")(x)
    x = keras.layers.Dense(64, activation="relu", name="hidden")(x)
    x = keras.layers.LayerNormalization(name="norm")(x)
    outputs = keras.layers.Dense(10, activation="softmax", name="head")(x)
    model = keras.Model(pixels, outputs, name="digits")
    rate = keras.optimizers.Adam(3e-3)
    model.compile(rate, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


# %% [markdown]
# ## What does stock Keras make of it?
#
# The same model under `mixed_float16`, without tfamp, and in float32.


# %%
def accuracy_of(model):
    """Trains a model and returns its accuracy on the test images."""
    model.fit(*train, batch_size=32, epochs=EPOCHS, verbose=0)
    return model.evaluate(*test, verbose=0, return_dict=True)["accuracy"]


before = keras.config.dtype_policy()
keras.config.set_dtype_policy("mixed_float16")
stock = build_model()
keras.config.set_dtype_policy(before)
print(f"stock mixed_float16: accuracy {accuracy_of(stock):.3f}")

# %%
with tfamp.scope("float32"):
    model = build_model()
print(f"float32: accuracy {accuracy_of(model):.3f}")

# %% [markdown]
# **What to see.** No error, no warning, no NaN, and no step that the loss scale skips:
# just a model that does not learn. A sum of squares beyond the range is infinite, and
# what is divided by it is 0.
#
# ## Does tfamp see it by itself?
#
# No rule can know `UnitLength`. So the first `fit` under half precision tries your own
# layers on some examples of the first batch, once in float32 and once as they are
# managed. `check="keep"`, the default, keeps in float32 what half precision spoils, and
# says so in a line; `check="warn"` only warns, and `check=None` does not look.

# %%
for check in (None, "keep"):
    with tfamp.scope("mixed_float16", check=check):
        tried = build_model()
    accuracy, row = accuracy_of(tried), tfamp.assignment(tried)["length"]
    print(f"check={check!r}: accuracy {accuracy:.3f}, 'length' in {row.compute_dtype}")

# %% [markdown]
# **What to see.** With the check the model learns. That is one layer, tried on one
# batch; the rest of this notebook measures all layers by what they do to the metric.
#
# ## Is half precision worth it here at all?
#
# `measure_policies` takes the step that `fit` would run, under each policy, in turns on
# the same batches, and with XLA too where `jit_compile=False` does not leave it out. It
# picks nothing that is not shown to be faster than float32. The model is afterwards
# what it was, to the last bit.

# %%
budget = SECONDS
measured = tfamp.measure_policies(
    model, train, budget_seconds=budget, jit_compile=False
)
print(measured)

# %% [markdown]
# **What to see.** A CPU without units for half precision is best off in float32, and so
# is a network as small as this one. For a large one on a GPU it is another matter, and
# the rest of this notebook finds out how to use what the GPU has.
#
# ## Which layers need float32?
#
# `tune` runs each layer alone in float16, forward and backward, which ranks them; then
# it tries plans and compares what the trained model gives, example by example. Here the
# loss may grow by 2 %. Half of the test images choose the plan, the other half judges
# it once.

# %%
plan = tfamp.tune(model, train, policy="mixed_float16", tolerance=0.02, validation=test)
print(plan)

# %% [markdown]
# **What to see.** Your layer is the one that "tune" decided. The normalization and the
# head were kept by default rules, which know them. All others are in float16.
#
# ## Why these?
#
# A plan keeps what was measured: how wrong each layer is alone in float16, what float16
# saves on it, and how much worse the loss was under each plan that was tried, with the
# bound that the tolerance is held against.

# %%
tuning = plan.evidence["tuning"]
for layer in sorted(tuning["layers"], key=lambda each: -float(each["forward_error"])):
    error, saving = float(layer["forward_error"]), float(layer["saving"])
    print(f"{layer['path']:30} error {error:.1e}, saves {saving:.1%}")
print(len(tuning["evaluations"]), "plans tried:", tuning["reason"])
for tried in tuning["evaluations"]:
    worse, bound = float(tried["worsening"]), float(tried["bound"])
    print(f"float32: {tried['float32']}, worse by {worse:.4f}, at most {bound:.4f}")

# %% [markdown]
# ## How is it used?
#
# A plan is a file: the dtype of every layer, who decided it, and what was measured. No
# code is run when it is read. A plan of another model is refused, with the first
# difference.

# %%
path = folder / "plan.json"
plan.to_json(path)
seeds = range(NUM_SEEDS)
accuracies = {"float32": [], "plan.json": []}
for policy, found in accuracies.items():
    tfamp.enable(policy=path if policy == "plan.json" else policy)
    found += [accuracy_of(build_model(seed)) for seed in seeds]
    tfamp.disable()
    print(f"{policy:10}", " ".join(f"{each:.3f}" for each in found))

# %% [markdown]
# **What to see.** Under the plan the model learns as well as in float32. How sure that
# is, `tfamp.compare` says with `policies=("float32", "plan.json")`, and its report
# shows how the plan was found.
#
# ## Where to go next
#
# - In a shell: `tfamp tune module:build --tolerance=0.005 --out=plan.json`, then
#   `tfamp compare module:build --policies=float32,plan.json`.
# - `tfamp.tune` takes a function that builds a model, too, and trains it for a moment.
# - [recipes/tune_precision.py](REPOSITORY_URL/blob/main/recipes/tune_precision.py):
#   measures, tunes and trains under what it found.
# - [Is it worth it?](REPOSITORY_URL/blob/main/notebooks/04_is_it_worth_it.ipynb)
#   makes a verdict of two policies, and
#   [Why is my loss NaN?](REPOSITORY_URL/blob/main/notebooks/05_why_nan.ipynb) finds the
#   cause of a step that failed.
