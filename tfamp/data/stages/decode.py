"""The stage that turns paths or bytes of images into uint8 pixels of one size.

A resized value is rounded half to even. Rotation by EXIF is not applied, as TensorFlow
never does; of 16-bit PNGs the upper 8 bits are kept, and alpha is dropped.
"""

import dataclasses
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data._elements import from_arguments, inputs_of, with_inputs
from tfamp.data.stages import Map, Settings
from tfamp.records import checks

# First bytes of a JPEG, a PNG and a GIF. No bitmaps: of those with a palette TensorFlow
# takes the numbers for colors.
_STARTS = (b"\xff\xd8\xff", b"\x89PN", b"GIF")


@dataclasses.dataclass(frozen=True)
class ImageReader:
    """Decodes and resizes the image of an element; leaves its other parts alone.

    The settings are those of `Pipeline.decode`; `reads_files` says whether images come
    as paths instead of bytes. It works eagerly and in `Dataset.map`.
    """

    image_size: Any = None
    _: dataclasses.KW_ONLY
    channels: int = 3
    key: str | None = None
    reads_files: bool = False

    def __post_init__(self) -> None:
        size = self.image_size
        if size is not None:
            is_pair = hasattr(size, "__iter__") and len(tuple(size)) == 2
            if not is_pair or isinstance(size, str):
                raise TypeError(
                    f"`image_size` is {size!r}; expected (height, width). Pass two "
                    "integers, or None to keep the sizes."
                )
            size = tuple(checks.positive_int("image_size", side) for side in size)
            object.__setattr__(self, "image_size", size)
        if self.channels not in (1, 3):
            raise ValueError(
                f"`channels` is {self.channels!r}; expected 1 or 3. Pass 3 for color; "
                "an alpha channel is dropped."
            )

    def __call__(self, *parts: Any) -> Any:
        """Returns the element with pixels in place of a path or of bytes."""
        element = from_arguments(parts)
        given, key = inputs_of(element), self.key
        if key is None:
            return with_inputs(element, self._pixels(given))
        return with_inputs(element, {**given, key: self._pixels(given[key])})

    def _pixels(self, image: Any) -> tf.Tensor:
        """Returns the pixels `(height, width, channels)`, uint8, of a path or bytes."""
        given = tf.convert_to_tensor(image, tf.string)
        data = tf.io.read_file(given) if self.reads_files else given
        start = tf.strings.substr(data, 0, 3)
        is_image = tf.reduce_any(start == tf.constant(_STARTS))
        what = given if self.reads_files else tf.constant("the bytes of an image")
        # Not its first bytes: an error whose text is no UTF-8 is another error.
        words = [what, "is no JPEG, PNG or GIF; bytes:", tf.strings.length(data)]
        if tf.executing_eagerly() and not is_image:
            # As a graph would say it; `Assert` itself speaks of tensors here.
            texts = [tf.strings.as_string(one).numpy().decode() for one in words]
            raise tf.errors.InvalidArgumentError(None, None, " ".join(texts))
        check = tf.debugging.Assert(is_image, words) or tf.no_op()
        with tf.control_dependencies([check]):
            data = tf.identity(data)
        pixels = tf.io.decode_image(data, self.channels, expand_animations=False)
        pixels = tf.ensure_shape(pixels, (None, None, self.channels))
        if self.image_size is None:
            return pixels
        resized = tf.cast(tf.round(tf.image.resize(pixels, self.image_size)), tf.uint8)
        return tf.ensure_shape(resized, (*self.image_size, self.channels))


@dataclasses.dataclass(frozen=True)
class Decode(Map):
    """Decodes images in parallel, each to one size."""

    name: ClassVar[str] = "decode"
    function: ImageReader

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Maps, if elements hold an image as a path or as bytes."""
        first, key = inputs_of(dataset.element_spec), self.function.key
        found = first.get(key) if isinstance(first, dict) and key else first
        is_plain = key is None or isinstance(first, dict)
        if not is_plain or found != tf.TensorSpec((), tf.string):
            raise ValueError(
                f"`.decode` came for elements that hold {first!r}, with `key` {key!r}; "
                "expected a path or the bytes of an image, a scalar string, by its "
                "`key` in a dict. Leave it out where images are decoded already, or "
                "decode before you batch."
            )
        return super().apply(dataset, settings)

    @property
    def setting(self) -> str:
        """The size of the images."""
        size = self.function.image_size
        return "own sizes" if size is None else f"{size[0]}x{size[1]}, bilinear"
