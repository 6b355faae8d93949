"""The stages that draw anew in each epoch: classes equally often, or by weights."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.data.sampling import plans
from tfamp.data.sampling.labels import Reader, class_ids
from tfamp.data.sampling.sampler import (
    Draw,
    Sampler,
    of_unknown_length,
    seed_text,
)
from tfamp.data.stages.base import Settings
from tfamp.records import checks

METHODS = {
    "resample": "as many examples as there are",
    "oversample": "each as often as the largest",
    "undersample": "each as often as the smallest",
}


@dataclasses.dataclass(frozen=True)
class Balance(Sampler):
    """Makes all classes come equally often; `Pipeline.balance` explains the arguments.

    A class is an integer, a string, a whole float, or a row that is one-hot or holds
    probabilities, which counts by its largest value. Every class gets the same
    number of places, up to one, and within a class every example comes equally
    often, up to one; who comes once more is drawn anew each epoch.
    """

    name: ClassVar[str] = "balance"
    by: Callable[..., Any] | str | None = None
    method: str = dataclasses.field(default="resample", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.by is None or isinstance(self.by, str) or callable(self.by)):
            raise TypeError(
                f"`by` is {self.by!r}; expected None, a key or a function. Leave it "
                "out for the target, or pass a function such as `lambda x, y: y`."
            )
        checks.choice("method", self.method, METHODS)

    @property
    def reader(self) -> Reader:
        """Reads the class of each example."""
        return Reader(self.by, "by")

    def advise(self, values: Any, stacklevel: int) -> None:
        """Warns if there is one class only."""
        if (values == values[0]).all():
            only = values.tolist()[0]
            warnings.warn(
                f"All {len(values):,} examples are of class {only!r}; expected "
                "two classes or more. Balancing changes nothing: check what `by` "
                "reads, or leave `.balance` out.",
                stacklevel=stacklevel,
            )

    def draw(self, values: Any, num_examples: int) -> Draw:
        """Returns a draw in which classes come equally often, up to one."""
        ids, classes = class_ids(values, "by")
        counts = np.bincount(ids)
        num_classes = len(classes)
        num_outputs = {
            "resample": num_examples,
            "oversample": num_classes * int(counts.max()),
            "undersample": num_classes * int(counts.min()),
        }[self.method]
        with tf.device("CPU:0"):
            class_of_each = tf.constant(ids)
        most = math.ceil(math.ceil(num_outputs / num_classes) / int(counts.min()))

        def plan(seed: tf.Tensor) -> tf.Tensor:
            return plans.balanced_plan(class_of_each, num_classes, num_outputs, seed)

        return Draw(num_examples, num_outputs, most, plan)

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns a dataset of the same spec, and of the same length if known."""
        return dataset if self.method == "resample" else of_unknown_length(dataset)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        return (
            f"{self.method} by {self.reader.description}, {seed_text(self.seed)}",
            f"classes equally often, {METHODS[self.method]}; anew each epoch; labels "
            "are read once, at build",
        )


@dataclasses.dataclass(frozen=True)
class Weights(Sampler):
    """Draws examples in proportion to weights.

    `Pipeline.weights` explains the arguments. With replacement, draws are independent
    and example i has probability `weights[i] / sum(weights)` in each. Without, each
    draw is in proportion to the weights of the examples that are left, so that heavy
    examples are likelier to be among them, but less than in proportion.
    """

    name: ClassVar[str] = "weights"
    weights: np.ndarray | Callable[..., Any] = dataclasses.field(repr=False)
    replacement: bool = dataclasses.field(default=True, kw_only=True)
    num_examples: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_examples is not None:
            checks.positive_int("num_examples", self.num_examples)
        elif not self.replacement:
            raise ValueError(
                "`num_examples` is None with `replacement=False`; expected fewer than "
                "there are. Without replacement all of them are a plain shuffle: say "
                "how many to draw, or use `.shuffle`."
            )
        if callable(self.weights):
            return
        weights = np.asarray(self.weights)
        if weights.dtype.kind not in "biuf" or weights.ndim != 1:
            raise TypeError(
                f"`weights` has shape {weights.shape} and dtype {weights.dtype}; "
                "expected one number for each example, or a function of an element. "
                "Pass an array `(examples,)`."
            )
        weights = weights.astype(np.float64)
        _check_weights(weights, None if self.replacement else self.num_examples)
        object.__setattr__(self, "weights", weights)

    @property
    def reader(self) -> Reader | None:
        """Reads the weight of each example, if a function gives it."""
        if callable(self.weights):
            return Reader(self.weights, "weights", is_weight=True)
        return None

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if the dataset never ends or is of another length."""
        super().check(dataset)
        length = known_length(dataset)
        if length is not None:
            self._check_length(length)

    def draw(self, values: Any, num_examples: int) -> Draw:
        """Returns a draw in proportion to the weights."""
        self._check_length(num_examples)
        weights = np.asarray(self.weights if values is None else values)
        num_outputs = self.num_examples or num_examples
        _check_weights(weights, None if self.replacement else num_outputs)
        with tf.device("CPU:0"):
            tensor = tf.constant(weights, tf.float64)

        def plan(seed: tf.Tensor) -> tf.Tensor:
            return plans.weighted_plan(
                tensor, num_outputs, seed, replacement=self.replacement
            )

        # Of the heaviest example: mean and ten deviations of a Poisson variable.
        mean = num_outputs / float(np.sum(weights / np.max(weights)))
        most = math.ceil(mean + 10 * math.sqrt(mean)) if self.replacement else 1
        return Draw(num_examples, num_outputs, most, plan)

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns a dataset of the same spec, of the length that comes out."""
        if self.num_examples is None:
            return dataset
        return dataset.repeat().take(self.num_examples)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        how = "with" if self.replacement else "without"
        many = "as many" if self.num_examples is None else f"{self.num_examples:,}"
        reason = "in proportion to the weights, anew each epoch"
        if callable(self.weights):
            reason += "; weights are read once, at build"
        return f"{many}, {how} replacement, {seed_text(self.seed)}", reason

    def _check_length(self, length: int) -> None:
        if not callable(self.weights) and len(self.weights) != length:
            raise ValueError(
                f"`weights` has {len(self.weights)} values for {length} examples; "
                "expected one for each example that reaches this stage, which comes "
                "after `.subset` and `.filter`. Pass a function of the element if "
                "those leave examples out."
            )


def _check_weights(weights: np.ndarray, num_different: int | None = None) -> None:
    """Raises unless so many different examples can be drawn, one if None."""
    is_wrong = ~(np.isfinite(weights) & (weights >= 0))
    if is_wrong.any():
        first = int(np.argmax(is_wrong))
        raise ValueError(
            f"`weights` has {float(weights[first])!r} at index {first} and "
            f"{int(is_wrong.sum())} such values in all; expected finite numbers of at "
            "least 0. Give those examples the weight 0 to leave them out."
        )
    num_positive = int(np.count_nonzero(weights))
    if num_positive == 0:
        raise ValueError(
            f"All {len(weights)} `weights` are 0, from index 0 on; expected at least "
            "one above 0. Check how they are computed."
        )
    if num_different is not None and num_different > num_positive:
        where = ""
        if num_positive < len(weights):
            where = f" (the first 0 is at index {int(np.argmax(weights == 0))})"
        raise ValueError(
            f"`num_examples` is {num_different} with `replacement=False`; expected at "
            f"most {num_positive}, the number of weights above 0{where}. Draw fewer, "
            "or with replacement."
        )
