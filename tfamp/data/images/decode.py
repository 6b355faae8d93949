"""The stage that turns paths or bytes of images into uint8 pixels."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data._elements import with_length_of
from tfamp.data._stages import Batch, ElementMap, Settings, Stage
from tfamp.data.images.chunks import CHUNK, ChunkReader
from tfamp.data.images.reader import ImageReader, image_reader

# Images of larger batches are decoded in chunks, so that all cores have some.
_MAX_WHOLE_BATCH = 64
# Against `tf.io.decode_image` and `tf.image.resize`, on photos at 75 to 95 of 100.
_DIFFERENCES = {
    "tf": "exact",
    "simplejpeg": "the same pixels as tf",
    "opencv": "pixels differ from tf by at most 1 of 255, 0.1 in the mean",
}


@dataclasses.dataclass(frozen=True)
class DecodeElement:
    """Decodes the image of an element and leaves its other parts alone.

    Attributes:
        reader: What decodes.
        key: Where the image lies in the dict that the element, or its first part, is;
            None where that is the image itself.
    """

    reader: ImageReader
    key: str | None

    def __call__(self, *parts: Any) -> Any:
        """Returns the element with pixels in place of a path or of bytes."""
        return _decoded(parts, self.key, self.reader)


@dataclasses.dataclass(frozen=True)
class Decode(ElementMap):
    """Decodes images in parallel, each to one size."""

    rank: ClassVar[int] = 8
    name: ClassVar[str] = "decode"
    at_once: ClassVar[str] = f"{CHUNK} a call"
    function: DecodeElement

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises unless elements hold an image as a path or as bytes."""
        self.check_spec(dataset.element_spec)

    def check_spec(self, spec: Any) -> None:
        """Raises unless elements of this spec hold an image as a path or as bytes."""
        first = spec[0] if isinstance(spec, tuple) else spec
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

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Maps in parallel and keeps the order of the elements."""
        reader = self.function.reader
        if reader.decoder != "opencv" or not _can_be_joined(dataset.element_spec):
            return super().apply(dataset, settings)
        decoded = self.decode_batches(dataset.batch(CHUNK), settings).unbatch()
        return with_length_of(dataset, decoded)

    def decode_batches(
        self, batches: tf.data.Dataset, settings: Settings
    ) -> tf.data.Dataset:
        """Returns batches of decoded images in place of batches of paths or bytes."""
        read = ChunkReader(self.function.reader)

        def decode(*parts: Any) -> Any:
            return _decoded(parts, self.function.key, read)

        # Not more of them than threads: each holds the memory of a batch.
        calls = tf.data.AUTOTUNE if settings.autotune else settings.num_threads
        return batches.map(decode, num_parallel_calls=calls, deterministic=True)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        reader = self.function.reader
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

    rank: ClassVar[int] = 41
    at_once: ClassVar[str] = "a batch a call"

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises unless batches hold images as paths or as bytes."""
        self.check_spec(tf.nest.map_structure(_of_one, dataset.element_spec))

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Maps in parallel and keeps the order of the batches."""
        return self.decode_batches(dataset, settings)


def with_whole_batches(steps: list[Stage]) -> list[Stage]:
    """Returns the steps of a plan; images that are batched next are decoded so.

    Args:
        steps: In the order they run in.
    """
    for number, pair in enumerate(itertools.pairwise(steps)):
        decode, batch = pair
        if (
            isinstance(decode, Decode)
            and decode.function.reader.decoder == "opencv"
            and type(batch) is Batch
            and batch.size <= _MAX_WHOLE_BATCH
        ):
            whole = DecodeBatches(decode.function)
            return [*steps[:number], batch, whole, *steps[number + 2 :]]
    return steps


def make_decode(
    image_size: tuple[int, int] | None = None,
    *,
    channels: int = 3,
    decoder: str = "tf",
    method: str = "bilinear",
    antialias: bool = False,
    fit: str = "stretch",
    key: str | None = None,
    reads_files: bool = False,
) -> Decode:
    """Returns the stage that decodes images: JPEG, PNG, GIF (first frame) and BMP.

    Pixels are uint8 from the file to the model: a resized value is rounded half to
    even and held in 0 to 255. Rotation by EXIF is not applied, as TensorFlow never
    does; of 16-bit PNGs the upper 8 bits are kept, and alpha is dropped.

    Args:
        image_size: (height, width) of all images, None to keep each one's own.
        channels: 3 for color, 1 for gray.
        decoder: "tf"; "simplejpeg", which gives the same pixels; or "opencv", which
            decodes with simplejpeg and resizes with OpenCV, 16 images in a call:
            values then differ by at most 1 of 255, by 0.1 in the mean. Both are for
            JPEG, other kinds go through TensorFlow. "simplejpeg" calls Python for
            each image, which takes as long as decoding a small one.
        method: "bilinear", "nearest", "bicubic", "area", "lanczos3" or "lanczos5".
        antialias: Whether to smooth before an image is made smaller, at twice the
            cost. Off as in Keras.
        fit: For another aspect ratio: "stretch" it, "crop" the middle as Keras's
            `crop_to_aspect_ratio`, or "pad" with black.
        key: Name of the image where elements, or their first parts, are dicts.
        reads_files: Whether images come as paths instead of bytes.

    Returns:
        The stage. Its `function` also works on one element outside of a dataset.

    Raises:
        ImportError: The decoder's package is not installed.
        TypeError: `image_size` is no pair of integers.
        ValueError: An argument is unknown, or does not go with another.
    """
    reader = image_reader(
        image_size,
        channels=channels,
        decoder=decoder,
        method=method,
        antialias=antialias,
        fit=fit,
        reads_files=reads_files,
    )
    return Decode(DecodeElement(reader, key))


def _decoded(
    parts: tuple[Any, ...], key: str | None, read: Callable[[Any], tf.Tensor]
) -> Any:
    """Returns the parts of an element with what `read` makes of the image."""
    first, *rest = parts
    decoded = read(first) if key is None else {**first, key: read(first[key])}
    return (decoded, *rest) if rest else decoded


def _can_be_joined(element_spec: Any) -> bool:
    """Whether elements are tensors of known shapes, so that chunks hold them."""
    return all(
        isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined()
        for spec in tf.nest.flatten(element_spec)
    )


def _of_one(spec: Any) -> Any:
    """Returns the spec of an example, given that of a batch."""
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec
    return tf.TensorSpec(spec.shape[1:], spec.dtype)


def _is_scalar_string(spec: Any) -> bool:
    """Whether a part of an element is one string."""
    return (
        isinstance(spec, tf.TensorSpec)
        and spec.dtype == tf.string
        and spec.shape.rank == 0
    )
