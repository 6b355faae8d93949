"""Stands around a model's training function while its batches are trained.

Only there can a failure be caught before anything else sees it: other callbacks, which
would write the bad weights to their files, and `fit`, which ends at an error.
"""

from collections.abc import Callable
from typing import Any

import keras

from tfamp.keras_hooks.trainer import drop_traced_functions


class AroundTraining:
    """Replaces a model's training function by one that calls it.

    It is the outermost one, and only while an epoch's batches are trained: what other
    callbacks put around the function at the beginning of an epoch finds it as they
    left it.

    Args:
        model: A compiled model in `fit`.
        call: Called in the place of the training function, with the iterator.

    Attributes:
        function: The training function that it stands around.
    """

    def __init__(self, model: keras.Model, call: Callable[[Any], Any]) -> None:
        self._model, self._call = model, call
        self.function: Any = None
        self._outer: Any = None

    def install(self) -> None:
        """Takes its place, unless it has it."""
        function = self._model.train_function
        if function is None or function is self._outer:
            return
        self.function = function

        def guarded(iterator: Any) -> Any:
            return self._call(iterator)

        self._outer = self._model.train_function = guarded

    def remove(self) -> None:
        """Gives the place back."""
        if self._outer is not None and self._model.train_function is self._outer:
            self._model.train_function = self.function
        self.function = self._outer = None

    def train(self, iterator: Any) -> Any:
        """Runs the training function that was there before."""
        return self.function(iterator)

    def trace_anew(self) -> None:
        """Makes the model's functions anew, as a change of its dtypes needs.

        What other callbacks put around the old one comes back with the next epoch.
        """
        is_installed = self._outer is not None
        drop_traced_functions(self._model)
        self._model.make_train_function(force=True)
        self.function = self._outer = None
        if is_installed:
            self.install()
