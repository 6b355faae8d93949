"""Loads what `corpus.save` saved and says whether the predictions are the same.

Paths come in on a line each; an answer goes out for each.
"""

import importlib
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)

import tfamp  # noqa: E402 - the threads are set before TensorFlow starts
from tests.wild import corpus  # noqa: E402


def read(path):
    """Returns the arrays of a file: one, a list or a dictionary, as it was given."""
    with np.load(path) as file:
        arrays = dict(file)
    if not all(name.startswith("arr_") for name in arrays):
        return arrays
    return list(arrays.values()) if len(arrays) > 1 else arrays["arr_0"]


def difference(path):
    """Returns what differs between a saved model and the one that was trained."""
    model = tfamp.load_model(path)
    outputs = corpus.predictions(model, read(path.with_suffix(".inputs.npz")))
    expected = tf.nest.flatten(read(path.with_suffix(".outputs.npz")))
    if len(outputs) != len(expected):
        return f"{len(outputs)} outputs for {len(expected)}"
    pairs = list(zip(outputs, expected, strict=True))
    if all(np.array_equal(new, old) for new, old in pairs):
        return ""
    return f"predictions differ by {max(np.abs(n - o).max() for n, o in pairs):.2g}"


def main(modules):
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        path = Path(line.strip())
        try:
            said = difference(path)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(path, " ".join(said.split()), sep="\t", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
