"""Runs the programs of the corpus: in float32, under stock Keras, under tfamp.

As a program, `python -m tests.wild.corpus MODULE...` loads saved models in a process
that knows nothing of how they were made, and says whether they predict the same.
"""

import contextlib
import dataclasses
import functools
import importlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfamp
from tests.styles import stock_policy
from tests.wild import taps
from tests.wild.programs.registry import Program, Trained

ROOT = Path(__file__).resolve().parents[2]
POLICIES = ("mixed_float16", "mixed_bfloat16")
WAYS = ("enable", "apply")
SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a program gave back, and what it did in half precision on the way."""

    trained: Trained
    seen: taps.Seen

    @property
    def last_loss(self) -> float:
        return float(self.trained.losses[-1])

    def in_half(self) -> set[str]:
        """Returns softmaxes, losses and heads that were not computed in float32."""
        heads = taps.half_heads(self.trained.model, tensors(self.trained.inputs))
        return self.seen.softmaxes | self.seen.losses | heads


def tensors(inputs):
    """Returns inputs as tensors, arrays as they are and structures in kind."""
    return tf.nest.map_structure(tf.convert_to_tensor, inputs)


@contextlib.contextmanager
def policy_in_force(way: str, policy: str) -> Iterator[None]:
    """Sets up what stands at the top of a user's script."""
    if way == "enable":
        with tfamp.scope(policy):
            yield
    elif way == "stock":
        with stock_policy(policy):
            yield
    else:
        yield


def run(program: Program, way: str, policy: str = "float32", seed: int = 0) -> Outcome:
    """Trains a program's models: in "float32", or by a line of Keras or of tfamp.

    Those ways are "stock", "enable" and "apply"; the seed is of weights and noise.
    """
    keras.utils.set_random_seed(seed)
    with policy_in_force(way, policy), taps.seen() as seen:
        steps = program.run()
        built = next(steps)
        if way == "apply":
            for model in built if isinstance(built, tuple) else (built,):
                tfamp.apply(model, policy)
        trained = next(steps)
        steps.close()
    return Outcome(trained, seen)


@functools.cache
def float32(program: Program, seed: int = 0) -> float:
    """Returns a program's last loss in float32, without running it again."""
    return run(program, "float32", "float32", seed).last_loss


def distance(loss: float, reference: float) -> float:
    """Returns how far a loss is from float32's, relative to that."""
    return abs(loss - reference) / abs(reference)


def spread(losses: list[float]) -> float:
    """Returns how far losses of several seeds lie apart, relative to their median."""
    return (max(losses) - min(losses)) / abs(statistics.median(losses))


def predictions(model: keras.Model, inputs) -> list[np.ndarray]:
    """Returns a model's outputs, of one call outside of any training."""
    keras.utils.set_random_seed(0)
    outputs = tf.nest.flatten(model(tensors(inputs), training=False))
    return [np.asarray(tf.cast(output, tf.float32)) for output in outputs]


def plain(part) -> np.ndarray:
    """Returns an array that NumPy can store, texts among them."""
    array = np.asarray(part)
    return array.astype("U") if array.dtype == object else array


def save(outcome: Outcome, name: str, folder: Path) -> Path:
    """Saves a trained model, its inputs and its predictions; returns its path."""
    trained = outcome.trained
    trained.model.save(folder / f"{name}.keras")
    inputs = trained.inputs
    named = inputs if isinstance(inputs, dict) else {}
    named = {key: plain(part) for key, part in named.items()}
    parts = [] if named else [plain(part) for part in tf.nest.flatten(inputs)]
    np.savez(folder / f"{name}.inputs.npz", *parts, **named)
    outputs = predictions(trained.model, inputs)
    np.savez(folder / f"{name}.outputs.npz", *outputs)
    return folder / f"{name}.keras"


def read(path: Path):
    """Returns the arrays of a file: one, a list or a dictionary, as it was given."""
    with np.load(path) as file:
        arrays = dict(file)
    if not all(name.startswith("arr_") for name in arrays):
        return arrays
    return list(arrays.values()) if len(arrays) > 1 else arrays["arr_0"]


def difference(path: Path) -> str:
    """Returns what differs between a saved model and the one that was trained."""
    model = tfamp.load_model(path)
    outputs = predictions(model, read(path.with_suffix(".inputs.npz")))
    expected = tf.nest.flatten(read(path.with_suffix(".outputs.npz")))
    pairs = list(zip(outputs, expected, strict=True))
    if all(np.array_equal(new, old) for new, old in pairs):
        return ""
    return f"predictions differ by {max(np.abs(n - o).max() for n, o in pairs):.2g}"


class Loader:
    """A fresh process that loads saved models, after the modules of their classes."""

    def __init__(self, *modules: str) -> None:
        self.modules = modules

    def __enter__(self) -> "Loader":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.wild.corpus", *self.modules],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def difference(self, path: Path) -> str:
        """Returns what differs there in a saved model's predictions, "" for nothing."""
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(f"{path}\t"):
                return line.split("\t")[1].strip()
        raise RuntimeError(
            "The fresh process ended; run `python -m tests.wild.corpus`."
        )


def main(modules: list[str]) -> None:
    """Reads paths, one a line, and answers each with its difference."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
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
