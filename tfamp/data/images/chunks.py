"""Decodes a few images in one call of Python, whose start costs as much as one.

A call out of TensorFlow's graph takes as long as decoding a small image, most of it
handing Python's lock from thread to thread. Sixteen images share it here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data.images.reader import JPEG_START, ImageReader

CHUNK = 16
# Memory that begins at a multiple of this becomes a tensor without being copied.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class ChunkReader:
    """Decodes images together, each as an `ImageReader` of one size would.

    Attributes:
        reader: Says how; its decoder is "opencv".
    """

    reader: ImageReader

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        """Returns pixels `(images, height, width, channels)`, uint8.

        Args:
            images: Paths or bytes, strings of shape `(images,)`.
        """
        fast = self.reader.fast_function()
        shape = (*(self.reader.image_size or ()), self.reader.channels)

        def decode_all(given: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            pixels = _aligned((len(given), *shape))
            for place, image in enumerate(given):
                target = pixels[place]
                decoded = self._decoded(image, fast, target)
                if not np.may_share_memory(decoded, target):
                    target[...] = decoded
            return pixels

        found = tf.numpy_function(decode_all, [images], tf.uint8, stateful=False)
        return tf.ensure_shape(found, (images.shape[0], *shape))

    def _decoded(self, image: bytes, fast: Callable[..., Any], target: Any) -> Any:
        """Returns the pixels of one image, given as a path or as bytes.

        They are in `target` already where OpenCV could write there.

        Raises:
            ValueError: It is damaged or missing, with its path.
        """
        name = image.decode(errors="replace") if self.reader.reads_files else "An image"
        try:
            data = _bytes_of(name) if self.reader.reads_files else image
            if data[: len(JPEG_START)] == JPEG_START:
                return fast(data, target)
            return self.reader(image).numpy()
        except (ValueError, OSError, tf.errors.OpError) as error:
            # TensorFlow makes InvalidArgumentError of it.
            raise ValueError(f"{name}: {error}") from error


def _bytes_of(path: str) -> bytes:
    """Returns a file's bytes, from wherever TensorFlow can read."""
    if "://" in path:
        with tf.io.gfile.GFile(path, "rb") as remote:
            return bytes(remote.read())
    with open(path, "rb", buffering=0) as file:
        return file.readall()


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
