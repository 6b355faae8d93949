"""Runs the programs of the corpus: in float32, under stock Keras, under tfamp."""

import contextlib
import dataclasses
import functools
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
    """Trains a program's models.

    Args:
        program: What to run.
        way: "float32", "stock" for Keras's own policy, "enable" or "apply".
        policy: Of the last three.
        seed: Of weights and noise.
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
def float32(program: Program) -> Outcome:
    """Returns what a program gives back in float32, without running it again."""
    return run(program, "float32")


def median_loss(program: Program, way: str, policy: str, seeds: int = 3) -> float:
    """Returns the median of the last losses over some seeds."""
    losses = [run(program, way, policy, s).last_loss for s in range(seeds)]
    return statistics.median(losses)


def distance(loss: float, reference: float) -> float:
    """Returns how far a loss is from float32's, relative to that."""
    return abs(loss - reference) / abs(reference)


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


class Loader:
    """A fresh process that loads saved models, one after the other.

    Args:
        *modules: What has to be imported for the models' own classes.

    Example:
        with Loader() as loader:
            assert loader.difference(folder / "vae.keras") == ""
    """

    def __init__(self, *modules: str) -> None:
        self.modules = modules

    def __enter__(self) -> "Loader":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.wild.loaded", *self.modules],
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
            "The fresh process ended; run `python -m tests.wild.loaded`."
        )
