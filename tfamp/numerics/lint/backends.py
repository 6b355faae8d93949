"""Rules on what devices and Keras lack: kernels, gradients, shapes, remat modes."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.graph.operations import read_operations
from tfamp.graph.products import Sizes, is_product, sizes_of
from tfamp.keras_hooks import structure
from tfamp.machine import idle_distribution as distribution
from tfamp.numerics.lint.rule import Found, Subject, rule
from tfamp.records.formats import HALF
from tfamp.records.units import join_words
from tfamp.stepping.costs import product_dtype

# Tensor cores take 16 bytes of each row at a time.
_MULTIPLE = 8
# Cast their weights themselves, so that a recomputation finds them cast too.
_CASTING = ("LayerNormalization", "GroupNormalization", "RMSNormalization")


@rule("missing-kernel")
def missing_kernel(subject: Subject) -> Iterator[Found]:
    """Operations that no kernel or no gradient is there for."""
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    for part in subject.half():
        layer = part.layer
        pools = keras.layers.MaxPooling3D, keras.layers.AveragePooling3D
        if isinstance(layer, pools) and part.dtype == "float16" and not has_gpu:
            yield Found(
                "error",
                f"TensorFlow has no float16 kernel for {type(layer).__name__} on a "
                "CPU: the first step ends with NotFoundError.",
                "Give the layer `dtype='float32'`, take bfloat16, or build the model "
                "under `tfamp.enable`, which keeps it in float32 here.",
                part.path,
                None,
                {"dtype": part.dtype, "error": "NotFoundError"},
            )
        method = getattr(layer, "interpolation", "")
        if isinstance(layer, keras.layers.UpSampling2D) and "lanczos" in str(method):
            yield Found(
                "error",
                f"TensorFlow's gradient of {method!r} resizing takes float32 only: "
                f"`fit` ends with TypeError in {part.dtype}.",
                "Give the layer `dtype='float32'`, use `interpolation='bilinear'`, or "
                "build the model under `tfamp.enable`, which keeps it in float32.",
                part.path,
                None,
                {"dtype": part.dtype, "error": "TypeError"},
            )


@rule("unaligned-shapes", needs=("graph",))
def unaligned_shapes(subject: Subject) -> Iterator[Found]:
    """Products in half precision with sizes that tensor cores dislike."""
    graph = subject.graph
    found: dict[str, Sizes] = {}
    for operation in read_operations(graph.concrete):  # type: ignore[union-attr]
        if not is_product(operation) or product_dtype(operation) not in HALF:
            continue
        odd = {
            name: size
            for name, size in sizes_of(operation).items()
            # The batch is not the model's.
            if size % _MULTIPLE and name != "rows"
        }
        path = graph.marks.layer_of(operation.name)  # type: ignore[union-attr]
        if odd:
            found.setdefault(path, {}).update(odd)
    for path, odd in found.items():
        words = [f"{size} {name}" for name, size in odd.items()]
        better = [str(_MULTIPLE * math.ceil(size / _MULTIPLE)) for size in odd.values()]
        yield Found(
            "note",
            f"Sizes that are no multiples of {_MULTIPLE}: {join_words(words)}. A GPU's "
            "matrix units pad them, or are left out.",
            f"Take {join_words(better)}, where the model leaves the choice.",
            path or None,
            min(odd.values()),
            dict(odd),
        )


@rule("idle-distribution")
def idle_distribution(subject: Subject) -> Iterator[Found]:
    """A distribution of Keras's own, which does nothing on TensorFlow."""
    text = distribution.idle_distribution()
    if text is not None:
        yield Found("error", text, distribution.REMEDY, None, None, {})


@rule("failing-remat")
def failing_remat(subject: Subject) -> Iterator[Found]:
    """Layers whose rematerialisation by Keras ends `fit` with an error."""
    for part in subject.parts:
        mode = structure.remat_mode_of(part.layer)
        if mode is None or not _is_rematerialised(part.layer, mode):
            continue
        parameters = inspect.signature(part.layer.call).parameters
        taken = [name for name in ("training", "mask") if name in parameters]
        if taken:
            why = (
                f"its call takes `{taken[0]}`, and TensorFlow's `custom_gradient` "
                "takes no keyword arguments in a graph: `fit` ends with ValueError, "
                "in every dtype."
            )
        elif (
            part.is_half
            and type(part.layer).__name__ not in _CASTING
            and any(weight.dtype == "float32" for weight in part.weights)
        ):
            why = (
                f"its weights are cast to {part.dtype} in the call, but not in the "
                "recomputation: `fit` ends with TypeError."
            )
        else:
            continue
        yield Found(
            "error",
            f"Keras's RematScope({mode.mode!r}) recomputes this layer: {why}",
            "Make it outside of the scope and call `tfamp.remat(model)`, or use the "
            "mode 'activations'.",
            part.path,
            None,
            {"mode": mode.mode, "error": "ValueError" if taken else "TypeError"},
        )


def _is_rematerialised(layer: keras.layers.Layer, mode: Any) -> bool:
    if mode.mode == "list_of_layers":
        return layer.name in mode.layer_names
    if mode.mode != "larger_than":
        return bool(mode.mode == "full")
    try:
        outputs = tf.nest.flatten(layer.output)
    except (AttributeError, ValueError):  # never called symbolically
        return True
    # As Keras counts them.
    size = sum(math.prod(size or 1 for size in tensor.shape) for tensor in outputs)
    return bool(size > mode.output_size_threshold)
