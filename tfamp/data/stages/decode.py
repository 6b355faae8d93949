"""The stage that turns paths or bytes of images into uint8 pixels of one size.

A resized value is rounded half to even and held in 0 to 255. Rotation by EXIF is not
applied, as TensorFlow never does; of 16-bit PNGs the upper 8 bits are kept, and alpha
is dropped.
"""

import dataclasses
import threading
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data._elements import from_arguments, inputs_of, with_inputs
from tfamp.data.stages import Map, Settings
from tfamp.records import checks

METHODS = ("bilinear", "nearest", "bicubic", "area", "lanczos3", "lanczos5")
# Against `tf.io.decode_image` and `tf.image.resize`, on photos at 75 to 95 of 100.
DECODERS = {"tf": "exact", "simplejpeg": "the same pixels as tf"}
FITS = ("stretch", "crop", "pad")
# First bytes of what `tf.io.decode_image` reads: JPEG, PNG, GIF, BMP.
_STARTS = (b"\xff\xd8\xff", b"\x89PN", b"GIF")
COLORS = {1: "GRAY", 3: "RGB"}


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
        size = self.image_size
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
        checks.choice("method", self.method, METHODS)
        checks.choice("fit", self.fit, FITS)
        if size is None and self.fit != "stretch":
            raise ValueError(
                f"`fit` is {self.fit!r} without `image_size`; expected a size to bring "
                "images to. Pass `image_size=(224, 224)`, or leave it out."
            )
        if self.decoder == "simplejpeg":
            _simplejpeg()
        object.__setattr__(self, "image_size", size)

    def __call__(self, *parts: Any) -> Any:
        """Returns the element with pixels in place of a path or of bytes."""
        element = from_arguments(parts)
        given, key = inputs_of(element), self.key
        if key is None:
            return with_inputs(element, self.pixels(given))
        return with_inputs(element, {**given, key: self.pixels(given[key])})

    def pixels(self, image: Any) -> tf.Tensor:
        """Returns the pixels `(height, width, channels)`, uint8, of a path or bytes."""
        given = tf.convert_to_tensor(image, tf.string)
        data = tf.io.read_file(given) if self.reads_files else given
        with tf.control_dependencies([self._check_start(given, data)]):
            data = tf.identity(data)

        def slow() -> tf.Tensor:
            pixels = tf.io.decode_image(data, self.channels, expand_animations=False)
            return tf.ensure_shape(pixels, (None, None, self.channels))

        if self.decoder == "tf":
            return self._resized(slow())
        function = _fast_function(self.channels)

        def fast() -> tf.Tensor:
            return tf.numpy_function(function, [data], tf.uint8, stateful=False)

        pixels = tf.cond(tf.io.is_jpeg(data), fast, slow)
        return self._resized(tf.ensure_shape(pixels, (None, None, self.channels)))

    def _check_start(self, given: tf.Tensor, data: tf.Tensor) -> Any:
        """Names the file that cannot be an image to TensorFlow, by its first bytes."""
        start = tf.strings.substr(data, 0, 3)
        is_bmp = tf.strings.substr(data, 0, 2) == b"BM"
        # Of those with a palette TensorFlow takes the numbers for colors.
        has_palette = is_bmp & (_bits_of_bmp(data) <= 8)
        is_image = tf.reduce_any(start == tf.constant(_STARTS)) | is_bmp
        what = given if self.reads_files else tf.constant("the bytes of an image")
        reason = tf.where(
            has_palette,
            "is a BMP with a palette; write it anew as PNG; bytes:",
            "is no JPEG, PNG, GIF or BMP; bytes:",
        )
        # Not its first bytes: an error whose text is no UTF-8 is another error.
        words = [what, reason, tf.strings.length(data)]
        is_right = is_image & ~has_palette
        if tf.executing_eagerly() and not is_right:
            # As a graph would say it; `Assert` itself speaks of tensors here.
            texts = [tf.strings.as_string(one).numpy().decode() for one in words]
            raise tf.errors.InvalidArgumentError(None, None, " ".join(texts))
        return tf.debugging.Assert(is_right, words) or tf.no_op()

    def _resized(self, pixels: tf.Tensor) -> tf.Tensor:
        """Returns the pixels in the wanted size, rounded half to even."""
        if self.image_size is None:
            return pixels
        height, width = self.image_size
        if self.fit == "crop":
            # The box that Keras's `smart_resize` cuts.
            tall, wide = tf.unstack(tf.shape(pixels)[:2])
            tall, wide = (
                tf.maximum(tf.minimum(tall, wide * height // width), 1),
                tf.maximum(tf.minimum(wide, tall * width // height), 1),
            )
            top = (tf.shape(pixels)[0] - tall) // 2
            left = (tf.shape(pixels)[1] - wide) // 2
            pixels = pixels[top : top + tall, left : left + wide]
        how = {"method": self.method, "antialias": bool(self.antialias)}
        if self.fit == "pad":
            resized = tf.image.resize_with_pad(pixels, height, width, **how)
        else:
            resized = tf.image.resize(pixels, (height, width), **how)
        if resized.dtype != tf.uint8:
            # Cubic and Lanczos interpolation go beyond 0 and 255.
            resized = tf.saturate_cast(tf.round(resized), tf.uint8)
        return tf.ensure_shape(resized, (height, width, self.channels))


@tf.autograph.experimental.do_not_convert
def _fast_function(channels: int) -> Any:
    """Returns what decodes the bytes of a JPEG without Python's lock, or raises."""
    simplejpeg, buffers = _simplejpeg(), threading.local()

    def decode(given: Any) -> np.ndarray[Any, Any]:
        # Eagerly it comes as an array without dimensions.
        data = given if isinstance(given, bytes) else given.item()
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        num_bytes = height * width * channels
        # New memory for each image costs as much as decoding it.
        if getattr(buffers, "size", 0) < num_bytes:
            buffers.pixels, buffers.size = np.empty(num_bytes, np.uint8), num_bytes
        # With the fast DCT the pixels are TensorFlow's, which uses it too.
        options = {"fastdct": True, "buffer": buffers.pixels}
        return np.array(simplejpeg.decode_jpeg(data, COLORS[channels], **options))

    return lambda data: decode(data)


def _simplejpeg() -> Any:
    return checks.require("simplejpeg", extra=None, purpose="`decoder='simplejpeg'`")


def _bits_of_bmp(data: tf.Tensor) -> tf.Tensor:
    """Returns the bits of a pixel of a bitmap; any number of what is none."""
    header = tf.io.decode_raw(tf.strings.substr(data, 0, 29), tf.uint8)
    numbers = tf.concat([header, tf.zeros(29, tf.uint8)], 0)
    # Behind the header of OS/2, and of Windows.
    return tf.where(numbers[14] == 12, numbers[24], numbers[28])


@dataclasses.dataclass(frozen=True)
class Decode(Map):
    """Decodes images in parallel, each to one size."""

    name: ClassVar[str] = "decode"
    function: ImageReader

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises unless elements hold an image as a path or as bytes."""
        first, key = inputs_of(dataset.element_spec), self.function.key
        if isinstance(first, dict):
            if key not in first:
                raise ValueError(
                    f"`key` is {key!r} and elements are dicts of {tuple(first)}; "
                    "expected the name of the image among them. Pass it."
                )
            first = first[key]
        elif key is not None:
            raise ValueError(
                f"`key` is {key!r} and elements hold {first!r}, no dict; expected one. "
                "Leave `key` out."
            )
        if first != tf.TensorSpec((), tf.string):
            raise ValueError(
                f"`.decode` came for elements that hold {first!r}; expected a path or "
                "the bytes of an image, a scalar string. Leave it out where images are "
                "decoded already, or decode before you batch."
            )

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        reader = self.function
        size = "own sizes"
        if reader.image_size is not None:
            height, width = reader.image_size
            size = f"{height}x{width} {reader.fit}, {reader.method}"
        how = f"{reader.decoder}, {size}, {settings.parallelism}"
        exact = DECODERS[reader.decoder]
        return how, f"uint8, {exact}; EXIF rotation is not applied"
