"""What the rules of the linter look at, and how their findings read."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layers import Policy, policy_of
from tfamp.numerics.lint.graph import Graph, trace_call
from tfamp.records import checks
from tfamp.records.checks import first_line
from tfamp.records.findings import Finding, Severity
from tfamp.records.formats import HALF
from tfamp.stepping.arguments import first_batch
from tfamp.stepping.snapshots import optimizers_of
from tfamp.stepping.unchanged import seeds_put_back

# What a rule may have to see besides the layers and the graph.
Need = Literal["data", "loss", "optimizer"]
# Batches whose numbers are looked at, and how many of one input in one batch.
NUM_BATCHES = 8
_MAX_NUMBERS = 2**22


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
    def record(self) -> Policy | None:
        """What tfamp knows of it, None for a layer it does not manage."""
        return policy_of(self.layer)

    @property
    def weights(self) -> list[Any]:
        """The weights it holds itself, not through sublayers."""
        return structure.own_weights(self.layer)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with all that its rules look at.

    `parts` are the model and every layer in it; `traced` is a call for training, if it
    could be traced; `leaves` are the values of each input in a few batches, `batch` is
    the first one as the dataset gave it. Loss and optimizers were passed or are those
    of `compile`. `missing` says why a need of rules cannot be met, by its name.
    """

    model: keras.Model
    parts: tuple[Part, ...]
    traced: Graph | None = None
    leaves: tuple[np.ndarray, ...] = ()
    batch: Any = None
    loss: Any = None
    optimizers: tuple[Any, ...] = ()
    is_compiled: bool = False
    missing: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The traced call; a `CannotTellError` where there is none."""
        if self.traced is None:
            raise CannotTellError(self.missing["graph"])
        return self.traced

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

    def optimized(self) -> Iterator[tuple[Any, str, list[Part]]]:
        """Yields each optimizer, a half-precision dtype and the layers stored in it."""
        for optimizer in self.optimizers:
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            for dtype in HALF:
                if parts := self.stored_in(dtype):
                    yield inner, dtype, parts

    def layer_at(self, path: str) -> Any:
        """Returns the layer of a path, None where there is none."""
        return next((p.layer for p in self.parts if p.path == path), None)


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
    the layers and the graph.
    """

    id: str
    needs: tuple[Need, ...]
    check: Callable[[Subject], Iterator[Found]]

    @property
    def documentation(self) -> str:
        """Where the rule is explained."""
        return checks.address(f"lint#{self.id}")

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


def look(
    model: keras.Model,
    *,
    loss: Any,
    optimizer: Any,
    dataset: tf.data.Dataset | None,
) -> Subject:
    """Returns what the rules look at; None for loss or optimizer takes `compile`'s.

    A model that is not built is built, if there are data. Nothing else of it changes,
    and no step is run.
    """
    missing: dict[str, str] = {}
    batch: Any = None
    x: Any = None
    leaves: tuple[np.ndarray, ...] = ()
    if dataset is None:
        missing["data"] = "no `data` were passed"
    else:
        batch, leaves = _read(dataset)
        x = _x_of(batch)
    graph = None
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        stack.enter_context(seeds_put_back())
        # What a call warns of, it will warn of in training.
        warnings.simplefilter("ignore")
        if x is not None and not model.built:
            # As `fit` does; what fails is told when the call is traced.
            with contextlib.suppress(Exception), model.distribute_strategy.scope():
                model(x, training=False)
        if x is None and structure.graph_of(model) is not None:
            specs = [tf.TensorSpec(t.shape, t.dtype) for t in model.inputs]
            x = specs[0] if len(specs) == 1 else specs
        if x is None:
            missing["graph"] = (
                f"model {model.name!r} tells its inputs by its call only, and no "
                "`data` were passed"
            )
        else:
            try:
                graph = trace_call(model, x)
            except Exception as error:  # the user's own code, which may do anything
                why = f"{type(error).__name__}: {first_line(error)}"
                missing["graph"] = f"the model cannot be traced ({why})"
    loss = getattr(model, "loss", None) if loss is None else loss
    is_own = optimizer is not None
    optimizers = [keras.optimizers.get(optimizer)] if is_own else optimizers_of(model)
    for name, given in (("loss", loss is not None), ("optimizer", optimizers)):
        if not given:
            missing[name] = f"no `{name}` was passed, and the model has none"
    return Subject(
        model,
        tuple(
            Part(path, layer, structure.graph_of(layer) is not None)
            for path, layer, _ in structure.walk(model)
        ),
        traced=graph,
        leaves=leaves,
        batch=batch,
        loss=loss,
        optimizers=tuple(optimizers),
        is_compiled=not is_own,
        missing=missing,
    )


def _x_of(batch: Any) -> Any:
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    # Ragged and sparse tensors stay as they are.
    return tf.nest.map_structure(
        lambda leaf: leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf), x
    )


def _read(dataset: tf.data.Dataset) -> tuple[Any, tuple[np.ndarray, ...]]:
    """Returns the first batch, and the numbers of each input in the first batches."""
    first, rows = None, []
    for batch in dataset.take(NUM_BATCHES):
        first = batch if first is None else first
        rows.append([_as_rows(leaf) for leaf in tf.nest.flatten(_x_of(batch))])
    if first is None:
        # It raises what every function says of such a dataset.
        first_batch(dataset)
    return first, tuple(np.concatenate(leaves) for leaves in zip(*rows, strict=True))


def _as_rows(leaf: Any) -> np.ndarray:
    """Returns a tensor as (numbers, features), so that batches of any shape join.

    Of a large one every n-th row is taken; ragged and sparse ones have none.
    """
    if not isinstance(leaf, tf.Tensor):
        return np.zeros((0, 1))
    array = leaf.numpy()
    array = array.reshape(-1, array.shape[-1] if array.ndim > 1 else 1)
    return array[:: 1 + array.size // _MAX_NUMBERS]
