"""Trains a small transformer to continue Python code, character by character.

Data: the Python standard library's own source files, about 4 MB, a tenth of the files
for validation; or any TFDS name with a feature 'text'; or a folder of text files.
Command: python recipes/train_text.py
         python recipes/train_text.py --dataset=tiny_shakespeare --prompt="ROMEO:"
         tfamp compare recipes.train_text:build --better=max --metric=accuracy
Time: 3 minutes on 2 CPU cores in float32.
Expect: about 2.5 bits for each character after one epoch, and code that looks like it.
"""

import json
import math
import random
import sysconfig
from pathlib import Path

import keras
import numpy as np
from absl import app, flags

import tfamp

WINDOW, WIDTH, NUM_LAYERS, NUM_HEADS = 128, 128, 2, 4
# A character is a byte of UTF-8: no vocabulary to build, save or get wrong.
NUM_CHARACTERS = 256
MAX_BYTES = 4_000_000
FLAGS = flags.FLAGS
if "get_ipython" in globals():  # in a notebook's cell, which may run again
    old = [f for f in FLAGS if "absl" not in FLAGS.find_module_defining_flag(f)]
    FLAGS.remove_flag_values(old)
flags.DEFINE_string("policy", "auto", "Dtype policy, or the file of a plan.")
flags.DEFINE_string("dataset", "stdlib", "stdlib, a TFDS name, or a folder.")
flags.DEFINE_integer("epochs", 1, "Passes over the data.")
flags.DEFINE_integer("batch_size", 32, "Windows in a batch.")
flags.DEFINE_float("learning_rate", 3e-3, "Of Adam, at its peak.")
flags.DEFINE_integer("seed", 0, "Of weights and order.")
flags.DEFINE_string("prompt", "import ", "What the model continues in the end.")
flags.DEFINE_boolean("smoke", False, "Two steps, to see that it runs.")


def load(dataset: str) -> tuple[bytes, bytes]:
    """Returns the texts of training and validation."""
    if dataset != "stdlib" and not Path(dataset).is_dir():
        pipeline = tfamp.data.Pipeline.from_tfds
        parts = (pipeline(dataset, p, as_supervised=False) for p in ("train", "test"))
        texts = [[e["text"] for e in p.build().as_numpy_iterator()] for p in parts]
        return b"\n".join(texts[0]), b"\n".join(texts[1])
    root = Path(sysconfig.get_path("stdlib") if dataset == "stdlib" else dataset)
    pattern = "[a-z]*.py" if dataset == "stdlib" else "**/*.txt"
    files = sorted(root.glob(pattern))
    if len(files) < 2:
        raise ValueError(
            f"Found {len(files)} files {pattern!r} in {str(root)!r}; expected two or "
            "more. Choose another `--dataset`."
        )
    random.Random(0).shuffle(files)
    cut = max(1, len(files) // 10)
    validation, train = (
        b"\n".join(file.read_bytes() for file in part)[:MAX_BYTES]
        for part in (files[:cut], files[cut:])
    )
    return train, validation


def cut_windows(text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets `(windows, WINDOW)`; targets are one ahead."""
    characters = np.frombuffer(text, "uint8")
    used = (len(characters) - 1) // WINDOW * WINDOW
    inputs = characters[:used].reshape(-1, WINDOW)
    return inputs, characters[1 : used + 1].reshape(-1, WINDOW)


class Position(keras.layers.Layer):
    """Adds a trained vector for each position to `(batch, window, width)`."""

    def build(self, input_shape):
        """Makes the table of `(window, width)`."""
        self.table = self.add_weight(input_shape[1:], "random_normal", name="table")

    def call(self, inputs):
        """Returns inputs plus positions, in the compute dtype."""
        return inputs + keras.ops.cast(self.table, inputs.dtype)


def build_model() -> keras.Model:
    """Returns the network: uint8 characters to logits of the next ones."""
    characters = keras.Input((WINDOW,), dtype="uint8")
    x = Position()(keras.layers.Embedding(NUM_CHARACTERS, WIDTH)(characters))
    for _ in range(NUM_LAYERS):
        normed = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(NUM_HEADS, WIDTH // NUM_HEADS)
        x = x + attention(normed, normed, use_causal_mask=True)
        normed = keras.layers.LayerNormalization()(x)
        hidden = keras.layers.Dense(4 * WIDTH, activation="gelu")(normed)
        x = x + keras.layers.Dense(WIDTH)(hidden)
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(characters, keras.layers.Dense(NUM_CHARACTERS)(x))


def build(seed=0, epochs=1, dataset="stdlib", batch_size=32, learning_rate=3e-3):
    """Returns the compiled model, training and validation data."""
    keras.utils.set_random_seed(seed)
    as_pipeline = tfamp.data.Pipeline.from_arrays
    train, validation = (as_pipeline(*cut_windows(text)) for text in load(dataset))
    train = train.shuffle(seed=seed).batch(batch_size, drop_remainder=True).build()
    num_steps = epochs * int(train.cardinality())
    schedule = keras.optimizers.schedules.CosineDecay(
        *(0.0, num_steps), warmup_target=learning_rate, warmup_steps=100
    )
    model = build_model()
    model.compile(
        optimizer=keras.optimizers.Adam(schedule, beta_2=0.99, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model, train, validation.batch(batch_size).build()


def generate(model: keras.Model, prompt: str, length: int, temperature=0.7) -> str:
    """Returns the prompt and so many characters, each drawn from the model."""
    text, rng = list(prompt.encode()), np.random.default_rng(0)
    for _ in range(length):
        known, row = text[-WINDOW:], np.zeros((1, WINDOW), "uint8")
        row[0, : len(known)] = known  # what stands behind changes nothing before it
        logits = model.predict_on_batch(row)[0, len(known) - 1] / temperature
        chances = np.exp((logits - logits.max()).astype("float64"))
        text.append(int(rng.choice(NUM_CHARACTERS, p=chances / chances.sum())))
    return bytes(text).decode(errors="replace")


def main(argv: list[str]) -> None:
    """Trains, generates, and prints the validation metrics as a line of JSON."""
    status = tfamp.enable(policy=FLAGS.policy)
    print(f"{status.policy}: {status.reason}")
    model, train, validation = build(
        FLAGS.seed, FLAGS.epochs, FLAGS.dataset, FLAGS.batch_size, FLAGS.learning_rate
    )
    if FLAGS.smoke:
        train, validation = train.take(2), validation.take(2)
    model.fit(train, epochs=1 if FLAGS.smoke else FLAGS.epochs, shuffle=False)
    metrics = model.evaluate(validation, verbose=0, return_dict=True)
    print(generate(model, FLAGS.prompt, length=5 if FLAGS.smoke else 300))
    bits = metrics["loss"] / math.log(2)
    print(json.dumps({"policy": status.policy, **metrics, "bits": bits}))


if __name__ == "__main__":
    # The arguments of a notebook's kernel are not ours.
    main(FLAGS(["recipe"])) if "get_ipython" in globals() else app.run(main)
