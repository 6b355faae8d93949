"""Turns the bytes of an image into uint8 pixels of one size."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data.images.bmp import decode_bmp
from tfamp.records import checks

METHODS = ("bilinear", "nearest", "bicubic", "area", "lanczos3", "lanczos5")
# Weighted means of pixels, which lie between them.
_WITHIN_RANGE = ("bilinear", "nearest", "area")
DECODERS = ("tf", "simplejpeg", "opencv")
FITS = ("stretch", "crop", "pad")
# First bytes of what `tf.io.decode_image` reads: JPEG, PNG, GIF, BMP.
JPEG_START = b"\xff\xd8\xff"
BMP_START = b"BM"
_STARTS = (JPEG_START, b"\x89PN", b"GIF", BMP_START)
_COLORS = {1: "GRAY", 3: "RGB"}


@dataclasses.dataclass(frozen=True)
class ImageReader:
    """Decodes and resizes one image; works eagerly and in `Dataset.map`.

    Attributes:
        image_size: (height, width), None to keep each image's own.
        channels: 1 or 3.
        decoder: One of `DECODERS`.
        method: How pixels are interpolated; one of `METHODS`.
        antialias: Whether to smooth before an image is made smaller.
        fit: One of `FITS`, for images of another aspect ratio.
        reads_files: Whether images come as paths instead of bytes.
    """

    image_size: tuple[int, int] | None
    channels: int
    decoder: str
    method: str
    antialias: bool
    fit: str
    reads_files: bool

    def __call__(self, image: Any) -> tf.Tensor:
        """Returns the pixels `(height, width, channels)`, uint8.

        Args:
            image: Path or bytes, a scalar string tensor or what becomes one.
        """
        given = tf.convert_to_tensor(image, tf.string)
        data = tf.io.read_file(given) if self.reads_files else given
        with tf.control_dependencies([self._check_start(given, data)]):
            data = tf.identity(data)
        if self.decoder == "tf":
            return self._read_by_tensorflow(given, data)
        fast = self.fast_function()
        pixels = tf.cond(
            tf.io.is_jpeg(data),
            lambda: tf.numpy_function(fast, [data], tf.uint8, stateful=False),
            lambda: self._read_by_tensorflow(
                given, data, is_whole=self.decoder == "opencv"
            ),
        )
        if self.decoder == "simplejpeg":
            pixels = tf.ensure_shape(pixels, (None, None, self.channels))
            return self._resized(pixels)
        return tf.ensure_shape(pixels, self._shape)

    @property
    def _shape(self) -> tuple[int | None, ...]:
        return (*(self.image_size or (None, None)), self.channels)

    def _check_start(self, given: tf.Tensor, data: tf.Tensor) -> tf.Operation:
        """Names the file that begins like no image; costs a comparison."""
        start = tf.strings.substr(data, 0, 3)
        known = tf.constant([one[:3] for one in _STARTS[:3]])
        is_image = tf.reduce_any(start == known)
        is_image |= tf.strings.substr(start, 0, 2) == _STARTS[3]
        what = given if self.reads_files else "the bytes of an image"
        # Not its first bytes: an error whose text is no UTF-8 is another error.
        told = [what, "is no JPEG, PNG, GIF or BMP; bytes:", tf.strings.length(data)]
        if tf.executing_eagerly() and not is_image:
            # As a graph would say it; `Assert` itself speaks of tensors here.
            text = " ".join(
                tf.strings.as_string(part).numpy().decode() for part in told
            )
            raise tf.errors.InvalidArgumentError(None, None, text)
        return tf.debugging.Assert(is_image, told)

    def _read_by_tensorflow(
        self, given: tf.Tensor, data: tf.Tensor, is_whole: bool = True
    ) -> tf.Tensor:
        """Returns the pixels, resized if this is the whole way."""
        name = given if self.reads_files else tf.constant("An image")
        pixels = tf.cond(
            tf.strings.substr(data, 0, 2) == BMP_START,
            lambda: decode_bmp(data, self.channels, name),
            lambda: tf.io.decode_image(data, self.channels, expand_animations=False),
        )
        pixels = tf.ensure_shape(pixels, (None, None, self.channels))
        return self._resized(pixels) if is_whole else pixels

    def _resized(self, pixels: tf.Tensor) -> tf.Tensor:
        """Returns the pixels in the wanted size, rounded half to even."""
        if self.image_size is None:
            return pixels
        height, width = self.image_size
        if self.fit == "crop":
            top, left, tall, wide = crop_box(tf.shape(pixels), height, width)
            pixels = pixels[top : top + tall, left : left + wide]
        options = {"method": self.method, "antialias": self.antialias}
        if self.fit == "pad":
            resized = tf.image.resize_with_pad(pixels, height, width, **options)
        else:
            resized = tf.image.resize(pixels, (height, width), **options)
        if resized.dtype != tf.uint8:
            resized = tf.round(resized)
            # Cubic and Lanczos interpolation go beyond 0 and 255.
            cast = tf.cast if self.method in _WITHIN_RANGE else tf.saturate_cast
            resized = cast(resized, tf.uint8)
        return tf.ensure_shape(resized, self._shape)

    @tf.autograph.experimental.do_not_convert
    def fast_function(self) -> Callable[[Any], np.ndarray[Any, Any]]:
        """Returns what decodes a JPEG outside of TensorFlow, without Python's lock.

        It takes the bytes, and raises ValueError where they are damaged.
        """
        simplejpeg = checks.require(
            "simplejpeg", extra=None, purpose=f"`decoder={self.decoder!r}`"
        )
        buffers = threading.local()
        color, depth = _COLORS[self.channels], self.channels

        def decode(given: Any) -> np.ndarray[Any, Any]:
            # Eagerly it comes as an array without dimensions.
            data = given if isinstance(given, bytes) else given.item()
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            num_bytes = height * width * depth
            # New memory for each image costs as much as decoding it.
            if getattr(buffers, "size", 0) < num_bytes:
                buffers.pixels = np.empty(num_bytes, np.uint8)
                buffers.size = num_bytes
            # With the fast DCT the pixels are TensorFlow's, which uses it too.
            return simplejpeg.decode_jpeg(
                data, color, fastdct=True, buffer=buffers.pixels
            )

        if self.decoder == "simplejpeg":
            return lambda data: np.array(decode(data))
        cv2 = checks.require("cv2", extra=None, purpose="`decoder='opencv'`")
        height, width = self.image_size or (0, 0)

        def decode_and_resize(data: Any, into: Any = None) -> np.ndarray[Any, Any]:
            pixels = decode(data)
            if self.fit == "crop":
                top, left, tall, wide = crop_box(pixels.shape, height, width)
                pixels = pixels[int(top) :, int(left) :][: int(tall), : int(wide)]
            if into is not None and depth > 1:
                # Where it fits, OpenCV fills the array that it is given.
                return cv2.resize(pixels, (width, height), dst=into)
            resized = cv2.resize(pixels, (width, height))
            return resized.reshape(height, width, depth)

        return decode_and_resize


def crop_box(shape: Any, height: int, width: int) -> tuple[Any, Any, Any, Any]:
    """Returns top, left, height and width of the middle with another aspect ratio.

    Args:
        shape: Height and width of the image first; numbers or tensors.
        height: Of what the middle is resized to.
        width: Of the same.

    Example:
        >>> crop_box((100, 300), 1, 1), crop_box((100, 300), 1, 6)
        ((0, 100, 100, 100), (25, 0, 50, 300))

    Source: Keras's `smart_resize`, which cuts the same box.
    """
    if isinstance(shape, tf.Tensor):
        tall = tf.minimum(shape[0], shape[1] * height // width)
        wide = tf.minimum(shape[1], shape[0] * width // height)
        tall, wide = tf.maximum(tall, 1), tf.maximum(wide, 1)
    else:
        tall = max(1, min(shape[0], shape[1] * height // width))
        wide = max(1, min(shape[1], shape[0] * width // height))
    return (shape[0] - tall) // 2, (shape[1] - wide) // 2, tall, wide


def image_reader(
    image_size: Any,
    *,
    channels: int,
    decoder: str,
    method: str,
    antialias: bool,
    fit: str,
    reads_files: bool,
) -> ImageReader:
    """Checks the arguments of an `ImageReader`, and that its packages are there.

    Raises:
        ImportError: The decoder's package is not installed.
        TypeError: `image_size` is no pair.
        ValueError: An argument is unknown, or does not go with another.
    """
    size = None
    if image_size is not None:
        if isinstance(image_size, str) or len(tuple(_iterable(image_size))) != 2:
            raise TypeError(
                f"`image_size` is {image_size!r}; expected (height, width). Pass two "
                "integers, or None to keep the sizes."
            )
        height, width = image_size
        size = (
            checks.positive_int("image_size", height),
            checks.positive_int("image_size", width),
        )
    if channels not in _COLORS:
        raise ValueError(
            f"`channels` is {channels!r}; expected 1 or 3. Pass 3 for color; an alpha "
            "channel is dropped."
        )
    checks.choice("decoder", decoder, DECODERS)
    checks.choice("method", method, METHODS)
    checks.choice("fit", fit, FITS)
    if size is None and (fit != "stretch" or antialias or method != "bilinear"):
        raise ValueError(
            f"`fit`, `method` or `antialias` came ({fit!r}, {method!r}, {antialias!r}) "
            "without `image_size`; expected a size to bring images to. Pass "
            "`image_size=(224, 224)`, or leave them out."
        )
    if decoder == "opencv":
        if size is None or method != "bilinear" or antialias or fit == "pad":
            raise ValueError(
                f"`decoder` 'opencv' came with size {size!r}, method {method!r}, "
                f"antialias {antialias!r} and fit {fit!r}; expected a size, "
                "'bilinear', no antialias, and 'stretch' or 'crop'. Use 'simplejpeg', "
                "which resizes as TensorFlow does."
            )
        checks.require("cv2", extra=None, purpose="`decoder='opencv'`")
    if decoder != "tf":
        purpose = f"`decoder={decoder!r}`"
        checks.require("simplejpeg", extra=None, purpose=purpose)
    return ImageReader(
        size, channels, decoder, method, bool(antialias), fit, reads_files
    )


def _iterable(value: Any) -> Any:
    return value if hasattr(value, "__iter__") else ()
