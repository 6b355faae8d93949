"""A folder of files as a source: paths and labels, no pixels."""

import collections
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data.sources import RandomAccess, files_identity
from tfamp.data.sources._files import as_path, listed, nearest
from tfamp.records import checks

# What `tf.io.decode_image` reads; the first frame of a GIF.
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
    num_ignored: Mapping[str, int]  # files left out, by the reason why

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

    def explain(self, dataset: tf.data.Dataset) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        size = f"{self.num_examples:,} {self.kind}"
        if self.class_names:
            size += f", {len(self.class_names)} classes"
        counted = sorted(self.num_ignored.items())
        ignored = ", ".join(f"{count:,} {reason}" for reason, count in counted)
        return size, f"paths only; ignored {ignored or 'nothing'}"


def folder_source(
    folder: Any,
    *,
    labels: Any = "inferred",
    class_names: Sequence[str] | None = None,
    extensions: Any = EXTENSIONS,
    kind: str = "images",
) -> FileSource:
    """Returns the files below a folder as paths, with their labels.

    `Pipeline.from_images` explains the arguments and the errors.
    """
    given = (extensions,) if isinstance(extensions, str) else tuple(extensions)
    endings = tuple(str(ending).lower() for ending in given)
    if not endings or not all(ending.startswith(".") for ending in endings):
        raise ValueError(
            f"`extensions` is {given!r}; expected endings with their dot. Pass such as "
            "('.jpg', '.png')."
        )
    root = _root(folder)
    is_inferred = isinstance(labels, str)
    if is_inferred:
        checks.choice("labels", labels, ["inferred"])
    _check_class_names(class_names, is_inferred)
    if isinstance(labels, Mapping):
        raise TypeError(
            "`labels` is a dict; expected 'inferred', None or one integer for each "
            "file, in the order of the paths. List these with `labels=None`."
        )
    ignored: collections.Counter[str] = collections.Counter()
    if not is_inferred:
        paths = _walk(root, endings, ignored)
        if not paths:
            raise ValueError(
                f"Folder {root!r} holds no {kind}; expected at least one file that "
                f"ends in {endings}. Pass another folder or other `extensions`."
            )
        source = label_files(paths, labels, kind=kind)
        return dataclasses.replace(source, num_ignored=dict(ignored))
    names = _class_folders(root, tuple(class_names or ()), kind, ignored)
    paths, numbers = [], []
    for number, name in enumerate(names):
        found = _walk(os.path.join(root, name), endings, ignored)
        if not found:
            raise ValueError(
                f"Class folder {os.path.join(root, name)!r} holds no {kind}; "
                f"expected at least one file that ends in {endings}. Fill it, "
                "remove it, or leave it out with `class_names`."
            )
        paths += found
        numbers += [number] * len(found)
    return FileSource(_tensors(paths, numbers), len(paths), kind, names, dict(ignored))


def label_files(paths: Sequence[str], labels: Any, *, kind: str) -> FileSource:
    """Returns files with the labels of a sequence, or without if that is None."""
    if labels is None:
        return FileSource(_tensors(paths, None), len(paths), kind, (), {})
    array, limit = np.asarray(labels), np.iinfo(LABEL_DTYPE).max
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            f"`labels` is a {type(labels).__name__} of {array.dtype} with shape "
            f"{array.shape}; expected one integer for each file. Pass a flat list of "
            "integers."
        )
    if len(array) != len(paths):
        raise ValueError(
            f"`labels` has {len(array)} entries for {len(paths)} files; expected as "
            "many. They go by the sorted paths: list those with `labels=None`."
        )
    wrong = array[(array < 0) | (array > limit)]
    if wrong.size:
        raise ValueError(
            f"`labels` holds {wrong[0]}; expected class numbers from 0 to {limit}. "
            "Number the classes from 0."
        )
    names = tuple(map(str, np.unique(array).tolist()))
    return FileSource(_tensors(paths, array), len(paths), kind, names, {})


def _check_class_names(class_names: Any, is_inferred: bool) -> None:
    if class_names is None:
        return
    if isinstance(class_names, str):
        raise TypeError(
            f"`class_names` is {class_names!r}; expected a sequence of names. Pass "
            f"`class_names=[{class_names!r}]`."
        )
    if not is_inferred:
        raise ValueError(
            f"`class_names` is {tuple(class_names)!r} and `labels` is not 'inferred'; "
            "expected names of class folders. Leave `class_names` out."
        )
    if len(set(class_names)) != len(class_names):
        raise ValueError(
            f"`class_names` is {tuple(class_names)!r}, with a name twice; expected "
            "each class once. Leave out the second."
        )


def _tensors(paths: Sequence[str], numbers: Any) -> Any:
    """Returns paths, or (paths, labels), on the CPU."""
    for path in paths:
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"File {path!r} has a name that is not UTF-8; expected one that is. "
                "Rename it, for example with `convmv -f latin1 -t utf8 --notest`."
            ) from error
    with tf.device("CPU:0"):
        as_tensor = tf.constant(list(paths))
        if numbers is None:
            return as_tensor
        return as_tensor, tf.constant(np.array(numbers, LABEL_DTYPE))


def _root(folder: Any) -> str:
    """Returns the absolute path of a folder that exists."""
    path = as_path(folder, "folder")
    absolute = os.path.abspath(os.path.expanduser(path))
    if os.path.isdir(absolute):
        return absolute
    found, advice = "which does not exist", nearest(absolute)
    if os.path.exists(absolute):
        parent = os.path.dirname(absolute)
        found, advice = "a file", f" Pass the folder that it lies in, {parent!r}."
    raise ValueError(f"`folder` is {path!r}, {found}; expected a folder.{advice}")


def _walk(
    folder: str, extensions: tuple[str, ...], ignored: collections.Counter[str]
) -> list[str]:
    """Returns the files below `folder` in order, and counts the others.

    Links to folders are followed, but for those to a folder that they lie in.
    """
    found = []
    for parent, folders, files in os.walk(folder, followlinks=True):
        entered = []
        for name in sorted(folders):
            place = os.path.join(parent, name)
            if name.startswith("."):
                ignored["in hidden folders"] += len(os.listdir(place))
            elif os.path.islink(place) and _is_above(place, parent):
                ignored["links to a folder above"] += 1
            else:
                entered.append(name)
        folders[:] = entered
        for name in sorted(files):
            if name.startswith("."):
                ignored["hidden"] += 1
            elif name.lower().endswith(extensions):
                found.append(os.path.join(parent, name))
            else:
                ending = os.path.splitext(name)[1].lower()
                ignored[f"{ending} files" if ending else "without extension"] += 1
    return found


def _is_above(link: str, folder: str) -> bool:
    """Whether a link leads to a folder that it lies in, by way of other links too."""
    target = os.path.realpath(link)
    ways = (os.path.realpath(one) for one in (Path(folder), *Path(folder).parents))
    return any(os.path.commonpath([way, target]) == target for way in ways)


def _class_folders(
    root: str, asked: tuple[str, ...], kind: str, ignored: collections.Counter[str]
) -> tuple[str, ...]:
    """Returns the names of the classes: those asked for, or all folders, sorted."""
    entries = [e for e in os.scandir(root) if not e.name.startswith(".")]
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    loose = sorted(entry.name for entry in entries if entry.is_file())
    if not folders:
        has = f"it has files such as {listed(loose)}" if loose else "it is empty"
        raise ValueError(
            f"Folder {root!r} has no class folders: {has}. Expected one folder of "
            f"{kind} for each class. Pass `labels=None` for {kind} without labels, or "
            "the labels themselves."
        )
    unknown = [name for name in asked if name not in folders]
    if unknown:
        close = checks.did_you_mean(unknown[0], folders)
        raise ValueError(
            f"Unknown class {unknown[0]!r} in `class_names`; expected folders of "
            f"{root!r}, which has {listed(folders)}. "
            + (f"Did you mean {close!r}?" if close else "Pass their names.")
        )
    if loose:
        ignored["beside the class folders"] += len(loose)
    if asked and len(asked) < len(folders):
        ignored["class folders not named"] += len(folders) - len(asked)
    return asked or tuple(folders)
