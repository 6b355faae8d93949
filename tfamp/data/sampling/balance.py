"""The stage that makes all classes come equally often."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

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
