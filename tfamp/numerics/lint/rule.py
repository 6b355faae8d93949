"""One rule of the linter: its name, what it has to see, and how its findings read."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import keras
import numpy as np

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layer_record import LayerRecord, record_of
from tfamp.numerics.lint.graph import Graph
from tfamp.records import pages
from tfamp.records.findings import Finding, Severity
from tfamp.records.formats import HALF

# What a rule may have to see besides the layers.
Need = Literal["graph", "data", "loss", "optimizer"]


@dataclasses.dataclass(frozen=True)
class Part:
    """One layer of a model: its path is the model's own name for the model itself.

    A graph of layers computes nothing itself.
    """

    path: str
    layer: keras.layers.Layer
    is_graph: bool = False

    @property
    def dtype(self) -> str:
        """The dtype it computes in, "" for a graph of layers."""
        return "" if self.is_graph else str(self.layer.compute_dtype)

    @property
    def is_half(self) -> bool:
        """Whether it computes in float16 or bfloat16."""
        return self.dtype in HALF

    @property
    def record(self) -> LayerRecord | None:
        """What tfamp knows of it, None for a layer it does not manage."""
        return record_of(self.layer)

    @property
    def weights(self) -> list[Any]:
        """The weights it holds itself, not through sublayers."""
        return structure.own_weights(self.layer)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with all that its rules look at.

    `parts` are the model and every layer in it; `graph` is a traced call for training;
    `leaves` are the values of each input in a few batches, `batch` is the first one as
    the dataset gave it. Loss and optimizers were passed or are those of `compile`.
    `missing` says why a need of rules cannot be met, by its name.
    """

    model: keras.Model
    parts: tuple[Part, ...]
    graph: Graph | None = None
    leaves: tuple[np.ndarray, ...] = ()
    batch: Any = None
    loss: Any = None
    optimizers: tuple[Any, ...] = ()
    is_compiled: bool = False
    missing: dict[str, str] = dataclasses.field(default_factory=dict)

    def in_dtype(self, dtype: str) -> list[Part]:
        """Returns the layers that compute in a dtype."""
        return [part for part in self.parts if part.dtype == dtype]

    def half(self) -> list[Part]:
        """Returns the layers that compute in float16 or bfloat16."""
        return [part for part in self.parts if part.is_half]

    def stored_in(self, dtype: str) -> list[Part]:
        """Returns the layers with trainable weights of a dtype."""
        return [
            part
            for part in self.parts
            if any(w.trainable and w.dtype == dtype for w in part.weights)
        ]

    def layer_at(self, path: str) -> Any:
        """Returns the layer of a path, None where there is none."""
        return next((p.layer for p in self.parts if p.path == path), None)


def parts_of(model: keras.Model) -> tuple[Part, ...]:
    """Returns the model and every layer in it, once each."""
    return tuple(
        Part(path, layer, structure.graph_of(layer) is not None)
        for path, layer, _ in structure.walk(model)
    )


class Found(NamedTuple):
    """What a rule found, without what all its findings share.

    `layer` and `figure` are None where it is about no layer, or no number decided.
    """

    severity: Severity
    message: str
    remedy: str
    layer: str | None = None
    figure: float | None = None
    details: dict[str, int | float | str | None] | None = None


class CannotTellError(Exception):
    """Raised by a rule that could not look; its text is the reason."""


@dataclasses.dataclass(frozen=True)
class LintRule:
    """A rule of the linter, which yields what it finds in a subject.

    Its name is its section in the documentation; `needs` is what it has to see besides
    the layers.
    """

    id: str
    needs: tuple[Need, ...]
    check: Callable[[Subject], Iterator[Found]]

    @property
    def documentation(self) -> str:
        """Where the rule is explained."""
        return pages.address(f"lint#{self.id}")

    def findings(self, subject: Subject) -> list[Finding]:
        """Returns what the rule finds, each with a link to its explanation.

        A `CannotTellError` where something is missing that it has to see.
        """
        for need in self.needs:
            if need in subject.missing:
                raise CannotTellError(subject.missing[need])
        page = {"documentation": self.documentation}
        return [
            Finding(
                self.id,
                found.severity,
                found.message,
                found.remedy,
                layer=found.layer,
                figure=None if found.figure is None else float(found.figure),
                details={**(found.details or {}), **page},
            )
            for found in self.check(subject)
        ]


def rule(
    id: str, *, needs: tuple[Need, ...] = ()
) -> Callable[[Callable[[Subject], Iterator[Found]]], LintRule]:
    """Makes a rule of the function below it."""
    return lambda check: LintRule(id, needs, check)
