"""The stage that turns paths or bytes of images into uint8 pixels."""

import dataclasses
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data._elements import inputs_of
from tfamp.data.stages import Map, Settings
from tfamp.data.stages.image_reader import ImageReader

# Against `tf.io.decode_image` and `tf.image.resize`, on photos at 75 to 95 of 100.
_DIFFERENCES = {
    "tf": "exact",
    "simplejpeg": "the same pixels as tf",
}


@dataclasses.dataclass(frozen=True)
class Decode(Map):
    """Decodes images in parallel, each to one size."""

    name: ClassVar[str] = "decode"
    function: ImageReader

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises unless elements hold an image as a path or as bytes."""
        first = inputs_of(dataset.element_spec)
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

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        reader = self.function
        size = "own sizes"
        if reader.image_size is not None:
            height, width = reader.image_size
            size = f"{height}x{width} {reader.fit}, {reader.method}"
        how = f"{reader.decoder}, {size}, {settings.parallelism}"
        exact = _DIFFERENCES[reader.decoder]
        return how, f"uint8, {exact}; EXIF rotation is not applied"


def _is_scalar_string(spec: Any) -> bool:
    """Whether a part of an element is one string."""
    return (
        isinstance(spec, tf.TensorSpec)
        and spec.dtype == tf.string
        and spec.shape.rank == 0
    )
