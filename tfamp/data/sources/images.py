"""Images: a folder of files as a source of paths and labels, and the decoder.

A resized value is rounded half to even. Rotation by EXIF is not applied, as TensorFlow
never does; of 16-bit PNGs the upper 8 bits are kept, and alpha is dropped.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data import _elements
from tfamp.data.sources import RandomAccess, files_identity
from tfamp.data.sources._files import listed, nearest
from tfamp.data.stages import Map, Settings
from tfamp.records import checks

EXTENSIONS = (".jpg", ".jpeg", ".png", ".gif", ".bmp")
# As Keras's `image_dataset_from_directory`, and no class has a larger number.
LABEL_DTYPE = np.int32
# No bitmaps: of those with a palette TensorFlow takes the numbers for colors.
_NO_IMAGE = ": is no JPEG, PNG or GIF; bytes: "
_ADVICE = ". Expected an image that can be read: repair it, or leave it out"
_STARTS = (b"\xff\xd8\xff", b"\x89PN", b"GIF")


@dataclasses.dataclass(frozen=True)
class FileSource(RandomAccess):
    """Paths of files, one an element, with a label each or without."""

    class_names: tuple[str, ...]  # of class 0, 1, ...; empty without labels
    num_ignored: int = 0  # files and folders that were left out

    @property
    def paths(self) -> tuple[str, ...]:
        """The files, absolute, in the order of the elements."""
        return tuple(map(os.fsdecode, self._paths().numpy().tolist()))

    def _paths(self) -> tf.Tensor:
        return self.tensors[0] if self.class_names else self.tensors

    def identity(self) -> Any:
        """Returns the classes, and the files with size and time of change."""
        return ("images", self.class_names, files_identity(self.paths))

    def locate(self, position: int) -> str:
        """Returns the path of element `position`."""
        return os.fsdecode(self._paths()[position].numpy())

    def explain(self) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        classes = f", {len(self.class_names)} classes" if self.class_names else ""
        size = f"{self.num_examples:,} images{classes}"
        return size, f"paths only; ignored {self.num_ignored:,} files and folders"


def folder_source(folder: Any, labels: str | None = "inferred") -> FileSource:
    """Returns the images below a folder as paths, with their labels."""
    root = os.path.abspath(os.path.expanduser(os.fsdecode(folder)))
    if not os.path.isdir(root):
        raise ValueError(
            f"`folder` is {os.fsdecode(folder)!r}, which is none; expected a folder."
            f"{nearest(root)}"
        )
    ignored: list[str] = []
    if labels is None:
        found = _walk(root, ignored, frozenset())
        return _source(found, None, (), len(ignored))
    checks.choice("labels", labels, ["inferred"])
    entries = [e for e in os.scandir(root) if not e.name.startswith(".")]
    names = sorted(entry.name for entry in entries if entry.is_dir())
    ignored += sorted(entry.name for entry in entries if entry.is_file())
    if not names:
        what = f"files such as {listed(ignored)}" if ignored else "nothing"
        raise ValueError(
            f"Folder {root!r} has no class folders: it has {what}. Expected one folder "
            "of images for each class. Pass `labels=None` for images without labels."
        )
    above = frozenset({os.path.realpath(root)})
    paths, numbers = [], []
    for number, name in enumerate(names):
        found = _walk(os.path.join(root, name), ignored, above)
        if not found:
            raise ValueError(
                f"Class folder {name!r} of {root!r} holds no images; expected at least "
                f"one file that ends in {EXTENSIONS}. Fill it, or move it away."
            )
        paths += found
        numbers += [number] * len(found)
    return _source(paths, numbers, tuple(names), len(ignored))


def _source(
    paths: Sequence[str], numbers: Any, names: tuple[str, ...], ignored: int
) -> FileSource:
    """Returns a source of paths, or (paths, labels), on the CPU."""
    if not paths:
        raise ValueError("There are no images; expected at least one. Pass others.")
    with tf.device("CPU:0"):
        tensors: Any = tf.constant([os.fsencode(path) for path in paths])
        if numbers is not None:
            tensors = tensors, tf.constant(np.array(numbers, LABEL_DTYPE))
    return FileSource(tensors, len(paths), names, ignored)


def _walk(folder: str, ignored: list[str], above: frozenset[str]) -> list[str]:
    """Returns the files below `folder` in order, and notes the others."""
    here = os.path.realpath(folder)
    if here in above:
        ignored.append(folder)
        return []
    found, folders = [], []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        is_hidden = entry.name.startswith(".")
        if entry.is_dir() and not is_hidden:
            folders.append(entry.path)
        elif entry.name.lower().endswith(EXTENSIONS) and not is_hidden:
            found.append(entry.path)
        else:
            ignored.append(entry.path)
    for path in folders:
        found += _walk(path, ignored, above | {here})
    return found


@dataclasses.dataclass(frozen=True)
class ImageReader:
    """Decodes and resizes the image of an element; leaves its other parts alone."""

    image_size: Any = None
    _: dataclasses.KW_ONLY
    channels: int = 3
    key: str | None = None
    reads_files: bool = False

    def __post_init__(self) -> None:
        size = self.image_size
        if size is not None:
            if isinstance(size, str) or np.shape(size) != (2,):
                raise TypeError(
                    f"`image_size` is {size!r}; expected (height, width). Pass two "
                    "integers, or None to keep the sizes."
                )
            size = tuple(checks.positive_int("image_size", side) for side in size)
            object.__setattr__(self, "image_size", size)
        if self.channels not in (1, 3):
            raise ValueError(
                f"`channels` is {self.channels!r}; expected 1 or 3. Pass 3 for color."
            )

    def __call__(self, *parts: Any) -> Any:
        """Returns the element with pixels in place of a path or of bytes."""
        element = _elements.from_arguments(parts)
        given, key = _elements.inputs_of(element), self.key
        if key is None:
            return _elements.with_inputs(element, self._pixels(given))
        return _elements.with_inputs(element, {**given, key: self._pixels(given[key])})

    def _pixels(self, image: Any) -> tf.Tensor:
        """Returns the pixels `(height, width, channels)`, uint8, of a path or bytes."""
        given = tf.convert_to_tensor(image, tf.string)
        data = tf.io.read_file(given) if self.reads_files else given
        start = tf.strings.substr(data, 0, 3)
        is_image = tf.reduce_any(start == tf.constant(_STARTS))
        # Not its first bytes: an error whose text is no UTF-8 is another error.
        what = given if self.reads_files else tf.constant("the bytes of an image")
        size = tf.strings.as_string(tf.strings.length(data))
        text = tf.strings.join([what, _NO_IMAGE, size, _ADVICE])
        check = tf.raw_ops.Assert(condition=is_image, data=[text])
        with tf.control_dependencies([check] if check is not None else []):
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
        first, key = _elements.inputs_of(dataset.element_spec), self.function.key
        found = first.get(key) if isinstance(first, dict) and key else first
        is_plain = key is None or isinstance(first, dict)
        if not is_plain or found != tf.TensorSpec((), tf.string):
            raise ValueError(
                f"`.decode` came for elements that hold {first!r}, with `key` {key!r}; "
                "expected a path or the bytes of an image, by its `key` in a dict. "
                "Leave it out where images are decoded already."
            )
        return super().apply(dataset, settings)

    @property
    def setting(self) -> str:
        """The size of the images."""
        size = self.function.image_size
        return "own sizes" if size is None else f"{size[0]}x{size[1]}, bilinear"
