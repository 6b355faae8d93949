"""The stage that turns paths or bytes of images into uint8 pixels."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data._elements import bytes_of_element, inputs_of, with_length_of
from tfamp.data.stages import Map, Settings, Stage
from tfamp.data.stages.batches import Batch
from tfamp.data.stages.image_reader import JPEG_START, ImageReader

# A call out of TensorFlow's graph takes as long as decoding a small image, most of it
# handing Python's lock from thread to thread. So many images share it.
CHUNK = 16
# Memory that begins at a multiple of this becomes a tensor without being copied.
_ALIGNMENT = 64
# Images of larger batches are decoded in chunks, so that all cores have some.
_MAX_WHOLE_BATCH = 64
# Against `tf.io.decode_image` and `tf.image.resize`, on photos at 75 to 95 of 100.
_DIFFERENCES = {
    "tf": "exact",
    "simplejpeg": "the same pixels as tf",
    "opencv": "pixels differ from tf by at most 1 of 255, 0.1 in the mean",
}


@dataclasses.dataclass(frozen=True)
class Decode(Map):
    """Decodes images in parallel, each to one size."""

    name: ClassVar[str] = "decode"
    at_once: ClassVar[str] = f"{CHUNK} a call"
    function: ImageReader

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises unless elements hold an image as a path or as bytes."""
        first = inputs_of(self.spec_of_one(dataset.element_spec))
        key = self.function.key
        if isinstance(first, dict):
            strings = tuple(
                name for name, one in first.items() if _is_scalar_string(one)
            )
            if key not in first:
                raise ValueError(
                    f"`key` is {key!r} and elements are dicts of {tuple(first)}; "
                    "expected the name of the image among them. Pass one of "
                    f"{strings}."
                )
            first = first[key]
        elif key is not None:
            raise ValueError(
                f"`key` is {key!r} and elements hold {first!r}, no dict; expected one. "
                "Leave `key` out."
            )
        if not _is_scalar_string(first):
            raise ValueError(
                f"`.decode` came for elements that hold {first!r}; expected a path or "
                "the bytes of an image, a scalar string. Leave it out where images are "
                "decoded already, or decode before you batch."
            )

    def spec_of_one(self, spec: Any) -> Any:
        """Returns the spec of one example."""
        return spec

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Maps in parallel and keeps the order of the elements."""
        # Only elements of known shapes can be joined to chunks.
        size = bytes_of_element(dataset.element_spec, text_bytes=1)
        if self.function.decoder != "opencv" or size is None:
            return super().apply(dataset, settings)
        decoded = self.decode_batches(dataset.batch(CHUNK), settings).unbatch()
        return with_length_of(dataset, decoded)

    def decode_batches(
        self, batches: tf.data.Dataset, settings: Settings
    ) -> tf.data.Dataset:
        """Returns batches of decoded images in place of batches of paths or bytes."""
        reader = self.function

        def decode(*parts: Any) -> Any:
            return reader.replaced(parts, lambda images: read_together(reader, images))

        # Not more of them than threads: each holds the memory of a batch.
        calls = tf.data.AUTOTUNE if settings.autotune else settings.num_threads
        return batches.map(decode, num_parallel_calls=calls, deterministic=True)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        reader = self.function
        size = "own sizes"
        if reader.image_size is not None:
            height, width = reader.image_size
            size = f"{height}x{width} {reader.fit}, {reader.method}"
        how = f"{reader.decoder}, {size}, {settings.parallelism}"
        if reader.decoder == "opencv" and settings.errors is None:
            how += f", {self.at_once}"
        exact = _DIFFERENCES[reader.decoder]
        return how, f"uint8, {exact}; EXIF rotation is not applied"


@dataclasses.dataclass(frozen=True)
class DecodeBatches(Decode):
    """Decodes whole batches, which saves taking images apart and joining them again.

    It stands behind the batch of paths or bytes.
    """

    at_once: ClassVar[str] = "a batch a call"

    def spec_of_one(self, spec: Any) -> Any:
        """Returns the spec of one example, given that of a batch."""

        def of_one(part: Any) -> Any:
            is_tensor = isinstance(part, tf.TensorSpec)
            return tf.TensorSpec(part.shape[1:], part.dtype) if is_tensor else part

        return tf.nest.map_structure(of_one, spec)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Maps in parallel and keeps the order of the batches."""
        return self.decode_batches(dataset, settings)


def with_whole_batches(steps: list[Stage]) -> list[Stage]:
    """Returns the steps of a plan, in order; images batched next are decoded so."""
    for number, pair in enumerate(itertools.pairwise(steps)):
        decode, batch = pair
        if (
            isinstance(decode, Decode)
            and decode.function.decoder == "opencv"
            and type(batch) is Batch
            and batch.size <= _MAX_WHOLE_BATCH
        ):
            whole = DecodeBatches(decode.function)
            return [*steps[:number], batch, whole, *steps[number + 2 :]]
    return steps


def read_together(reader: ImageReader, images: tf.Tensor) -> tf.Tensor:
    """Returns pixels `(images, height, width, channels)`, uint8, in one call of Python.

    The decoder is "opencv"; images come as paths or bytes, strings `(images,)`.
    """
    fast = reader.fast_function()
    shape = (*(reader.image_size or ()), reader.channels)

    def decode_all(given: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        pixels = _aligned((len(given), *shape))
        for place, image in enumerate(given):
            target = pixels[place]
            decoded = _decoded_bytes(reader, image, fast, target)
            if not np.may_share_memory(decoded, target):
                target[...] = decoded
        return pixels

    found = tf.numpy_function(decode_all, [images], tf.uint8, stateful=False)
    return tf.ensure_shape(found, (images.shape[0], *shape))


def _decoded_bytes(
    reader: ImageReader, image: bytes, fast: Callable[..., Any], target: Any
) -> Any:
    """Returns the pixels of one image, in `target` already where OpenCV could."""
    name = image.decode(errors="replace") if reader.reads_files else "An image"
    try:
        if not reader.reads_files:
            data = image
        elif "://" in name:
            with tf.io.gfile.GFile(name, "rb") as remote:
                data = bytes(remote.read())
        else:
            with open(name, "rb", buffering=0) as file:
                data = file.readall()
        if data[: len(JPEG_START)] == JPEG_START:
            return fast(data, target)
        return reader.pixels(image).numpy()
    except (ValueError, OSError, tf.errors.OpError) as error:
        # TensorFlow makes InvalidArgumentError of it.
        raise ValueError(f"{name}: {error}") from error


def _aligned(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Returns an array of bytes that TensorFlow takes over as it is.

    Example:
        >>> _aligned((2, 3)).ctypes.data % 64, _aligned((2, 3)).shape
        (0, (2, 3))
    """
    size = int(np.prod(shape))
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].reshape(shape)


def _is_scalar_string(spec: Any) -> bool:
    """Whether a part of an element is one string."""
    return (
        isinstance(spec, tf.TensorSpec)
        and spec.dtype == tf.string
        and spec.shape.rank == 0
    )
