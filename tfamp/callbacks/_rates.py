"""Rates of training out of windows of steps, and the watch that cuts these windows.

For the length of a `fit` the training function is handed a timed iterator. On an
accelerator a call returns before the device is done, but `fit` reads the logs of each
step for its callbacks, which waits for it. Where there are no logs to read, Python runs
ahead.
"""

import collections
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.callbacks._timed_iterator import ITERATORS, Drawn, Meter
from tfamp.graph import forward_flops
from tfamp.keras_hooks import structure
from tfamp.machine.speeds import peak_flops

# A backward pass computes a product for the inputs and one for the weights.
# Source: Kaplan et al., Scaling Laws for Neural Language Models, 2020, section 2.1.
TRAINING_OVER_FORWARD = 3
# One for a model: traces of its training function are kept by the meter, so that the
# next `fit` finds them.
_METERS: "weakref.WeakKeyDictionary[keras.Model, Meter]" = weakref.WeakKeyDictionary()


def flops_of_example(model: keras.Model, element_spec: Any) -> tuple[float | None, str]:
    """Returns the FLOPs of training on one example, or None and why.

    It traces the model once.
    """
    specs = _input_specs(model, element_spec)
    if specs is None:
        return None, "the size of an example is not fixed"
    try:
        forward = forward_flops(model, specs)
    except Exception as error:  # a `call` that does without some shapes or values
        return None, f"counting failed ({type(error).__name__})"
    return float(TRAINING_OVER_FORWARD * forward), ""


def peak_of_devices(model: keras.Model) -> tuple[float | None, str]:
    """Returns the peak FLOPs a second of what trains a model, or None and why."""
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return None, "the peak of a CPU is not known"
    names = {
        tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
        for gpu in gpus
    }
    if len(names) > 1:
        return None, f"the GPUs differ: {', '.join(sorted(names))}"
    name, dtype = names.pop(), compute_dtype_of(model)
    peak = peak_flops(name, dtype)
    if peak is None:
        return None, f"the peak of {name} in {dtype} is not in the table"
    return peak * model.distribute_strategy.num_replicas_in_sync, ""


def compute_dtype_of(model: keras.Model) -> str:
    """Returns the dtype that most of a model's weights are multiplied in.

    "tfloat32" where TensorFlow runs float32 products in that.
    """
    sizes: collections.Counter[str] = collections.Counter()
    for _, layer, _ in structure.walk(model):
        below = sum(child.count_params() for child in structure.children(layer))
        sizes[layer.compute_dtype] += layer.count_params() - below
    dtype = sizes.most_common(1)[0][0] if sizes else "float32"
    if (
        dtype == "float32"
        and tf.config.experimental.tensor_float_32_execution_enabled()
    ):
        return "tfloat32"
    return dtype


def _input_specs(model: keras.Model, element_spec: Any) -> Any:
    """Returns what one example is like, as a batch of 1; None where that varies."""
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    if not all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(inputs)):
        # Batches cut up for replicas; a graph of layers knows its inputs.
        if not isinstance(getattr(model, "inputs", None), list):
            return None
        inputs = tf.nest.map_structure(
            lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), model.input
        )
    for spec in tf.nest.flatten(inputs):
        if not spec.shape.rank or None in spec.shape.as_list()[1:]:
            return None
    return tf.nest.map_structure(
        lambda spec: tf.TensorSpec([1, *spec.shape[1:]], spec.dtype), inputs
    )


class Window(NamedTuple):
    """Some steps in a row, between two moments at which the device was idle.

    Attributes:
        seconds: How long they took.
        batches: Their number.
        examples: Examples in them; None where they cannot be counted.
        wait_seconds: How much of it they waited for batches; None where that is not
            to be seen.
    """

    seconds: float
    batches: int
    examples: int | None
    wait_seconds: float | None


class Rates(NamedTuple):
    """What windows come to; None where it is not known.

    Attributes:
        examples_per_second: All examples over all of the time.
        step_seconds: The median step, each window standing for its steps.
        input_wait: Part of the time spent waiting for batches, in [0, 1].
        model_flops_utilisation: Part of the device's peak that the model's FLOPs take.
    """

    examples_per_second: float | None
    step_seconds: float
    input_wait: float | None
    model_flops_utilisation: float | None

    def known(self) -> dict[str, float]:
        """Returns the values that are there, by name."""
        named = self._asdict().items()
        return {name: value for name, value in named if value is not None}


def rates_of(
    windows: Sequence[Window],
    *,
    flops_per_example: float | None = None,
    peak_flops: float | None = None,
) -> Rates | None:
    """Returns the rates of windows, None where they hold no time.

    `flops_per_example` are those of a training step, forward and backward; `peak_flops`
    is the most FLOPs a second of all devices that train.

    Example:
        >>> slow, fast = Window(3.0, 10, 320, 1.0), Window(1.0, 10, 320, 0.0)
        >>> rates_of([slow, fast, fast])  # 960 examples in 5 s, 1 s of it waited
        ... # doctest: +NORMALIZE_WHITESPACE
        Rates(examples_per_second=192.0, step_seconds=0.1, input_wait=0.2,
            model_flops_utilisation=None)

    Source: Chowdhery et al., PaLM, 2022, appendix B (model FLOPs utilisation).
    """
    windows = [window for window in windows if window.batches and window.seconds > 0]
    if not windows:
        return None
    seconds = sum(window.seconds for window in windows)
    examples = [window.examples for window in windows if window.examples is not None]
    per_second = sum(examples) / seconds if len(examples) == len(windows) else None
    waits = [w.wait_seconds for w in windows if w.wait_seconds is not None]
    utilisation = None
    if per_second is not None and flops_per_example and peak_flops:
        utilisation = per_second * flops_per_example / peak_flops
    return Rates(
        examples_per_second=per_second,
        step_seconds=_median_step(windows),
        input_wait=min(1.0, sum(waits) / seconds)
        if len(waits) == len(windows)
        else None,
        model_flops_utilisation=utilisation,
    )


def _median_step(windows: Sequence[Window]) -> float:
    """Returns the time of a step that half of all steps do not exceed.

    Of a window only the mean is known, which stands for each of its steps.
    """
    half, seen = sum(window.batches for window in windows) / 2, 0
    median = 0.0
    for seconds, batches in sorted((w.seconds / w.batches, w.batches) for w in windows):
        if seen < half:
            median = seconds
        seen += batches
    return median


class Watch:
    """Counts and times what a model trains on, in windows of `every_steps` batches.

    Examples are counted where `batch_size` is None. With `is_asynchronous` calls return
    before the device is done, as on a GPU; where nothing waits for it then, only a step
    that begins on an idle device shows how long it waits: one in each window.
    `on_window` is called with each window and the number of batches so far,
    `on_first_step` with the seconds of the first step and the element spec of its
    batch. `has_foreign_iterator` says that the model draws from what cannot be timed.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        every_steps: int,
        batch_size: int | None,
        is_asynchronous: bool,
        clock: Callable[[], float],
        wait_for_device: Callable[[], None],
        on_window: Callable[[Window, int], None],
        on_first_step: Callable[[float, Any], None],
    ) -> None:
        self._steps = int(model.steps_per_execution or 1)
        self._calls_in_window = max(1, every_steps // self._steps)
        self._batch_size = batch_size
        self._is_asynchronous, self._clock = is_asynchronous, clock
        self._runs_ahead = False
        self._wait_for_device = wait_for_device
        self._on_window, self._on_first_step = on_window, on_first_step
        if model not in _METERS:
            _METERS[model] = Meter(model.distribute_strategy)
        self._meter = _METERS[model]
        self.has_foreign_iterator = False
        self._is_first = True
        self._iterator: Any = None
        self._timed: Any = None
        self._reset_window(0.0, Drawn(0.0, 0, 0))
        self._last_call: int | None = None
        self._calls = self._foreign_batches = 0
        self._ended = 0.0

    def begin_epoch(self, num_batches: int | None) -> None:
        """Takes the next iterator, of `num_batches` where known; windows begin anew."""
        self._iterator = self._timed = None
        self._meter.let_iterator_go()
        self._calls, self._in_window = 0, 0
        # Then what other callbacks do after the epoch is no part of the last window.
        self._last_call = None if not num_batches else -(-num_batches // self._steps)

    def end_window(self) -> None:
        """Ends the window that is open, if there is one."""
        if not self._in_window:
            return
        if self._runs_ahead:
            self._wait_for_device()
            self._ended = self._clock()
        drawn, before = self._read(), self._drawn
        batches = drawn.batches - before.batches
        # A step is taken on at least one example, so none means none to count.
        examples: int | None = drawn.examples - before.examples or None
        if self._batch_size is not None:
            examples = batches * self._batch_size
        wait: float | None = drawn.wait_seconds - before.wait_seconds
        if self.has_foreign_iterator or self._steps > 1:
            wait = None
        elif self._runs_ahead:
            wait = self._sampled * batches
        window = Window(self._ended - self._started, batches, examples, wait)
        self._on_window(window, drawn.batches)
        self._reset_window(self._ended, drawn)

    def call(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Runs the training function once."""
        is_new = self._iterator is not iterator
        if is_new:
            self.has_foreign_iterator |= not isinstance(iterator, ITERATORS)
            self._iterator, self._timed = iterator, self._meter.around(iterator)
        if not self._calls and not self._is_first and self._runs_ahead:
            self._wait_for_device()
        if is_new if self._is_first else not self._calls:
            self._reset_window(self._clock(), self._read())
        num_traces = self._meter.num_traces
        logs = function(self._timed)
        self._ended = self._clock()
        self._runs_ahead = self._is_asynchronous and not logs
        self._calls += 1
        self._in_window += 1
        if self.has_foreign_iterator:
            self._foreign_batches += self._steps
        if self._runs_ahead and self._in_window == 1:
            self._sampled = self._meter.read().wait_seconds - self._drawn.wait_seconds
        # The first step of an epoch may wait for buffers to fill, which says nothing of
        # the others.
        is_over = (
            self._calls == self._last_call
            or self._in_window >= self._calls_in_window
            or (self._runs_ahead and self._calls == 1)
        )
        if self._is_first or self._meter.num_traces != num_traces:
            self._begin_anew()
        elif is_over:
            self.end_window()
        return logs

    def _begin_anew(self) -> None:
        """Begins after a step that was traced or compiled, and tells of the first."""
        self._wait_for_device()
        seconds = self._clock() - self._started
        if self._is_first:
            self._is_first = False
            self._on_first_step(seconds, getattr(self._iterator, "element_spec", None))
        self._reset_window(self._clock(), self._read())

    def _read(self) -> Drawn:
        """Returns what was drawn; what a foreign iterator draws is known by calls."""
        drawn = self._meter.read()
        return drawn._replace(batches=drawn.batches + self._foreign_batches)

    def _reset_window(self, now: float, drawn: Drawn) -> None:
        """Begins a window, on an idle device."""
        self._started, self._drawn, self._in_window = now, drawn, 0
        self._sampled = 0.0
