"""What a program of the corpus says of itself, and the list of all programs.

A program is a generator. It builds its models, yields those that have their weights
before training (or nothing), trains, and yields what came out as a `Trained`:

    @program("vision", "Sequential")
    def digits():
        model = keras.Sequential([...])
        yield model
        model.compile("adam", "mse")
        history = model.fit(x, y, epochs=5, verbose=0)
        yield Trained(history.history["loss"], model, x[:4])
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Of a last loss against float32's, where training is long enough to say.
TOLERANCE = 0.05


@dataclasses.dataclass
class Trained:
    """What a program gives back.

    Args:
        losses: One number an epoch.
        model: Predicts, and is saved.
        inputs: What it predicts.
        answers: Further results by name, such as generated tokens.
    """

    losses: Sequence[float]
    model: Any
    inputs: Any
    answers: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program, written as for float32.

    Args:
        name: The function's name.
        field: What it is about, such as "vision".
        manner: How it is written, such as "own train_step".
        run: The generator.
        tolerance: Of the last loss against float32's, relative.
        why: Why the tolerance is not `TOLERANCE`.
        unsaved: Why the saved model is not compared, such as that stock Keras cannot
            load it.
        is_built: Whether its models have their weights before training.
    """

    name: str
    field: str
    manner: str
    run: Callable[[], Iterator[Any]]
    tolerance: float = TOLERANCE
    why: str = ""
    unsaved: str = ""
    is_built: bool = True

    def __str__(self) -> str:
        return self.name


PROGRAMS: dict[str, Program] = {}


def program(
    field: str, manner: str, **options: Any
) -> Callable[[Callable[[], Iterator[Any]]], Callable[[], Iterator[Any]]]:
    """Returns a decorator that registers a program under its function's name."""

    def register(run: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
        name = run.__name__
        if name in PROGRAMS:
            raise ValueError(f"Program {name!r} exists already; give it another name.")
        PROGRAMS[name] = Program(name, field, manner, run, **options)
        return run

    return register
