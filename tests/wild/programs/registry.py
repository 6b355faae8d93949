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


@dataclasses.dataclass
class Trained:
    """What a program gives back."""

    losses: Sequence[float]  # one an epoch
    model: Any  # predicts, and is saved
    inputs: Any  # what it predicts
    # Further results by name, such as generated tokens.
    answers: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program, written as for float32."""

    name: str
    field: str  # what it is about, such as "vision"
    manner: str  # how it is written, such as "own train_step"
    run: Callable[[], Iterator[Any]]
    unsteady: str = ""  # why its loss tells nothing, so that nobody compares it
    unsaved: str = ""  # why the saved model is not compared, by fault of stock Keras
    is_built: bool = True  # whether its models have their weights before training

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
