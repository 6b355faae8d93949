# %% [markdown]
# # What a loss scale is
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](COLAB_URL)
#
# float16 has ten bits of fraction, enough for a gradient, and five of exponent, which
# are not: small gradients become 0, without a word. Multiplying the loss by a number
# moves all gradients to where float16 can hold them.
# [tfamp](REPOSITORY_URL)'s `LossScaleOptimizer` finds that number and takes it out
# again.
#
# You will learn
#
# - how much of a gradient float16 loses, and at which scales it loses nothing,
# - how the scale finds its place during training,
# - what a skipped step leaves untouched,
# - how to fix the scale, and how to watch it in `fit`.
#
# It takes about two minutes, on a GPU or on a CPU.

# %%
# %pip install -q "tfamp[data,report] @ git+REPOSITORY_URL"

# %% tags=["parameters"]
EPOCHS = 40
BROKEN_EPOCHS = 10

# %%
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import tfamp

print("Keras", keras.__version__, "on TensorFlow", tf.__version__)

# %% [markdown]
# ## What does float16 lose?
#
# A small network learns scikit-learn's digits in float32. Trained, it is nearly right
# everywhere, and its gradients are small. That is when float16 needs help.

# %%
from sklearn.datasets import load_digits

digits = load_digits()
x = digits.data.astype("float32") / 16
y = digits.target


def build_model():
    """Returns three small layers and a head, which tfamp keeps in float32."""
    hidden = [keras.layers.Dense(32, "relu", use_bias=False) for _ in range(3)]
    return keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])


keras.utils.set_random_seed(0)
model = build_model()
# %%
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.003), loss_of, metrics=["accuracy"])
history = model.fit(x, y, batch_size=64, epochs=EPOCHS, verbose=0)
print(f"accuracy in training {history.history['accuracy'][-1]:.3f}")

# %% [markdown]
# The backward pass goes from layer to layer by the gradients of their outputs; under
# mixed float16 those are float16 numbers. Here are their magnitudes, in float32.


# %%
def output_gradients(model, scale=1.0):
    """Returns d (scale * loss) / d output, for the hidden layers, in one array."""
    h, outputs = tf.constant(x), []
    with tf.GradientTape() as tape:
        for layer in model.layers:
            tape.watch(h)
            h = layer(h)
            outputs.append(h)
        loss = scale * loss_of(y, h)
    gradients = tape.gradient(loss, outputs[:-1])
    return np.concatenate([np.asarray(g, "float32").ravel() for g in gradients])


exact = output_gradients(model)
exact = exact[exact != 0]  # a relu that is off passes nothing, in any dtype
# %%
figure, axes = plt.subplots(2, 1, figsize=(8, 4.5), sharex=True, layout="constrained")
for axis, scale in zip(axes, (1.0, 2.0**15), strict=True):
    exponents = np.log2(np.abs(exact * scale))
    axis.hist(exponents, bins=np.arange(-60, 18), color="tab:blue")
    axis.axvspan(-60, -25, color="tab:red", alpha=0.25, label="0 in float16")
    axis.axvspan(-25, -14, color="tab:orange", alpha=0.25, label="fewer bits")
    axis.axvspan(16, 18, color="black", alpha=0.5, label="inf in float16")
    lost = np.mean(exponents < -25)
    axis.set(title=f"loss scale {scale:g}: {lost:.0%} become 0", ylabel="gradients")
axes[0].legend(loc="upper left")
axes[1].set(xlabel="exponent of the gradient, base 2", xlim=(-60, 18))
plt.show()

# %% [markdown]
# **What to see.** The whole hill moves to the right, by 15 powers of two, and keeps its
# shape: multiplying by a power of two costs no bit. Most of what lay in the red comes
# back. Nothing may reach the black on the right: one inf is enough to spoil an update.

# %% [markdown]
# ## Which scale is right?
#
# Now the same weights compute in float16. For each scale the next cell takes the
# gradient of each weight, divides by the scale, and compares with float32.


# %%
def weight_gradients(model, scale):
    """Returns the gradient of all weights in one array, with the scale taken out."""
    with tf.GradientTape() as tape:
        loss = scale * loss_of(y, model(x, training=True))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    return np.concatenate([np.asarray(g).ravel() for g in gradients]) / scale


reference = weight_gradients(model, 1.0)
# %%
import warnings

# True on a CPU, and no matter here: the layers are small.
warnings.filterwarnings("ignore", "'mixed_float16' will be slow")
half = keras.models.clone_model(model)
half.set_weights(model.get_weights())
tfamp.apply(half, "mixed_float16")
# %%
exponents = np.arange(-8, 31, 2)
shares = []
for exponent in exponents:
    gradient = weight_gradients(half, 2.0**exponent)
    is_off = np.abs(gradient - reference) > 0.1 * np.abs(reference)
    shares.append(np.mean(is_off) if np.isfinite(gradient).all() else np.nan)
shares = np.array(shares)
plt.figure(figsize=(8, 3.5), layout="constrained")
plt.plot(exponents, 100 * shares, "o-")
for exponent in exponents[np.isnan(shares)]:
    plt.axvline(exponent, color="black", alpha=0.5)
plt.gca().set(xlabel="loss scale, as a power of two", ylim=(0, None))
plt.ylabel("% of weights with a gradient\noff by more than a tenth")
plt.show()
# %% [markdown]
# **What to see.** On the left float16 loses gradients; in the middle lies a wide floor,
# where only rounding is left; the black lines on the right are scales at which
# something is no longer finite. Any scale on the floor will do. So nobody needs to find
# the best one: it is enough to start high, and to go down where it was too high.

# %% [markdown]
# ## How does the scale find its place?
#
# `LossScaleOptimizer` does that. After a step that is not finite it halves the scale;
# after `dynamic_growth_steps` finite ones it doubles it. 2000 is the default; 15 makes
# it visible here. One batch in the data is broken: it holds an infinite pixel.

# %%
broken = x[:1280].copy()
broken[700, 10] = np.inf  # in batch 21 of 40, in each epoch
# %%
with tfamp.scope("mixed_float16"):
    keras.utils.set_random_seed(0)
    model = build_model()
    optimizer = tfamp.LossScaleOptimizer(
        keras.optimizers.Adam(0.003), initial_scale=2.0**24, dynamic_growth_steps=15
    )
    model.compile(optimizer, loss_of)
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(
            (optimizer.scale, optimizer.gradient_norm, optimizer.last_step_skipped)
        )
    )
    how = {"epochs": BROKEN_EPOCHS, "shuffle": False, "verbose": 0}
    model.fit(broken, y[:1280], callbacks=[watch], **how)
# %%
scales, norms, skipped = map(np.array, zip(*seen, strict=True))
steps = np.arange(1, len(scales) + 1)
figure, (top, low) = plt.subplots(2, 1, sharex=True, layout="constrained")
top.step(steps, scales, where="post")
top.plot(steps[skipped], scales[skipped], "rv", label="skipped")
top.set_yscale("log", base=2)
top.set(ylabel="loss scale")
top.legend()
low.plot(steps, norms)
low.set(ylabel="gradient norm, unscaled", xlabel="step", yscale="log")
plt.show()
print(f"{optimizer.applied_steps} applied, {optimizer.skipped_steps} skipped")
# %% [markdown]
# **What to see.** The scale begins far too high, and the first steps are skipped until
# it fits. Then it climbs, finds the ceiling, is halved, and climbs again. The broken
# batch costs one step in each epoch and one halving. The norm below does not move when
# the scale does, since it is divided out before anything looks at it.
#
# A batch like that has to be rarer than `dynamic_growth_steps`, or the scale falls for
# ever: look for it in the data, or raise `hysteresis`.

# %% [markdown]
# ## What does a skipped step change?
#
# Nothing but counters and the scale. The next cell keeps every weight and every slot of
# Adam, takes a step with one infinite gradient, and compares bit for bit.

# %%
kept = [
    v.numpy().tobytes() for v in model.weights + optimizer.inner_optimizer.variables
]
before = optimizer.scale
gradients = [tf.zeros(v.shape) for v in model.trainable_variables]
gradients[1] = gradients[1] + np.inf
optimizer.apply(gradients, model.trainable_variables)

now = [v.numpy().tobytes() for v in model.weights + optimizer.inner_optimizer.variables]
print("every bit as before:", now == kept)
print("scale", before, "->", optimizer.scale)
print("not finite:", optimizer.nonfinite_variables)
# %% [markdown]
# Learning-rate schedules and averages wait as well: `iterations` counts updates. A
# schedule that you step by hand asks `optimizer.last_step_skipped`.
#
# If 64 steps in a row are skipped, training stops with an error that says so, since no
# scale mends that: `max_consecutive_skips` changes the number.

# %% [markdown]
# ## How is the scale fixed?
#
# `freeze` holds it from the next step on, also in functions that are traced already.
# Steps that are not finite are still skipped.

# %%
optimizer.freeze(1024.0)
optimizer.apply(gradients, model.trainable_variables)
print("frozen:", optimizer.scale, "skipped in a row:", optimizer.consecutive_skips)
optimizer.unfreeze()
optimizer.apply(gradients, model.trainable_variables)
print("released:", optimizer.scale, "skipped in a row:", optimizer.consecutive_skips)

# Static from the start; with a scale of 1 a guard for bfloat16 and float32.
adam = keras.optimizers.Adam()
guard = tfamp.LossScaleOptimizer(adam, initial_scale=1.0, dynamic=False)
print("guard:", guard.scale)
# %% [markdown]
# ## How is it watched?
#
# `PrecisionMonitor` puts the counters into `fit`'s progress bar and `History`, and
# a row every 100 batches into a CSV file or TensorBoard. It warns of skipped steps and
# names the variables.

# %%
import tempfile

path = pathlib.Path(tempfile.mkdtemp()) / "steps.csv"
monitor = tfamp.callbacks.PrecisionMonitor(csv_path=path)
epochs = model.fit(broken, y[:1280], shuffle=False, verbose=0, callbacks=[monitor])

for key in ("loss_scale", "applied_steps", "skipped_steps", "overflow_rate"):
    print(f"{key:15} {epochs.history[key][-1]:g}")
header, *rows = path.read_text().splitlines()
print(header, *rows, sep="\n")

# %% [markdown]
# **What to see.** One reading at the end of the epoch: one step was skipped, the scale
# is half of what it was, and the warning names the kernel and the bias.

# %% [markdown]
# ## Where to go next
#
# - `tfamp.enable()` wraps the optimizer by itself wherever a layer computes in float16:
#   [the quickstart](REPOSITORY_URL/blob/main/notebooks/01_quickstart.ipynb).
# - A loop of your own, with scaling, clipping and accumulation:
#   [custom_loop.py](REPOSITORY_URL/blob/main/recipes/custom_loop.py).
# - `help(tfamp.LossScaleOptimizer)`: bounds, hysteresis, accumulation.
# - Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740).
