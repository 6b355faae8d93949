"""A folder of files as a source: paths and labels, no pixels."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data.sources import RandomAccess, files_identity
from tfamp.data.sources._files import listed, nearest
from tfamp.records import checks

# Bitmaps are found, and refused when they are decoded.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".gif", ".bmp")
# As Keras's `image_dataset_from_directory`, and no class has a larger number.
LABEL_DTYPE = np.int32


@dataclasses.dataclass(frozen=True)
class FileSource(RandomAccess):
    """Paths of files, one an element, with a label each or without.

    An order is drawn on paths, which weigh 100 bytes, not on pixels.
    """

    kind: str  # of the files, in the plural
    class_names: tuple[str, ...]  # of class 0, 1, ...; empty without labels
    num_ignored: int = 0  # files and folders that were left out

    @property
    def paths(self) -> tuple[str, ...]:
        """The files, absolute, in the order of the elements."""
        return tuple(map(os.fsdecode, self._paths().numpy().tolist()))

    def _paths(self) -> tf.Tensor:
        return self.tensors[0] if self.class_names else self.tensors

    def identity(self) -> Any:
        """Returns the files with size and time of change, and the labels."""
        labels = self.tensors[1].numpy().tobytes() if self.class_names else b""
        return (self.kind, self.class_names, labels, files_identity(self.paths))

    def locate(self, position: int) -> str:
        """Returns the path of element `position`."""
        return os.fsdecode(self._paths()[position].numpy())

    def explain(self) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        size = f"{self.num_examples:,} {self.kind}"
        if self.class_names:
            size += f", {len(self.class_names)} classes"
        return size, f"paths only; ignored {self.num_ignored:,} files and folders"


def folder_source(
    folder: Any,
    labels: Any = "inferred",
    class_names: Sequence[str] | None = None,
    endings: tuple[str, ...] = EXTENSIONS,
    kind: str = "images",
) -> FileSource:
    """Returns the files below a folder as paths, with their labels.

    `Pipeline.from_images` explains the arguments and the errors.
    """
    root = os.path.abspath(os.path.expanduser(os.fsdecode(folder)))
    if not os.path.isdir(root):
        raise ValueError(
            f"`folder` is {os.fsdecode(folder)!r}, which is none; expected a folder."
            f"{nearest(root)}"
        )
    ignored: list[str] = []
    if not isinstance(labels, str):
        paths = _walk(root, endings, ignored, frozenset())
        source = label_files(paths, labels, kind)
        return dataclasses.replace(source, num_ignored=len(ignored))
    checks.choice("labels", labels, ["inferred"])
    names = _class_folders(root, class_names, kind, ignored)
    paths, numbers = [], []
    for number, name in enumerate(names):
        above = frozenset({os.path.realpath(root)})
        found = _walk(os.path.join(root, name), endings, ignored, above)
        if not found:
            raise ValueError(
                f"Class folder {name!r} of {root!r} holds no {kind}; expected at least "
                f"one file that ends in {endings}. Fill it, or leave it out with "
                "`class_names`."
            )
        paths += found
        numbers += [number] * len(found)
    tensors = _tensors(paths, numbers)
    return FileSource(tensors, len(paths), kind, names, len(ignored))


def label_files(paths: Sequence[str], labels: Any, kind: str) -> FileSource:
    """Returns files with the labels of a sequence, or without if that is None."""
    if not paths:
        raise ValueError(f"There are no {kind}; expected at least one. Pass others.")
    if labels is None:
        return FileSource(_tensors(paths, None), len(paths), kind, ())
    array, limit = np.asarray(labels), np.iinfo(LABEL_DTYPE).max
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            f"`labels` is a {type(labels).__name__} of {array.dtype} with shape "
            f"{array.shape}; expected one integer for each file. Pass a flat list of "
            "integers."
        )
    low, high = array.min(initial=0), array.max(initial=0)
    if len(array) != len(paths) or low < 0 or high > limit:
        raise ValueError(
            f"`labels` has {len(array)} entries from {low} to {high} for {len(paths)} "
            f"files; expected as many, from 0 to {limit}. They go by the sorted paths: "
            "list those with `labels=None`."
        )
    names = tuple(map(str, np.unique(array).tolist()))
    return FileSource(_tensors(paths, array), len(paths), kind, names)


def _tensors(paths: Sequence[str], numbers: Any) -> Any:
    """Returns paths, or (paths, labels), on the CPU."""
    with tf.device("CPU:0"):
        as_tensor = tf.constant([os.fsencode(path) for path in paths])
        if numbers is None:
            return as_tensor
        return as_tensor, tf.constant(np.array(numbers, LABEL_DTYPE))


def _walk(
    folder: str,
    endings: tuple[str, ...],
    ignored: list[str],
    above: frozenset[str],
) -> list[str]:
    """Returns the files below `folder` in order, and notes the others.

    Links to folders are followed, but for those to a folder that they lie in.
    """
    here = os.path.realpath(folder)
    if here in above:
        ignored.append(folder)
        return []
    found, folders = [], []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        is_hidden = entry.name.startswith(".")
        if entry.is_dir() and not is_hidden:
            folders.append(entry.path)
        elif entry.name.lower().endswith(endings) and not is_hidden:
            found.append(entry.path)
        else:
            ignored.append(entry.path)
    for path in folders:
        found += _walk(path, endings, ignored, above | {here})
    return found


def _class_folders(
    root: str,
    asked: Sequence[str] | None,
    kind: str,
    ignored: list[str],
) -> tuple[str, ...]:
    """Returns the names of the classes: those asked for, or all folders, sorted."""
    entries = [e for e in os.scandir(root) if not e.name.startswith(".")]
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    loose = sorted(entry.name for entry in entries if entry.is_file())
    if not folders:
        raise ValueError(
            f"Folder {root!r} has no class folders: it has "
            f"{'files such as ' + listed(loose) if loose else 'nothing'}. Expected one "
            f"folder of {kind} for each class. Pass `labels=None` for {kind} without "
            "labels, or the labels themselves."
        )
    names = tuple(folders if asked is None else asked)
    unknown = [name for name in names if name not in folders]
    if isinstance(asked, str) or unknown or len(set(names)) < len(names):
        close = checks.did_you_mean(unknown[0], folders) if unknown else None
        raise ValueError(
            f"`class_names` is {asked!r}; expected names of folders of {root!r}, each "
            f"once, which has {listed(folders)}. "
            + (f"Did you mean {close!r}?" if close else "Pass their names.")
        )
    ignored += [*loose, *(set(folders) - set(names))]
    return names
