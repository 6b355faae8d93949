"""A folder of images as a source: paths and labels, no pixels."""

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

    An order is drawn on paths, which weigh 100 bytes, not on pixels or texts.
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
        ignored = ", ".join(
            f"{count:,} {reason}"
            for reason, count in sorted(self.num_ignored.items())
            if count
        )
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
    if isinstance(class_names, str):
        raise TypeError(
            f"`class_names` is {class_names!r}; expected a sequence of names. Pass "
            f"`class_names=[{class_names!r}]`."
        )
    if class_names is not None and len(set(class_names)) != len(class_names):
        raise ValueError(
            f"`class_names` is {tuple(class_names)!r}, with a name twice; expected "
            "each class once. Leave out the second."
        )
    ignored: collections.Counter[str] = collections.Counter()
    names: tuple[str, ...] = tuple(class_names or ())
    numbers: list[int] | None = None
    paths: list[str] = []
    if isinstance(labels, str):
        checks.choice("labels", labels, ["inferred"])
        names = _class_folders(root, names, kind, ignored)
        numbers = []
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
    else:
        if names and (labels is None or not isinstance(labels, Mapping)):
            raise ValueError(
                f"`class_names` is {names!r} and `labels` is "
                f"{type(labels).__name__}; expected names only where labels are "
                "inferred or a dict. Leave `class_names` out."
            )
        paths = _walk(root, endings, ignored)
        if not paths:
            raise ValueError(
                f"Folder {root!r} holds no {kind}; expected at least one file that "
                f"ends in {endings}. Pass another folder or other `extensions`."
            )
        if isinstance(labels, Mapping):
            numbers, names = _labels_by_path(labels, names, paths, root)
        elif labels is not None:
            numbers, names = _labels_in_order(labels, len(paths))
    return FileSource(_tensors(paths, numbers), len(paths), kind, names, dict(ignored))


def label_files(paths: Sequence[str], labels: Any, *, kind: str) -> FileSource:
    """Returns files with the labels of a sequence, or without if that is None."""
    numbers: list[int] | None = None
    names: tuple[str, ...] = ()
    if labels is not None:
        numbers, names = _labels_in_order(labels, len(paths))
    return FileSource(_tensors(list(paths), numbers), len(paths), kind, names, {})


def _tensors(paths: list[str], numbers: list[int] | None) -> Any:
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
        as_tensor = tf.constant(paths)
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
    real = Path(os.path.realpath(folder))
    above = {os.path.normpath(folder): set(map(_identity, (real, *real.parents)))}
    for parent, folders, files in os.walk(folder, followlinks=True):
        seen = above.pop(os.path.normpath(parent))
        entered = []
        for name in sorted(folders):
            place = os.path.join(parent, name)
            if name.startswith("."):
                ignored["in hidden folders"] += len(os.listdir(place))
            elif (identity := _identity(place)) in seen:
                ignored["links to a folder above"] += 1
            else:
                above[os.path.normpath(place)] = seen | {identity}
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


def _identity(folder: str | Path) -> tuple[int, int]:
    """Returns what a folder and every link to it have in common."""
    found = os.stat(folder)
    return found.st_dev, found.st_ino


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


def _labels_in_order(labels: Any, num_files: int) -> tuple[list[int], tuple[str, ...]]:
    """Returns labels given as a sequence, and the numbers as class names."""
    array = np.asarray(labels)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            f"`labels` is a {type(labels).__name__} of {array.dtype} with shape "
            f"{array.shape}; expected one integer for each file. Pass a flat list of "
            "integers, or a dict {path: class name}."
        )
    if len(array) != num_files:
        raise ValueError(
            f"`labels` has {len(array)} entries for {num_files} files; expected as "
            "many. They go by the sorted paths: list those with `labels=None`, or "
            "pass a dict {path: label}."
        )
    return _checked_numbers([int(n) for n in array])


def _labels_by_path(
    labels: Mapping[Any, Any], names: tuple[str, ...], paths: list[str], root: str
) -> tuple[list[int], tuple[str, ...]]:
    """Returns the labels of a dict in the order of the paths, and the class names."""
    given = {os.path.normpath(os.fspath(key)): label for key, label in labels.items()}
    relative = [os.path.relpath(path, root) for path in paths]
    missing = [path for path in relative if path not in given]
    unknown = sorted(set(given) - set(relative))
    if missing or unknown:
        what, which = ("lacks", missing) if missing else ("names", unknown)
        tail = "which lie there" if missing else "which do not lie there"
        raise ValueError(
            f"`labels` {what} {listed(which)}, {tail}; expected one label for each "
            f"file below {root!r}, by its path relative to it. Complete the dict, or "
            "move files that do not belong out of the folder."
        )
    values = [given[path] for path in relative]
    if not all(isinstance(value, str) for value in values):
        if names or any(
            isinstance(v, bool) or not isinstance(v, (int, np.integer)) for v in values
        ):
            raise TypeError(
                f"`labels` holds {listed([str(v) for v in values])}; expected integers "
                "alone, or class names alone where `class_names` is given. Make them "
                "one kind."
            )
        return _checked_numbers([int(value) for value in values])
    names = names or tuple(sorted(set(values)))
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ValueError(
            f"`labels` holds the class {unknown[0]!r}; expected one of `class_names`, "
            f"{listed(names)}. Add it there, or correct the label."
        )
    return [names.index(value) for value in values], names


def _checked_numbers(numbers: list[int]) -> tuple[list[int], tuple[str, ...]]:
    """Returns integer labels that fit int32, and the classes that occur."""
    limit = np.iinfo(LABEL_DTYPE).max
    wrong = [number for number in numbers if not 0 <= number <= limit]
    if wrong:
        raise ValueError(
            f"`labels` holds {wrong[0]}; expected class numbers from 0 to {limit}. "
            "Number the classes from 0."
        )
    return numbers, tuple(str(number) for number in sorted(set(numbers)))
