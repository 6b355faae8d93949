# %% [markdown]
# # From a slow pipeline to a fast one
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](COLAB_URL)
#
# A faster model gains nothing while it waits for its input. This notebook takes the
# input pipeline that everybody writes first, measures who waits for whom, and changes
# one thing after the other with [tfamp](REPOSITORY_URL)'s `tfamp.data.Pipeline`.
#
# You will learn
#
# - how to tell whether training waits for its input, with a figure for what there is
#   to gain,
# - what parallel decoding, uint8 and a cache bring, each by itself,
# - how augmentation goes behind a cache and stays new each epoch,
# - what happens to a damaged file, and what a check of the data says before training.
#
# It takes about four minutes, on a GPU or on a CPU.

# %%
# %pip install -q "tfamp[data,report] @ git+REPOSITORY_URL"

# %% tags=["parameters"]
NUM_CUTS = 600
SECONDS = 12

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
# ## The data: two photos, cut into many
#
# scikit-learn brings two photos, of a temple and of a flower. Random cuts of them make
# a folder of JPEG files, one folder for each class, and no network is needed.

# %%
import tempfile

from sklearn.datasets import load_sample_images

rng = np.random.default_rng(0)
folder = pathlib.Path(tempfile.mkdtemp()) / "photos"
for name, photo in zip(["temple", "flower"], load_sample_images().images, strict=True):
    (folder / name).mkdir(parents=True)
    for number in range(NUM_CUTS):
        top, left = rng.integers(0, [427 - 224, 640 - 224])
        cut = tf.io.encode_jpeg(photo[top : top + 224, left : left + 224], quality=90)
        (folder / name / f"{number:04}.jpg").write_bytes(cut.numpy())
paths = sorted(str(path) for path in folder.rglob("*.jpg"))
print(len(paths), "files of", sum(map(os.path.getsize, paths)) // len(paths), "bytes")

# %% [markdown]
# ## The pipeline that one writes first
#
# Read, decode, resize, divide by 255, batch: it is in many tutorials.

# %%
SIZE = (96, 96)


def read(path):
    """Returns a float32 image and its class, 0 or 1."""
    image = tf.image.decode_jpeg(tf.io.read_file(path), channels=3)
    is_temple = tf.strings.regex_full_match(path, ".*temple.*")
    return tf.image.resize(image, SIZE) / 255.0, tf.cast(is_temple, tf.int32)


first = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths), seed=0)
first = first.map(read).batch(32)

# %% [markdown]
# And a small model, once for float images and once for uint8 ones, which it scales
# itself: `tfamp.data.Rescale` gives the nearest value of the model's compute dtype.


# %%
def build_model(dtype):
    """Returns a small compiled network for images of a dtype."""
    layers = [keras.Input((*SIZE, 3), dtype=dtype)]
    if dtype == "uint8":
        layers.append(tfamp.data.Rescale(1 / 255))
    for width in (8, 16):
        layers += [keras.layers.Conv2D(width, 3, strides=2, activation="relu")]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


# %% [markdown]
# ## Who waits for whom?
#
# `bottleneck` runs the real training step with the real pipeline, with a few batches
# from memory, and the pipeline alone, in turns. What the step would gain from a perfect
# pipeline is `possible_gain`. The model is left as it was, to the last bit.

# %%
model = build_model("float32")
results = {"first try": tfamp.data.bottleneck(model, first, seconds=SECONDS)}
print(results["first try"])

# %% [markdown]
# ## One change at a time
#
# The same as a `Pipeline`. Stages may be written in any order; they run in the right
# one, and `describe` prints each with its reason. Images stay uint8 all the way: a
# batch is a quarter of the size, and the model does the scaling.

# %%
start = tfamp.data.Pipeline.from_images(folder)
uint8 = start.decode(SIZE).shuffle(seed=0).batch(32).prefetch()
text = uint8.describe()

# %% [markdown]
# Decoding is the same work in every epoch. A cache does it once. `.cache("memory")`
# holds the images while the process lives; `.cache("some/path")` holds them in files,
# for later runs too, and notices when a function before it has changed, or what that
# refers to. What it cannot see, such as a database that a function asks, `describe` and
# the log name, and `.cache("some/path", unseen="error")` refuses to build.

# %%
cached = uint8.cache("memory")
model = build_model("uint8")
for name, pipeline in {"parallel, uint8": uint8, "and a cache": cached}.items():
    dataset = pipeline.build()
    for _ in dataset:  # fills a cache, so that later epochs are measured
        continue
    results[name] = tfamp.data.bottleneck(model, dataset, seconds=SECONDS)
    print(f"{name}: {results[name].verdict}, {results[name].reason}")

# %% [markdown]
# ## Where the time goes
#
# A step takes as long as the model alone, and what it loses to its input on top of it.

# %%
names = list(results)
compute = np.array([1e3 * results[name].compute_seconds for name in names])
real = np.array([1e3 * results[name].real_seconds for name in names])
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
axes.barh(names, compute, color="tab:blue", label="the model")
lost = np.maximum(real - compute, 0)
axes.barh(names, lost, left=compute, color="tab:orange", label="lost to the input")
for place, name in enumerate(names):
    rate = results[name].batch_size / results[name].real_seconds
    axes.text(real[place], place, f"  {rate:,.0f} images/s", va="center")
axes.set(xlabel="milliseconds a step", xlim=(0, 1.3 * real.max()))
axes.invert_yaxis()
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# The orange part is what a faster pipeline can win, and the cache has won nearly all
# of it. When no orange is left, the model is what to work on:
# `tfamp.enable(policy="auto")` and larger batches.
#
# ## Augmentation, behind the cache
#
# What differs each epoch must not be cached. `.augment` therefore runs behind the
# cache, wherever it is written, on parallel workers. `strength` goes from 0, which
# changes nothing, to 1, and may grow over the first epochs.

# %%
augmented = cached.augment(strength=1.0, ramp_epochs=3, seed=0).build()
figure, axes = plt.subplots(4, 6, figsize=(4.5, 3.2), layout="constrained")
for epoch, row in enumerate(axes):
    images, _ = next(iter(augmented.take(1)))
    for _ in augmented:  # an epoch counts when it has been read to its end
        continue
    for image, place in zip(images, row, strict=False):
        place.imshow(image)
        place.set_axis_off()
    row[0].set_title(f"epoch {epoch + 1}", loc="left", fontsize=9)
plt.show()

# %% [markdown]
# ## A damaged file
#
# Plain tf.data stops at a file that is no image, after hours perhaps, or drops the rest
# of its file with `ignore_errors`. `.on_error("skip")` costs that one element, names it
# and counts it, and stops where more than a part of the data is damaged.

# %%
(folder / "flower" / "0007.jpg").write_bytes(b"not an image")
careful = tfamp.data.Pipeline.from_images(folder).decode(SIZE).batch(32)
careful = careful.on_error("skip", max_fraction=0.05)
print(sum(len(labels) for _, labels in careful.build()), "of", len(paths), "images")
print(careful.skipped[0])

# %% [markdown]
# ## What half precision would spoil
#
# `check` reads the data once and says what a compute dtype would lose: values beyond
# its range, ids in floats, constant columns, NaN, labels out of range. Here are columns
# of a table with the two classics, a raw timestamp and an id.

# %%
table = {
    "seconds": 1.7e9 + rng.uniform(0, 3600, 500),
    "id": np.arange(500.0) + 60_000,
    "price": rng.lognormal(3, 1, 500).astype("float32"),
}
rows = tfamp.data.Pipeline.from_arrays(table, rng.integers(0, 2, 500))
print(tfamp.data.check(rows, compute_dtype="float16"))

# %% [markdown]
# ## Where to go next
#
# - [recipes/train_tabular.py](REPOSITORY_URL/blob/main/recipes/train_tabular.py) trains
#   on a table with missing values and outliers, and takes its statistics into the
#   model.
# - [The quickstart](REPOSITORY_URL/blob/main/notebooks/01_quickstart.ipynb) turns on
#   half precision, which helps once the input keeps up.
# - `Pipeline.balance`, `.weights` and `.subset` choose examples by exact plans, and
#   `.bucket` batches sequences of about one length.
