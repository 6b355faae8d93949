"""Reruns each layer alone in low precision, on what it got in a float32 step."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.numerics.sensitivity.errors import (
    StepOutputs,
    forward_error,
    gradient_error,
    run_with_outputs,
)
from tfamp.numerics.sensitivity.reruns import Rerun, rerun
from tfamp.records.checks import first_line
from tfamp.records.console import progress
from tfamp.records.formats import FORMATS
from tfamp.stepping.eager_step import Site, Step, floats, tapped
from tfamp.stepping.layer_calls import (
    Recorded,
    Recorder,
    set_state,
    state_of,
    units,
    watched_sites,
)

# What TensorFlow raises where a layer has no kernel for a dtype, or mixes two.
CANNOT_RUN = (
    TypeError,
    ValueError,
    NotImplementedError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.UnimplementedError,
)
# An error of gradients from which it is asked whether they are 0 by their nature.
_WORTH_A_LOOK = 0.05
# A gradient below this part of the sum of its parts' magnitudes is.
_CANCELLED = 1e-4
# So is one below so many times the format's epsilon, of the root of the sum of their
# squares: rounding the parts changes it by about epsilon of that, and another batch by
# all of it.
_ROUNDED = 4.0
# A layer that runs again on the same numbers gives the same up to this.
_REPEATED = 1e-3


@dataclasses.dataclass(eq=False)
class Suspect:
    """What the reruns of one layer came to, the worst over batches and calls.

    `forward` is the error of its outputs relative to their spread over the batch,
    `backward` that of its gradients by loss scale, `worst` and `worst_backward` the
    calls they are of; `failure` is what it raised instead of running.
    """

    site: Site
    forward: float = 0.0
    backward: dict[float, float] = dataclasses.field(default_factory=dict)
    worst: Recorded | None = None
    worst_backward: Recorded | None = None
    failure: str = ""

    def add(
        self, recorded: Recorded, forward: float, loss_scale: float, backward: float
    ) -> None:
        """Takes in one rerun."""
        if self.worst is None or forward > self.forward:
            self.forward, self.worst = forward, recorded
        highest = max(self.backward.values(), default=-1.0)
        if backward > highest:
            self.worst_backward = recorded
        known = self.backward.get(loss_scale, 0.0)
        self.backward[loss_scale] = max(known, backward)


class Shadow:
    """The shadow pass over some batches, of a built model that computes in float32 now.

    `suspects` has what was measured by path, in the order of the layers; `steps` are
    the float32 steps; `random` are layers that give something else each time, as they
    draw numbers past Keras's seeds: they are not judged.
    """

    def __init__(self, model: keras.Model, dtype: str) -> None:
        self._model, self._dtype = model, dtype
        self._units = units(model)
        self._watched = watched_sites(model, self._units)
        self._is_unit = {id(site.layer) for site in self._units}
        self.suspects = {site.path: Suspect(site) for site in self._units}
        self.steps: list[StepOutputs] = []
        self.random: list[Any] = []
        self._states: list[Any] = []
        self._recorded: list[list[Recorded]] = []

    def record(self, batch: Any) -> Step:
        """Runs a step in float32 and keeps what went through the layers."""
        recorder = Recorder()
        self._states.append(state_of(self._model))
        with tapped(
            self._model, recorder, only=lambda site: id(site.layer) in self._watched
        ):
            self.steps.append(run_with_outputs(self._model, batch))
        self._recorded.append(
            [each for each in recorder.calls if id(each.site.layer) in self._is_unit]
        )
        return self.steps[-1].step

    def begin_again(self, number: int) -> None:
        """Gives the model the state it had ahead of a recorded step."""
        set_state(self._states[number])

    def measure(self, *loss_scales: float) -> None:
        """Reruns what was recorded, with each loss scale."""
        calls = [recorded for batch in self._recorded for recorded in batch]
        what = f"Rerunning layers in {self._dtype}"
        with progress(what, len(calls), unit="calls") as done:
            for number, recorded in enumerate(calls, start=1):
                self._measure_call(recorded, loss_scales)
                done(number)

    def _measure_call(self, recorded: Recorded, loss_scales: Sequence[float]) -> None:
        suspect = self.suspects[recorded.site.path]
        layer = suspect.site.layer
        if suspect.failure or any(layer is each for each in self.random):
            return
        exact = _Exact(recorded, self._dtype)
        if not exact.repeats:
            self.random.append(layer)
            return
        for loss_scale in loss_scales:
            try:
                low = rerun(recorded, self._dtype, loss_scale=loss_scale)
            except CANNOT_RUN as error:
                suspect.failure, suspect.worst = first_line(error), recorded
                return
            forward = 0.0
            outputs = zip(
                arrays(low.outputs), exact.outputs, exact.rerun.num_sources, strict=True
            )
            for a, b, num_sources in outputs:
                off = forward_error(a, b)
                # What only passes through is the affair of those who made and take it.
                sources = exact.sources[:num_sources]
                if off > _WORTH_A_LOOK and any(np.array_equal(b, s) for s in sources):
                    continue
                forward = max(forward, off)
            backward = _backward(low, exact.rerun)
            if backward > _WORTH_A_LOOK:
                backward = _backward(low, exact.without_cancelled)
            suspect.add(recorded, forward, loss_scale, backward)


class _Exact:
    """The rerun of a call in float32, and what is made of it once for all scales."""

    def __init__(self, recorded: Recorded, dtype: str) -> None:
        self.recorded = recorded
        self.rerun = rerun(recorded, "float32")
        self._rounded = _ROUNDED * FORMATS[dtype].epsilon

    @functools.cached_property
    def outputs(self) -> list[np.ndarray]:
        return arrays(self.rerun.outputs)

    @property
    def repeats(self) -> bool:
        """Whether the rerun gave what the step did."""
        recorded = [*floats(self.recorded.outputs), *self.recorded.losses]
        pairs = zip(self.outputs, arrays(recorded), strict=False)
        return all(forward_error(a, b) <= _REPEATED for a, b in pairs)

    @functools.cached_property
    def sources(self) -> list[np.ndarray]:
        return arrays(self.rerun.sources)

    @functools.cached_property
    def without_cancelled(self) -> Rerun:
        """The rerun but for gradients that are 0 by their nature.

        Of a bias ahead of a normalization all parts cancel, so what is left is rounding
        in every precision; of a scale ahead of one all but its epsilon. So a gradient
        is compared with the sum of its parts' magnitudes, and with about the root of
        the sum of their squares.
        """
        sums = rerun(self.recorded, "float32", changed=tf.abs)
        roots = rerun(self.recorded, "float32", changed=_with_signs)

        def kept(gradient: Any, total: Any, root: Any) -> Any:
            if gradient is None or total is None or root is None:
                return gradient
            least = max(_CANCELLED * tf.norm(total), self._rounded * tf.norm(root))
            return gradient if bool(tf.norm(gradient) >= least) else None

        def all_kept(name: str) -> list[Any]:
            of_each = (getattr(each, name) for each in (self.rerun, sums, roots))
            return list(map(kept, *of_each))

        return self.rerun._replace(
            input_gradients=all_kept("input_gradients"),
            weight_gradients=all_kept("weight_gradients"),
        )


def arrays(tensors: Sequence[Any]) -> list[np.ndarray]:
    """Returns tensors as float32 arrays."""
    return [np.asarray(tf.cast(tensor, tf.float32)) for tensor in tensors]


def _backward(low: Rerun, exact: Rerun) -> float:
    """Returns the error of the gradients by inputs or by weights, the larger one."""
    return max(
        gradient_error(_optional(a), _optional(b))
        for a, b in (
            (low.input_gradients, exact.input_gradients),
            (low.weight_gradients, exact.weight_gradients),
        )
    )


def _with_signs(gradient: tf.Tensor) -> tf.Tensor:
    """Returns a gradient with random signs: what is summed then adds up by squares."""
    signs = np.random.default_rng(0).choice((-1.0, 1.0), gradient.shape)
    return gradient * tf.cast(signs, gradient.dtype)


def _optional(tensors: Sequence[Any]) -> list[np.ndarray | None]:
    return [None if tensor is None else np.asarray(tensor) for tensor in tensors]
