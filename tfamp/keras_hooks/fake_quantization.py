"""Rounds what a layer's product multiplies to int8 values, and learns their range.

While the `call` of such a layer runs, each of its kernels reads as the int8 values that
an export would hold, one scale a channel, and its input is rounded to 256 steps of a
moving range. Gradients pass as if nothing was rounded, but for inputs out of the range.

Relies on: `Variable._maybe_autocast` handing the stored value to the autocast scope;
the tracker of a built layer being locked; children found by attribute being written
into files beside the weights, which are passed over where a model lacks them.

Source: B. Jacob et al., Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference, 2018, section 3.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import tree
from keras.src.backend.common import variables
from keras.src.backend.common.global_state import get_global_attribute
from tensorflow.python.eager import record

from tfamp.keras_hooks import backend, structure
from tfamp.keras_hooks.patches import like, replaced

_ATTRIBUTE = "tfamp_fake_quantized"
_BEFORE = "_tfamp_call_before"
_MOMENTUM = 0.99  # of the moving range
STEPS = 127  # of a kernel to each side of 0
_OWN = keras.layers
_CELLS = (_OWN.SimpleRNNCell, _OWN.GRUCell, _OWN.LSTMCell)
_DEPTHWISE = (_OWN.DepthwiseConv1D, _OWN.DepthwiseConv2D)
_SEPARABLE = (_OWN.SeparableConv1D, _OWN.SeparableConv2D)
_TRANSPOSED = (_OWN.Conv1DTranspose, _OWN.Conv2DTranspose, _OWN.Conv3DTranspose)
_PLAIN = (_OWN.Dense, _OWN.Conv1D, _OWN.Conv2D, _OWN.Conv3D)


class InputRange(keras.layers.Layer):
    """The moving range of a layer's input; `num_seen` counts the batches in it."""

    is_no_part = True  # of a model's structure, as people see it
    ahead: Any = None  # its state ahead of the sequences whose steps it gets now

    def __init__(self) -> None:
        super().__init__(dtype="float32", trainable=False, name="input_range")
        options: dict[str, Any] = {"trainable": False, "autocast": False}
        self.low, self.high, self.num_seen = (
            self.add_weight((), "zeros", name=name, aggregation="mean", **options)
            for name in ("low", "high", "num_seen")
        )
        self.built = True

    def state(self) -> tuple[Any, Any, Any]:
        """Returns the values of low, high and num_seen."""
        low, high = tf.convert_to_tensor(self.low), tf.convert_to_tensor(self.high)
        return low, high, tf.convert_to_tensor(self.num_seen)

    def rounded(self, x: Any, *, training: bool) -> Any:
        """Returns `x` in 256 steps of the range; in training the range moves first.

        It begins as that of the first batch, of a cell as that of all steps of the
        first sequences. A batch that is not finite moves nothing, and as long as none
        was seen an input is rounded to its own range.
        """
        value = tf.cast(x, tf.float32)
        least, most = tf.reduce_min(value), tf.reduce_max(value)
        low, high, seen = self.state()
        if training:
            from_low, from_high, from_seen = self.ahead or (low, high, seen)
            kept = tf.where(from_seen > 0, _MOMENTUM, 0.0)
            lower = kept * from_low + (1 - kept) * least
            higher = kept * from_high + (1 - kept) * most
            is_later = seen > from_seen  # a step of sequences of which some were seen
            lower = tf.where(is_later, tf.minimum(low, lower), lower)
            higher = tf.where(is_later, tf.maximum(high, higher), higher)
            is_finite = tf.math.is_finite(least) & tf.math.is_finite(most)
            low = tf.where(is_finite, lower, low)
            high = tf.where(is_finite, higher, high)
            seen += tf.where(is_finite, 1.0, 0.0)
            self.low.assign(low)
            self.high.assign(high)
            self.num_seen.assign(seen)
        low = tf.minimum(tf.where(seen > 0, low, least), 0.0)
        high = tf.maximum(tf.where(seen > 0, high, most), 0.0)
        high = tf.where(high > low, high, low + 1.0)
        low, high = tf.stop_gradient(low), tf.stop_gradient(high)
        rounded = tf.quantization.fake_quant_with_min_max_vars(value, low, high)
        return tf.cast(rounded, x.dtype)


class _RoundedKernels(variables.AutocastScope):
    """Has kernels read as their int8 values, cast as they would be without it."""

    def __init__(self, dtype: Any, kernels: Mapping[int, tuple[int, ...]]) -> None:
        super().__init__(dtype)
        self._kernels = kernels

    def maybe_cast(self, value: Any) -> Any:
        """Returns the value that a layer computes with."""
        channels = self._kernels.get(id(value))
        if channels is not None:
            value = round_channels(value, channels)
        return super().maybe_cast(value)


def round_channels(value: Any, channels: tuple[int, ...]) -> Any:
    """Returns a kernel as int8 values times one scale for each channel.

    Values go from -127 to 127 times the scale, the largest of the channel to the end.

    Example:
        >>> kernel = tf.constant([[0.5, 20.0], [127.0, -127.0]])
        >>> round_channels(kernel, (1,)).numpy().tolist()
        [[0.0, 20.0], [127.0, -127.0]]
    """
    kernel = tf.cast(tf.convert_to_tensor(value), tf.float32)
    rank = len(kernel.shape)
    others = [i for i in range(rank) if i not in {axis % rank for axis in channels}]
    most = tf.reduce_max(tf.abs(tf.stop_gradient(kernel)), axis=others, keepdims=True)
    scale = tf.where(most > 0, most, 1.0) / STEPS
    # TensorFlow's own operation for channels takes several times as long.
    rounded = tf.round(kernel / scale) * scale
    return kernel + tf.stop_gradient(rounded - kernel)


def kernels_of(layer: keras.layers.Layer) -> Mapping[str, tuple[int, ...]]:
    """Returns the axes of the channels of each kernel, by the attribute that holds it.

    Example:
        >>> layer = keras.layers.EinsumDense("abc,cde->abde", (None, 2, 4))
        >>> kernels_of(layer)
        {'_kernel': (1, 2)}
        >>> kernels_of(keras.layers.Flatten())
        {}
    """
    if isinstance(layer, keras.layers.EinsumDense):
        _, kernel, output = layer.equation.replace("->", ",").split(",")
        axes = [i for i, letter in enumerate(kernel) if letter in output]
        return {"_kernel": tuple(axes)}
    if isinstance(layer, _CELLS):
        return {"kernel": (-1,), "recurrent_kernel": (-1,)}
    if isinstance(layer, _DEPTHWISE):
        return {"kernel": (-2, -1)}
    if isinstance(layer, _SEPARABLE):
        return {"depthwise_kernel": (-2, -1), "pointwise_kernel": (-1,)}
    if isinstance(layer, _TRANSPOSED):
        return {"_kernel" if "_kernel" in vars(layer) else "kernel": (-2,)}
    return {"_kernel": (-1,)} if isinstance(layer, _PLAIN) else {}


def attach(layer: keras.layers.Layer, ranges: Sequence[Sequence[float]]) -> None:
    """Has a built layer compute with rounded kernels, and a rounded input.

    `ranges` are those to begin with, as `ranges_of` gives them; without any no input is
    rounded. A layer that is rounded already keeps its own. Of a recurrent cell the
    first state is rounded, too.
    """
    present = vars(layer).get(_ATTRIBUTE)
    if present is not None and bool(present) is bool(ranges):
        return
    detach(layer)
    made = []
    for values in ranges[: 2 if isinstance(layer, _CELLS) else 1]:
        made.append(InputRange())
        for variable, value in zip(made[-1].weights, values, strict=True):
            variable.assign(value)
    with _unlocked(layer):
        setattr(layer, _ATTRIBUTE, made)
    call, kernels = layer.call, kernels_of(layer)
    vars(layer)[_BEFORE] = vars(layer).get("call")

    @like(call)
    def rounded_call(*args: Any, **kwargs: Any) -> Any:
        if backend.in_symbolic_scope():
            return call(*args, **kwargs)
        if made:
            is_training = kwargs.get("training")
            if is_training is None:
                is_training = _is_training()
            args = _rounded(args, made, training=bool(is_training))
        around = variables.get_autocast_scope()
        stored = {
            id(getattr(layer, name)._value): channels
            for name, channels in kernels.items()
        }
        with _RoundedKernels(around.dtype if around else None, stored):
            return call(*args, **kwargs)

    structure.replace_call(layer, rounded_call)


@contextlib.contextmanager
def _unlocked(layer: Any) -> Iterator[None]:
    """Lets a built layer get and lose parts, which Keras locks."""
    was_locked = layer._tracker.locked
    layer._tracker.unlock()
    try:
        yield
    finally:
        if was_locked:
            layer._tracker.lock()


def _is_training() -> bool:
    """Returns what the layers around are told, else whether gradients are taken.

    A model without a `training` argument is not told of it.
    """
    context = get_global_attribute("current_call_ctx")
    told = None if context is None else context.get_value("training")
    return bool(record.could_possibly_record() if told is None else told)


def _rounded(args: Any, ranges: list[InputRange], *, training: bool) -> Any:
    inputs, *rest = args

    def each(x: Any, place: int) -> Any:
        if not tf.is_tensor(x) or not x.dtype.is_floating:
            return x
        return ranges[place].rounded(x, training=training)

    inputs = each(inputs, 0)
    if len(ranges) == 2 and rest:
        states = tree.flatten(rest[0])
        states[0] = each(states[0], 1)
        rest[0] = tree.pack_sequence_as(rest[0], states)
    return (inputs, *rest)


def _join_steps(layer: keras.layers.RNN) -> None:
    """Has ranges in a recurrent layer move once for all steps of its sequences.

    Step by step they would begin with a state of zeros, and follow its mean over time.
    """
    call = layer.call
    vars(layer)[_BEFORE] = vars(layer).get("call")

    @like(call)
    def joined_call(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            inner = [] if backend.in_symbolic_scope() else structure.layers_of(layer)
            for each in itertools.chain(*(vars(x).get(_ATTRIBUTE, ()) for x in inner)):
                stack.enter_context(replaced(each, ahead=each.state()))
            return call(*args, **kwargs)

    structure.replace_call(layer, joined_call)


def detach(layer: keras.layers.Layer) -> None:
    """Has a layer compute again as it did."""
    if _BEFORE in vars(layer):
        structure.replace_call(layer, vars(layer).pop(_BEFORE))
    if is_attached(layer):
        with _unlocked(layer):
            delattr(layer, _ATTRIBUTE)


def is_attached(layer: keras.layers.Layer) -> bool:
    """Returns whether `attach` has changed the layer."""
    return _ATTRIBUTE in vars(layer)


def ranges_in(layer: keras.layers.Layer) -> list[list[float]]:
    """Returns the ranges of a rounded layer's inputs: low, high, batches seen."""
    return [[float(x) for x in each.state()] for each in vars(layer)[_ATTRIBUTE]]


def ranges_of(model: keras.layers.Layer) -> dict[str, list[list[float]]]:
    """Returns `ranges_in` of each rounded layer, by path."""
    walked = structure.walk(model)
    return {path: ranges_in(each) for path, each, _ in walked if is_attached(each)}


def attach_all(
    model: keras.layers.Layer, ranges: Mapping[str, Sequence[Sequence[float]]]
) -> None:
    """Rounds the layers of a built model as `ranges_of` told of another like it."""
    with getattr(model, "distribute_strategy", tf.distribute.get_strategy()).scope():
        for path, layer, _ in structure.walk(model):
            if path in ranges:
                attach(layer, ranges[path])
            if isinstance(layer, keras.layers.RNN) and _BEFORE not in vars(layer):
                _join_steps(layer)
            if isinstance(layer, keras.layers.LSTM | keras.layers.GRU):
                # Kernels of GPUs would pass the cell by.
                layer.use_cudnn = not is_attached(layer.cell) and layer.use_cudnn


def detach_all(model: keras.layers.Layer) -> None:
    """Has all layers of a model compute again as they did."""
    for _, layer, _ in structure.walk(model):
        detach(layer)
