"""Makes models and batches of steps that fail."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers

import tfamp
from benchmarks.faults.building import Raw, assemble, trunk
from benchmarks.faults.records import Failure

WIDTH = 8
BATCH = 16


@contextlib.contextmanager
def policy_in_force(policy: str, **options: Any) -> Iterator[None]:
    """Has models that are built inside managed under a policy; float32 is stock."""
    if policy == "float32":
        yield
        return
    with contextlib.ExitStack() as stack:
        with warnings.catch_warnings():
            # Speed is no matter here.
            warnings.filterwarnings("ignore", message=".*will be slow or gain nothing")
            stack.enter_context(tfamp.scope(policy, **options))
        yield


def network(
    middle: Sequence[Any] = (),
    *,
    style: str = "functional",
    depth: int = 6,
    place: int = 1,
    loss: str = "mse",
    activation: str | None = None,
    units: int = 1,
    kind: str = "dense",
    shape: Sequence[int] = (WIDTH,),
    optimizer: Any = None,
) -> keras.Model:
    """Returns a compiled chain with elements put in after a third of its layers.

    Args:
        middle: The elements put in.
        style: As for `assemble`.
        depth: Layers of the trunk.
        place: After so many groups of three layers.
        loss: As for `compile`.
        activation: Of the head.
        units: Of the head.
        kind: As for `trunk`.
        shape: Of an example.
        optimizer: Adam if None.
    """
    elements = trunk(kind, depth, WIDTH)
    cut = place * 3
    end: list[Any] = [layers.Flatten(name="flat")] if len(shape) > 1 else []
    end.append(layers.Dense(units, activation=activation, name="head"))
    model = assemble(
        style, shape, elements[:cut], list(middle), [*elements[cut:], *end]
    )
    model.compile(optimizer=optimizer or keras.optimizers.Adam(1e-3), loss=loss)
    return model


def batch(
    rng: np.random.Generator, shape: Sequence[int] = (WIDTH,), *, classes: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns normal inputs and a target, or a class of so many."""
    x = rng.normal(size=(BATCH, *shape)).astype("float32")
    if classes:
        return x, rng.integers(0, classes, BATCH).astype("int32")
    return x, rng.normal(size=(BATCH, 1)).astype("float32")


def failure(
    name: str,
    cause: str,
    make: Callable[[np.random.Generator], tuple[Any, Any]],
    *,
    policy: str = "float32",
    layers: Sequence[str] = (),
    **options: Any,
) -> Failure:
    """Returns a failure whose model is made under a policy.

    Args:
        name: Unique name.
        cause: As in `Failure`.
        make: Takes a generator, returns (model, batch).
        policy: "float32" or as for `tfamp.scope`.
        layers: Paths of which any is right.
        **options: Of `tfamp.scope`.
    """

    def build(seed: int, policy: str = policy) -> tuple[Any, Any]:
        keras.utils.set_random_seed(seed)
        own = options if policy == "mixed_float16" else {}
        with policy_in_force(policy, **own):
            return make(np.random.default_rng([seed, 11]))

    return Failure(name, build, cause, frozenset(layers))


def damaged(
    damage: Callable[[Any, Any], Any], **options: Any
) -> Callable[[np.random.Generator], Any]:
    """Returns a maker of a healthy model and a batch that was damaged."""
    classes = options.pop("classes", 0)
    if classes:
        options |= {
            "loss": "sparse_categorical_crossentropy",
            "activation": "softmax",
            "units": classes,
        }

    def make(rng: np.random.Generator) -> Any:
        x, y = batch(rng, options.get("shape", (WIDTH,)), classes=classes)
        return network(**options), damage(x, y)

    return make


def with_part(
    part: Callable[[], list[Any]], **options: Any
) -> Callable[[np.random.Generator], Any]:
    """Returns a maker of a model with a part in it and a good batch."""

    def make(rng: np.random.Generator) -> Any:
        return network(part(), **options), batch(rng, options.get("shape", (WIDTH,)))

    return make


def raw(name: str, function: Callable[[Any], Any]) -> Callable[[], list[Any]]:
    """Returns what makes a user's layer of a function, and one that normalises."""
    return lambda: [Raw(function, name=name), layers.LayerNormalization(name="settle")]
