"""Turns the bytes of an image into uint8 pixels of one size.

A resized value is rounded half to even and held in 0 to 255. Rotation by EXIF is not
applied, as TensorFlow never does; of 16-bit PNGs the upper 8 bits are kept, and alpha
is dropped.
"""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data._elements import from_arguments, inputs_of, with_inputs
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
COLORS = {1: "GRAY", 3: "RGB"}
# Bytes of a bitmap's headers: both of Windows together, that of OS/2 with shorter
# fields and colors of three bytes, and the one in front of either.
_BMP_HEADERS, _BMP_OLD_HEADER, _BMP_FILE_HEADER = 54, 12, 14
_BMP_BITS = (1, 4, 8)
# Of red, green and blue in gray, in thousandths: ITU-R BT.601, as libjpeg has them.
_GRAY = (299, 587, 114)


@dataclasses.dataclass(frozen=True)
class ImageReader:
    """Decodes and resizes the image of an element; leaves its other parts alone.

    The settings are those of `Pipeline.decode`; `reads_files` says whether images come
    as paths instead of bytes. It works eagerly and in `Dataset.map`.
    """

    image_size: Any = None
    _: dataclasses.KW_ONLY
    channels: int = 3
    decoder: str = "tf"
    method: str = "bilinear"
    antialias: bool = False
    fit: str = "stretch"
    key: str | None = None
    reads_files: bool = False

    def __post_init__(self) -> None:
        size, method, fit = self.image_size, self.method, self.fit
        if size is not None:
            is_listed = hasattr(size, "__iter__") and not isinstance(size, str)
            if not is_listed or len(tuple(size)) != 2:
                raise TypeError(
                    f"`image_size` is {size!r}; expected (height, width). Pass two "
                    "integers, or None to keep the sizes."
                )
            size = tuple(checks.positive_int("image_size", side) for side in size)
        if self.channels not in COLORS:
            raise ValueError(
                f"`channels` is {self.channels!r}; expected 1 or 3. Pass 3 for color; "
                "an alpha channel is dropped."
            )
        checks.choice("decoder", self.decoder, DECODERS)
        checks.choice("method", method, METHODS)
        checks.choice("fit", fit, FITS)
        antialias = bool(self.antialias)
        if size is None and (fit != "stretch" or antialias or method != "bilinear"):
            raise ValueError(
                f"`fit`, `method` or `antialias` came ({fit!r}, {method!r}, "
                f"{antialias!r}) without `image_size`; expected a size to bring images "
                "to. Pass `image_size=(224, 224)`, or leave them out."
            )
        if self.decoder == "opencv":
            if size is None or method != "bilinear" or antialias or fit == "pad":
                raise ValueError(
                    f"`decoder` 'opencv' came with size {size!r}, method {method!r}, "
                    f"antialias {antialias!r} and fit {fit!r}; expected a size, "
                    "'bilinear', no antialias, and 'stretch' or 'crop'. Use "
                    "'simplejpeg', which resizes as TensorFlow does."
                )
            self._package("cv2")
        if self.decoder != "tf":
            self._package("simplejpeg")
        object.__setattr__(self, "image_size", size)

    def _package(self, name: str) -> Any:
        return checks.require(name, extra=None, purpose=f"`decoder={self.decoder!r}`")

    def __call__(self, *parts: Any) -> Any:
        """Returns the element with pixels in place of a path or of bytes."""
        return self.replaced(parts, self.pixels)

    def replaced(self, parts: tuple[Any, ...], read: Callable[[Any], tf.Tensor]) -> Any:
        """Returns an element with what `read` makes of its image."""
        element = from_arguments(parts)
        given, key = inputs_of(element), self.key
        image = read(given) if key is None else {**given, key: read(given[key])}
        return with_inputs(element, image)

    def pixels(self, image: Any) -> tf.Tensor:
        """Returns the pixels `(height, width, channels)`, uint8, of a path or bytes."""
        given = tf.convert_to_tensor(image, tf.string)
        data = tf.io.read_file(given) if self.reads_files else given
        with tf.control_dependencies([self._check_start(given, data)]):
            data = tf.identity(data)

        def slow() -> tf.Tensor:
            return self._read_by_tensorflow(given, data)

        if self.decoder == "tf":
            return self._resized(slow())
        function, is_jpeg = self.fast_function(), tf.io.is_jpeg(data)

        def fast() -> tf.Tensor:
            return tf.numpy_function(function, [data], tf.uint8, stateful=False)

        if self.decoder == "simplejpeg":
            pixels = tf.cond(is_jpeg, fast, slow)
            return self._resized(tf.ensure_shape(pixels, (None, None, self.channels)))
        pixels = tf.cond(is_jpeg, fast, lambda: self._resized(slow()))
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
        words = [what, "is no JPEG, PNG, GIF or BMP; bytes:", tf.strings.length(data)]
        if tf.executing_eagerly() and not is_image:
            # As a graph would say it; `Assert` itself speaks of tensors here.
            texts = (tf.strings.as_string(part).numpy().decode() for part in words)
            text = " ".join(texts)
            raise tf.errors.InvalidArgumentError(None, None, text)
        return tf.debugging.Assert(is_image, words)

    def _read_by_tensorflow(self, given: tf.Tensor, data: tf.Tensor) -> tf.Tensor:
        """Returns the pixels in the image's own size."""
        name = given if self.reads_files else tf.constant("An image")
        pixels = tf.cond(
            tf.strings.substr(data, 0, 2) == BMP_START,
            lambda: _decode_bmp(data, self.channels, name),
            lambda: tf.io.decode_image(data, self.channels, expand_animations=False),
        )
        return tf.ensure_shape(pixels, (None, None, self.channels))

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
        """Returns what decodes the bytes of a JPEG without Python's lock, or raises."""
        simplejpeg = self._package("simplejpeg")
        buffers = threading.local()
        color, depth = COLORS[self.channels], self.channels

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
        cv2 = self._package("cv2")
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

    `shape` begins with height and width of the image, numbers or tensors; the middle is
    to be resized to `height` and `width`.

    Source: Keras's `smart_resize`, which cuts the same box.
    """
    is_tensor = isinstance(shape, tf.Tensor)
    least, most = (tf.minimum, tf.maximum) if is_tensor else (min, max)
    tall = most(least(shape[0], shape[1] * height // width), 1)
    wide = most(least(shape[1], shape[0] * width // height), 1)
    return (shape[0] - tall) // 2, (shape[1] - wide) // 2, tall, wide


def _decode_bmp(data: tf.Tensor, channels: int, name: tf.Tensor) -> tf.Tensor:
    """Returns the pixels `(height, width, channels)` of a bitmap, uint8.

    `tf.io.decode_image` takes the numbers of a palette for colors; those are looked up
    here. `name` stands for the bitmap in errors.

    Raises:
        InvalidArgumentError: It has a palette, and is compressed, breaks off, or
            holds numbers that the palette lacks.

    Source: Microsoft, Bitmap Storage, learn.microsoft.com, 2026-11-23.
    """
    header = tf.io.decode_raw(tf.strings.substr(data, 0, _BMP_HEADERS), tf.uint8)
    header = tf.concat([header, tf.zeros(_BMP_HEADERS, tf.uint8)], 0)

    def number(at: int, num_bytes: int) -> tf.Tensor:
        parts = tf.cast(header[at : at + num_bytes], tf.int32)
        shifts = tf.range(0, 8 * num_bytes, 8)
        return tf.reduce_sum(tf.bitwise.left_shift(parts, shifts))

    begin, info = number(10, 4), number(14, 4)
    is_old = info == _BMP_OLD_HEADER
    old = (number(18, 2), number(20, 2), number(24, 2), 0, 0, 3)
    new = (*map(lambda at: number(at, 4), (18, 22)), number(28, 2))
    new += (number(30, 4), number(46, 4), 4)
    width, height, bits, packing, num_colors, color_bytes = (
        tf.where(is_old, *pair) for pair in zip(old, new, strict=True)
    )

    def with_palette() -> tf.Tensor:
        is_plain = tf.reduce_any(bits == _BMP_BITS) & (packing == 0)
        text = tf.strings.as_string
        kind = (text(bits), " bits a pixel and compression ", text(packing))
        is_known = _check(is_plain, name, " is a BMP with ", *kind)
        with tf.control_dependencies([is_known]):
            most = tf.bitwise.left_shift(1, bits)
            count = tf.where(num_colors == 0, most, num_colors)
        row_bytes = (width * bits + 31) // 32 * 4
        size = row_bytes * tf.abs(height)
        first = _BMP_FILE_HEADER + info
        end = tf.maximum(begin + size, first + count * color_bytes)
        is_whole = (end <= tf.strings.length(data)) & (size > 0) & (count > 0)
        wrong = " is a BMP that breaks off"
        with tf.control_dependencies([_check(is_whole, name, wrong)]):
            whole = tf.identity(data)
        table = tf.strings.substr(whole, first, count * color_bytes)
        table = tf.reshape(tf.io.decode_raw(table, tf.uint8), [count, color_bytes])
        palette = table[:, 2::-1]  # it is blue, green, red
        rows = tf.io.decode_raw(tf.strings.substr(whole, begin, size), tf.uint8)
        rows = tf.cast(tf.reshape(rows, [tf.abs(height), row_bytes, 1]), tf.int32)
        numbers = tf.bitwise.right_shift(rows, tf.range(8 - bits, -1, -bits))
        numbers = tf.bitwise.bitwise_and(numbers, tf.bitwise.left_shift(1, bits) - 1)
        numbers = tf.reshape(numbers, [tf.abs(height), -1])[:, :width]
        numbers = tf.cond(height > 0, lambda: numbers[::-1], lambda: numbers)
        is_known = tf.reduce_all(numbers < count)
        wrong = " is a BMP with numbers beyond its palette"
        with tf.control_dependencies([_check(is_known, name, wrong)]):
            pixels = tf.gather(palette, numbers)
        if channels == 3:
            return pixels
        # The brightness, rounded.
        parts = tf.cast(pixels, tf.int32) * tf.constant(_GRAY)
        total = tf.reduce_sum(parts, axis=-1, keepdims=True)
        return tf.cast((total + 500) // 1000, tf.uint8)

    pixels = tf.cond(
        bits <= _BMP_BITS[-1],
        with_palette,
        lambda: tf.io.decode_image(data, channels, expand_animations=False),
    )
    return tf.ensure_shape(pixels, (None, None, channels))


def _check(is_right: tf.Tensor, *words: tf.Tensor | str) -> tf.Operation:
    """Raises with a sentence of some words where something is wrong."""
    remedy = "; expected a whole one without compression. Write it anew as PNG."
    return tf.debugging.Assert(is_right, [tf.strings.join([*words, remedy])])
