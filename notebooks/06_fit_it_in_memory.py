# %% [markdown]
# # Will it fit into memory, and in which batch size?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](COLAB_URL)
#
# A run that dies of memory does so after minutes of loading, on a machine that others
# share, and the usual cure is to halve the batch until it works.
# [tfamp](REPOSITORY_URL) tells what a step will hold before it runs, finds the batch
# size that trains fastest within what there is, and keeps the update as large as it
# was where only a part of it fits.
#
# You will learn
#
# - what holds memory in a training step, and how much of each,
# - which batch size fits into a given memory, without a step,
# - which one trains fastest, which is rarely the largest,
# - what to do with the learning rate then,
# - four ways to need less: half precision, fewer activations, accumulation, and
#   frozen weights.
#
# It takes four to six minutes on two CPU cores.

# %%
# %pip install -q "tfamp[data,report] @ git+REPOSITORY_URL"

# %% tags=["parameters"]
MAX_BATCH_SIZE = 256
START = 32
TARGET = 512
MAX_PART = 256

# %%
import os
import pathlib
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# This process leaves the GPU's memory to the trials below.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import keras
import numpy as np
import tensorflow as tf

import tfamp

# %%
GPU = bool(tf.config.list_physical_devices("GPU"))
POLICY = "mixed_float16" if GPU else "mixed_bfloat16"
folder = pathlib.Path(tempfile.mkdtemp())
print("Keras", keras.__version__, "on TensorFlow", tf.__version__, "with", POLICY)

# %% [markdown]
# ## What is trained?
#
# A function that returns a compiled model. This one is small, and its images are not:
# that is what fills memory. Noise will do as data, since only its shapes matter.


# %%
def build_model():
    """Returns a compiled network for color images of 64x64 pixels."""
    images = keras.Input((64, 64, 3))
    x = images
    for _ in range(4):
        x = keras.layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.Activation("relu")(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    outputs = keras.layers.Dense(10, activation="softmax")(x)
    model = keras.Model(images, outputs, name="pixels")
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


# %%
rng = np.random.default_rng(0)
x = rng.normal(size=(512, 64, 64, 3)).astype("float32")
y = rng.integers(0, 10, len(x)).astype("int32")

# %% [markdown]
# ## Why does memory run out?
#
# `estimate_memory` traces the step as `fit` does, with loss and optimizer, and goes
# through its operations: each buffer lives from where it is made to its last reader.
# Nothing is run, so a model that is far too large for this machine has its answer too.

# %%
model = build_model()
estimate = tfamp.estimate_memory(model, 64, data=(x, y))
print(estimate)

# %% [markdown]
# **What to see.** Weights and the optimizer's slots are next to nothing here. Nearly
# all are activations: what each layer gave is kept, as its gradient needs it, until the
# backward pass comes back to it. They grow with the batch and the size of an example;
# weights, slots and gradients grow with the model alone. In a large transformer with
# short inputs it is the other way round, and then other cures help.
#
# ## Which batch size fits?
#
# From the sizes around the one that it is asked for an estimate knows how memory grows,
# and so the largest batch for any limit of what a step holds, as on a GPU.
# `measure=True` runs small steps instead, and tells of the whole process, as a
# container's limit does.

# %%
for policy in ("float32", POLICY):
    each = tfamp.estimate_memory(model, 256, policy=policy, data=(x, y))
    largest = each.largest_batch(16 * 10**9, multiple_of=8)
    print(f"{policy:15} batch 256 takes {each.peak_bytes / 2**20:,.0f} MiB, ", end="")
    print(f"a memory of 16 GB holds batches of {largest:,}")

# %% [markdown]
# **What to see.** Half precision halves activations, not everything: weights and slots
# stay in float32, and so do the sums inside BatchNormalization. A CPU without the
# instructions for bfloat16 computes by way of float32, and saves less.
#
# What is not in the estimate: Python, TensorFlow and its libraries, half a gigabyte or
# more of any process, the input pipeline, and what an allocator keeps for later. Leave
# a tenth free.
#
# ## Which batch size is fastest?
#
# The largest that fits is rarely the best: from some size on a device is busy, and
# more examples at once take more memory and more time, and an update is worth less.
# `find_batch_size` trains a few real steps of each size, in a process of its own, so
# that one that runs out of memory ends nothing but itself.

# %%
found = tfamp.find_batch_size(build_model, (x, y), max_batch_size=MAX_BATCH_SIZE)
print(found)

# %% [markdown]
# **What to see.** Speed grows with the batch as long as the device has room, then bends
# at the knee. The search ends there, or where memory ends. On a machine that does other
# things too, speeds scatter: run it when nothing else does.
#
# ## What if an update should be larger?
#
# Many papers train with batches of thousands. With `target_batch_size` the search looks
# for a batch that fits and goes into the target evenly; as many are added up to one
# update. `min_gain=None` asks for the largest batch, however fast.
#
# These trials give memory back as soon as it is free, as a GPU's allocator does, so
# that they measure what is held. A C library else keeps some for later.

# %%
os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"
os.environ["TF_ONEDNN_USE_SYSTEM_ALLOCATOR"] = "1"  # TensorFlow's own keeps all
larger = tfamp.find_batch_size(
    build_model,
    (x, y),
    start=START,
    max_batch_size=MAX_PART,
    target_batch_size=TARGET,
    min_gain=None,
)
print(larger)

# %% [markdown]
# ## Does the prediction hold?
#
# The trials have measured what their processes held at most. What all of them hold
# before the first batch is not the step's, so the curve is drawn from the smallest.

# %%
trials = {each.batch_size: each for each in larger.trials if each.fits}
measured = {n: trials[n].peak_bytes for n in sorted(trials)}
predicted = {n: estimate.bytes_at(n) for n in measured}
first = min(measured)
print(f"{'batch':>6} {'predicted':>12} {'measured':>12}  (MiB above batch {first})")
for n in measured:
    growth = predicted[n] - predicted[first], measured[n] - measured[first]
    print(f"{n:6} {growth[0] / 2**20:12,.0f} {growth[1] / 2**20:12,.0f}")

# %%
from IPython.display import Image, display
from matplotlib.figure import Figure

figure = Figure(figsize=(8, 4.5), layout="constrained")
axes = figure.subplots()
for curve, style, label in ((predicted, "-", "predicted"), (measured, "o", "measured")):
    heights = [(curve[n] - curve[first]) / 2**20 for n in measured]
    axes.plot(list(measured), heights, style, label=label)
axes.set_xlabel("batch size")
axes.set_ylabel(f"MiB above a batch of {first}")
axes.set_title("Peak memory of training, float32")
axes.grid(alpha=0.3)
axes.legend()
figure.savefig(folder / "measured.png", dpi=100)
display(Image(folder / "measured.png"))

# %% [markdown]
# **What to see.** The dots lie on the line or a little above it, by up to a sixth
# on a CPU: a process also holds the next batch of its input, and what threads work
# with. That is what the margin of a tenth is for, at least.
#
# ## What of the learning rate?
#
# A rate belongs to the size of an update. For SGD it grows with the batch, for Adam
# with its square root, after a warm-up; accumulation counts like a larger batch.

# %%
steps = larger.gradient_accumulation_steps
rate = tfamp.training.scale_learning_rate(
    1e-3,
    batch_size=larger.effective_batch_size,
    base_batch_size=32,
    rule="sqrt",
    warmup_steps=100,
)
adam = keras.optimizers.Adam(rate)
optimizer = tfamp.LossScaleOptimizer(
    adam, initial_scale=1.0, dynamic=False, accumulation_steps=steps
)
print([f"{float(rate(step)):.2e}" for step in (0, 50, 100, 1000)])

# %%
accumulating = build_model()
accumulating.compile(optimizer, "sparse_categorical_crossentropy")
size = larger.batch_size
accumulating.fit(x[: size * steps], y[: size * steps], batch_size=size, verbose=0)
print(f"{steps} batches of {size}, updates: {optimizer.applied_steps}")

# %% [markdown]
# ## What if even a small batch does not fit?
#
# `remat` keeps few activations and computes the others again in the backward pass: the
# same numbers, for about a third more time. The estimate knows it.

# %%
before = tfamp.estimate_memory(model, 64, data=(x, y))
lighter = tfamp.remat(build_model())
after = tfamp.estimate_memory(lighter, 64, data=(x, y))
for name, each in {"as it is": before, "with remat": after}.items():
    largest = each.largest_batch(16 * 10**9, multiple_of=8)
    print(f"{name:12} {each.peak_bytes / 2**20:6,.0f} MiB; 16 GB hold {largest:,}")

# %% [markdown]
# ## What if it runs out all the same?
#
# Inputs of varying length, a neighbor on the GPU: no estimate sees them. The error of
# TensorFlow then ends with a note: what was asked for and by which layer, what the
# model holds whatever the batch, who else holds memory on the device, and what to do,
# in order.

# %% [markdown]
# ## And to serve it?
#
# `predict` keeps no activations for later and has no optimizer. What is left are
# weights, and `freeze` stores them in half precision, once, with the outputs of the
# mixed model to the last bit.

# %%
frozen = tfamp.freeze(model, dtype=POLICY.removeprefix("mixed_"))
for name, each in {"trained": model, "frozen": frozen}.items():
    served = tfamp.estimate_memory(each, 64, training=False, data=(x,))
    weights = served.by_kind["parameters"]
    print(f"{name:8} {served.peak_bytes / 2**20:5.1f} MiB, weights {weights:,} bytes")

# %% [markdown]
# ## Where to go next
#
# - `tfamp memory package.module:build --max_memory=16GB` asks the same on the command
#   line, `tfamp memory package.module:build --find` makes the trials.
# - A [recipe](REPOSITORY_URL/tree/main/recipes) that is too large:
#   `tfamp memory recipes.train_resnet50:build --find`.
# - [Is it worth it?](REPOSITORY_URL/blob/main/notebooks/04_is_it_worth_it.ipynb)
#   compares policies in accuracy, speed and memory.
# - [Why is my loss NaN?](REPOSITORY_URL/blob/main/notebooks/05_why_nan.ipynb) for what
#   a rate that is too high does.
