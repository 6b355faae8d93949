# %% [markdown]
# # Is half precision worth it on this machine?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](COLAB_URL)
#
# A policy can make training twice as fast, do nothing, or cost accuracy: it depends on
# the model, the data and the machine. One run under each says little, since two runs
# with different seeds differ too. [tfamp](REPOSITORY_URL)'s `tfamp.compare` trains both
# several times and gives an answer with its error.
#
# You will learn
#
# - how to get a verdict on a policy, and what it rests on,
# - how many seeds and examples it takes, and how to add seeds to those that are done,
# - which operations really run in half precision, and why it is not faster,
# - what a step costs and who waits for whom,
# - how to keep a change from making it worse.
#
# It takes about five minutes, on a GPU or on a CPU.

# %%
# %pip install -q "tfamp[data,report] @ git+REPOSITORY_URL"

# %% tags=["parameters"]
EPOCHS = 12
NUM_SEEDS = 3
MAX_MORE = 3
WATCHED_EPOCHS = 5
SECONDS = 8

# %%
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

import tfamp

GPU = bool(tf.config.list_physical_devices("GPU"))
POLICY = "mixed_float16" if GPU else "mixed_bfloat16"
print("Keras", keras.__version__, "on TensorFlow", tf.__version__, "with", POLICY)

# %% [markdown]
# ## What is compared?
#
# A function that returns a compiled model, and data. Scikit-learn's digits need no
# network; every fifth one is kept for validation.


# %%
def build_model():
    """Returns a small compiled network for 8x8 digits."""
    images = keras.Input((8, 8, 1), dtype="uint8")
    x = keras.layers.Rescaling(1 / 16)(images)
    for filters in (32, 64):
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Dense(64, activation="relu")(keras.layers.Flatten()(x))
    model = keras.Model(images, keras.layers.Dense(10, activation="softmax")(x))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


# %%
import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
images = digits.images[..., np.newaxis].astype("uint8")
is_test = np.arange(len(images)) % 5 == 0
train = (images[~is_test], digits.target[~is_test])
test = (images[is_test], digits.target[is_test])

# %% [markdown]
# ## Is it worth it?
#
# Each seed is trained under each policy in a process of its own, so that no memory, no
# traced function and no policy is left over from the run before, and the policies take
# turns, so that a machine that gets warm slows both. A seed starts both from the same
# weights, and what is compared is the difference within each pair.
#
# `tolerance` is the loss of accuracy that counts as none. Its default, 0.005, takes 736
# validation examples at least, and here are 360: what other examples would have done is
# open, however many seeds there are. Two points of accuracy are what these can show.
#
# On a GPU, compare before anything else has used it: TensorFlow takes all its memory.

# %%
import tempfile

folder = pathlib.Path(tempfile.mkdtemp())
settings = {
    "policies": ("float32", POLICY),
    "epochs": EPOCHS,
    "tolerance": 0.02,
    "batch_size": 64,
    "directory": folder / "runs",
}
result = tfamp.compare(build_model, train, test, seeds=NUM_SEEDS, **settings)
print(result)

# %% [markdown]
# **What to see.** The sentence at the end is the verdict. "Equivalent" is not "no
# significant difference", which any comparison with few seeds can show: it says that a
# loss of accuracy beyond the tolerance is ruled out but for a chance of 5 %, whatever
# other seeds and other validation examples would have shown. "Faster" means that the
# whole interval of the ratio lies above 1, and its mean at 1.05 or more.
# [How a verdict is reached](REPOSITORY_URL/blob/main/docs/guides/compare.md) says how
# each claim is tested and how often it is false.
#
# For scripts, each part is a value:

# %%
verdict = result.verdicts[POLICY]
print(result.verdict, "-", verdict.reason)
print("examples/s:", result.ratio("examples_per_second", POLICY))
print("accuracy:  ", verdict.quality)

# %% [markdown]
# ## How many seeds?
#
# As many as it takes. Where the verdict is "undecided", `more_seeds` says how many more
# would decide if they come out like those there are, `examples_needed` how many
# validation examples would, and `needs` says it in words. `resume=True` trains only
# what is missing: each finished run is kept in `directory`.

# %%
wanted = verdict.more_seeds or 0
total = NUM_SEEDS + min(max(wanted, 1), MAX_MORE)
print(f"{result.verdict} with {NUM_SEEDS}; more seeds that would decide: {wanted}")

result = tfamp.compare(build_model, train, test, seeds=total, resume=True, **settings)
print(f"with {total}: {result.verdicts[POLICY]}")

# %% [markdown]
# **What to see.** The interval gets narrower with the square root of the seeds. Who
# looks until a claim comes up will find one, so choose a number and keep to it. Three
# seeds are a beginning, and enough where the metric hardly scatters; a metric that
# jumps by as much as the tolerance from seed to seed may need twenty.
#
# ## What does the report show?
#
# One row a policy: speed, metric, memory and latency with their intervals, and what to
# do; below it loss curves and the metric of each seed. It is one file that opens
# without a network: send it.

# %%
import html

from IPython.display import HTML, display

page = result.to_html(folder / "report.html")
result.to_json(folder / "report.json")
style = 'style="width: 100%; height: 700px; border: 0"'
display(HTML(f'<div><iframe {style} srcdoc="{html.escape(page)}"></iframe></div>'))

# %% [markdown]
# ## Why is it, or is it not, faster?
#
# `prove` reads the traced step: which products run in which dtype, layer by layer,
# which casts there are, and the causes in order, each with the part of the FLOPs that
# it concerns, casts with their part of the bytes.

# %%
with tfamp.scope(POLICY):
    model = build_model()
proof = tfamp.prove(model, train, batch_size=64)
print(proof)

# %%
print(f"{proof.half_share_of_flops:.1%} of the FLOPs run in half precision, but:")
for cause in proof.causes[:3]:
    print(f"{cause.figure:6.1%}: {cause.rule}. {cause.remedy}")

# %% [markdown]
# **What to see.** Nearly all products run in half precision, and that alone does not
# make a step faster. A device without the instruction comes first among the causes.
# Where it has it, the casts of a small model remain: the same layers on large images,
# or in larger batches, have another answer. Which operations take the time, a profile
# by TensorBoard's profiler (xprof) shows.

# %% [markdown]
# ## What does a step cost, and who waits?
#
# A policy speeds up what the model computes. Where steps wait for their input there is
# nothing to win. `Throughput` shows it while `fit` runs, and `bottleneck` measures what
# a perfect pipeline would save.

# %%
data = tfamp.data.Pipeline.from_arrays(*train).shuffle(seed=0).batch(64).prefetch()
dataset = data.build()
run = model.fit(
    dataset,
    epochs=WATCHED_EPOCHS,
    shuffle=False,
    verbose=0,
    callbacks=[tfamp.callbacks.Throughput()],
)
for name in ("examples_per_second", "step_seconds", "input_wait"):
    if name in run.history:
        print(f"{name:20} {run.history[name][-1]:.4g}")

# %%
print(tfamp.data.bottleneck(model, dataset, seconds=SECONDS))

# %% [markdown]
# ## How does it stay so?
#
# A new version of a model, of a library or of a driver can change the answer. In CI the
# same comparison is one command, whose exit status is 1 if a policy is found worse, or
# slower than float32:
#
# ```
# tfamp compare package.module:build --policies float32,auto --seeds 5 \
#     --out report/ --fail-on worse,slower
# ```
#
# `build` returns `(model, train, validation)`. "Undecided" passes here, so that noise
# stops nobody; a release may ask for more, with `--fail-on worse,slower,undecided`. In
# Python the same question is

# %%
speed = result.ratio("examples_per_second", POLICY)
passes = result.verdict != "worse" and not speed.high < 1
print("may be merged" if passes else "must not be merged", "-", result.verdict)

# %% [markdown]
# ## Where to go next
#
# - Every [recipe](REPOSITORY_URL/tree/main/recipes) with a `build` compares:
#   `tfamp compare recipes.train_text:build`.
# - [RESULTS.md](REPOSITORY_URL/blob/main/benchmarks/RESULTS.md): what policies bring
#   other models, measured in this way.
# - [The pipeline notebook](REPOSITORY_URL/blob/main/notebooks/03_data.ipynb) helps
#   where steps wait for their input, with caches that notice what has changed.
