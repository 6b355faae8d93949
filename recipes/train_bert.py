"""Trains a small BERT of KerasHub to tell which package a piece of code is from.

Needs KerasHub with tensorflow-text: pip install keras-hub
Data: pieces of ten lines from six packages of the Python standard library, with no
network; or a folder that holds train/CLASS/*.txt and test/CLASS/*.txt, such as IMDB's.
Command: python recipes/train_bert.py
         python recipes/train_bert.py --dataset=aclImdb --epochs=2
         tfamp compare recipes.train_bert:build --epochs=4 --policies=float32,auto
Time: 2 minutes on 2 CPU cores in float32, of it half a minute for the vocabulary.
Expect: test accuracy above 0.7 for six classes, from random weights. With a network,
BertTextClassifier.from_preset("bert_tiny_en_uncased") begins with trained ones.
"""

import json
import sysconfig
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfamp

try:
    import keras_hub
except ImportError as error:
    raise ImportError("It needs KerasHub. Run `pip install keras-hub`.") from error

PACKAGES = ("asyncio", "ctypes", "email", "tkinter", "unittest", "xml")
FLAGS = flags.FLAGS
if "get_ipython" in globals():  # in a notebook's cell, which may run again
    old = [f for f in FLAGS if "absl" not in FLAGS.find_module_defining_flag(f)]
    FLAGS.remove_flag_values(old)
flags.DEFINE_string("policy", "auto", "Dtype policy, or the file of a plan.")
flags.DEFINE_string("dataset", "stdlib", "stdlib, or a folder.")
flags.DEFINE_integer("epochs", 4, "Passes over the data.")
flags.DEFINE_integer("batch_size", 32, "Texts in a batch.")
flags.DEFINE_integer("length", 96, "Word pieces of a text; what is longer is cut.")
flags.DEFINE_float("learning_rate", 5e-4, "Of AdamW.")
flags.DEFINE_integer("seed", 0, "Of weights and order.")
flags.DEFINE_boolean("smoke", False, "Two steps, to see that it runs.")


def load(dataset: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns texts and the numbers of their classes, for training and test."""
    if dataset != "stdlib":
        parts = (Path(dataset, part) for part in ("train", "test"))
        return [texts_below(part, "*/*.txt", lines=None) for part in parts]
    root = Path(sysconfig.get_path("stdlib"))
    texts, labels = texts_below(root, "*/*.py", lines=10)
    is_test = np.arange(len(texts)) % 5 == 4
    return [(texts[~is_test], labels[~is_test]), (texts[is_test], labels[is_test])]


def texts_below(root: Path, pattern: str, lines: int | None):
    """Returns the texts of files, cut into pieces, and the number of their folder."""
    files = sorted(root.glob(pattern))
    names = sorted({file.parent.name for file in files})
    names = [n for n in names if n in PACKAGES] if lines else names
    texts, labels = [], []
    for file in files:
        if file.parent.name in names:
            text = file.read_text(encoding="utf-8", errors="replace").splitlines()
            size = lines or max(1, len(text))
            pieces = ["\n".join(text[i : i + size]) for i in range(0, len(text), size)]
            texts += pieces
            labels += [names.index(file.parent.name)] * len(pieces)
    if len(names) < 2:
        raise ValueError(
            f"Found texts of {len(names)} classes at {str(root / pattern)!r}; expected "
            "a folder for each of two or more. Choose another `--dataset`."
        )
    return np.array(texts, dtype=object), np.array(labels, "int32")


def make_preprocessor(texts: np.ndarray, length: int):
    """Returns what turns texts into numbers; its vocabulary is learned from them."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    sample = tf.data.Dataset.from_tensor_slices(texts[:: max(1, len(texts) // 1000)])
    vocabulary = keras_hub.tokenizers.compute_word_piece_vocabulary(
        sample.batch(64), vocabulary_size=1000, lowercase=True, reserved_tokens=special
    )
    tokenizer = keras_hub.models.BertTokenizer(vocabulary, lowercase=True)
    return keras_hub.models.BertTextClassifierPreprocessor(tokenizer, length)


def build(
    seed=0, dataset="stdlib", batch_size=32, length=96, learning_rate=5e-4, smoke=False
):
    """Returns the compiled model, training and test data."""
    keras.utils.set_random_seed(seed)
    (x, y), (x_test, y_test) = load(dataset)
    if smoke:
        rows = np.random.default_rng(0).permutation(len(x))[: 2 * batch_size]
        x, y, x_test, y_test = (
            x[rows],
            y[rows],
            x_test[:batch_size],
            y_test[:batch_size],
        )
    preprocessor = make_preprocessor(x, length)
    pipelines = (
        tfamp.data.Pipeline.from_arrays(
            {name: np.asarray(value) for name, value in preprocessor(texts).items()}, y
        )
        for texts, y in ((x, y), (x_test, y_test))
    )
    train, test = pipelines
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=preprocessor.tokenizer.vocabulary_size(),
        num_layers=2,
        num_heads=4,
        hidden_dim=128,
        intermediate_dim=256,
        max_sequence_length=length,
    )
    model = keras_hub.models.BertTextClassifier(backbone, int(y.max()) + 1, None)
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    train = train.shuffle(seed=seed).batch(batch_size, drop_remainder=True)
    return model, train.prefetch().build(), test.batch(batch_size).build()


def main(argv: list[str]) -> None:
    """Trains, and prints the test metrics as a line of JSON."""
    status = tfamp.enable(policy=FLAGS.policy)
    print(f"{status.policy}: {status.reason}")
    of_data = (FLAGS.seed, FLAGS.dataset, FLAGS.batch_size, FLAGS.length)
    model, train, test = build(*of_data, FLAGS.learning_rate, FLAGS.smoke)
    model.fit(train, epochs=1 if FLAGS.smoke else FLAGS.epochs, shuffle=False)
    metrics = model.evaluate(test, verbose=0, return_dict=True)
    print(json.dumps({"policy": status.policy, **metrics}))


if __name__ == "__main__":
    # The arguments of a notebook's kernel are not ours.
    main(FLAGS(["recipe"])) if "get_ipython" in globals() else app.run(main)
