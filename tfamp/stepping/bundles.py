"""Bundles: a failing training step in a folder, with all that replaying it takes.

A bundle is built in a folder beside its place and renamed when all of it has reached
the disk. So a process that is killed leaves no half of one, only a hidden folder, which
`remove_leftovers` takes away.

Batches are arrays with a description of their structure. It is made of dicts that JSON
can hold, each with a "kind": "none", "tensor", "text" (strings, serialized by
TensorFlow), "ragged", "sparse", "tuple", "list", "dict", or "scalar" (of Python).
"""

import dataclasses
import itertools
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfamp.records.checks import first_line
from tfamp.records.record import sync_folder
from tfamp.stepping import snapshot_files, snapshots
from tfamp.stepping.bundle_records import Batch, Bundle, Call

RECORD, STATE, BATCHES = "bundle.json", "state.npz", "batches.npz"
RANDOM, MODEL = "random.npz", "model.keras"
_LEFTOVER = re.compile(r"\.writing-(?P<host>[^-]*)-(?P<process>\d+)-.+")
_Description = Mapping[str, Any]


class Contents(NamedTuple):
    """What a bundle is made of."""

    record: Bundle
    state: snapshots.State
    batches: Mapping[str, np.ndarray]
    random: Mapping[str, np.ndarray]


def write(folder: Path, contents: Contents, save_model: Callable[[Path], str]) -> Path:
    """Writes a bundle and returns its folder; after an error nothing is left of it.

    Args:
        folder: Where its folder is made.
        contents: What it holds.
        save_model: Writes the model to a path, and returns why a fresh process cannot
            rebuild it from there alone, or an empty text. Where it raises, the bundle
            has no model.
    """
    beside = folder / _writing_name(contents.record)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        _check_space(folder, contents)
        snapshot_files.write(contents.state, beside / STATE)
        for name, arrays in ((BATCHES, contents.batches), (RANDOM, contents.random)):
            snapshot_files.write(snapshots.State(dict(arrays), {}), beside / name)
        record = _with_model(contents.record, beside, save_model)
        record = dataclasses.replace(record, checksum=record.computed_checksum())
        record.to_json(beside / RECORD)
        for path in beside.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(beside)
        target = _free_name(folder, contents.record)
        os.rename(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    sync_folder(folder)
    return target


def read(path: str | os.PathLike[str]) -> Contents:
    """Reads a bundle and verifies every byte of it.

    Raises:
        FileNotFoundError: There is no such folder, or it holds no bundle.
        ValueError: The bundle is damaged.
    """
    folder = Path(path)
    record = read_record(folder)
    names = (STATE, BATCHES, RANDOM)
    for name in (*names, MODEL) if record.has_model else names:
        if not (folder / name).is_file():
            raise _damaged(folder, f"its file {name!r} is missing")
    try:
        state, batches, random_states = (snapshot_files.read(folder / n) for n in names)
        if record.has_model:
            snapshot_files.check_archive(folder / MODEL)
    except ValueError as error:
        raise _damaged(folder, str(error)) from error
    return Contents(record, state, batches.arrays, random_states.arrays)


def read_record(path: str | os.PathLike[str]) -> Bundle:
    """Reads `bundle.json` of a bundle and verifies it.

    Raises:
        FileNotFoundError: There is no such folder, or it holds no bundle.
        ValueError: The record is damaged, or of a later version of tfamp.
    """
    folder = Path(path)
    if not (folder / RECORD).is_file():
        raise FileNotFoundError(
            f"Found no bundle in {str(path)!r}: expected a folder with a file "
            f"{RECORD!r}, as `tfamp.callbacks.NanRecovery` writes it. Check the "
            "path."
        )
    if (folder / "state.tfamp").exists():
        raise _damaged(folder, "a version before the first release wrote it")
    record = Bundle.from_json(folder / RECORD)
    if record.checksum != record.computed_checksum():
        raise _damaged(folder, f"its file {RECORD!r} was changed")
    return record


def remove_leftovers(folder: Path) -> int:
    """Removes what processes that were killed here left half written."""
    num_removed = 0
    for path in folder.glob(".writing-*"):
        match = _LEFTOVER.fullmatch(path.name)
        is_mine = match is not None and match["host"] == _host()
        if match and is_mine and not _is_running(int(match["process"])):
            shutil.rmtree(path, ignore_errors=True)
            num_removed += 1
    return num_removed


def _with_model(
    record: Bundle, beside: Path, save_model: Callable[[Path], str]
) -> Bundle:
    target = beside / MODEL
    try:
        why = save_model(target)
        return dataclasses.replace(record, has_model=True, needs_build=why)
    except OSError:
        raise  # the disk, not the model
    except Exception as error:  # whatever a user's `get_config` raises
        target.unlink(missing_ok=True)
        why = f"it cannot be saved ({type(error).__name__}: {first_line(error)})"
        return dataclasses.replace(record, has_model=False, needs_build=why)


def _check_space(folder: Path, contents: Contents) -> None:
    """Raises before a byte is written where the disk cannot hold the bundle."""
    arrays = [*contents.batches.values(), *contents.random.values()]
    # The model's file holds the variables once more.
    needed = 2 * contents.state.num_bytes + sum(array.nbytes for array in arrays)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"A bundle of {needed} bytes does not fit in {str(folder)!r}, where {free} "
            "bytes are free. Free some space, or pass another `directory`."
        )


def _free_name(folder: Path, record: Bundle) -> Path:
    """Returns a path that nothing has yet: runs may share a folder."""
    name = f"failure-{record.step:08d}-{record.cause}"
    names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(folder / each for each in names if not (folder / each).exists())


def _writing_name(record: Bundle) -> str:
    return f".writing-{_host()}-{os.getpid()}-{record.step}-{record.cause}"


def _host() -> str:
    return re.sub(r"\W", "_", platform.node())


def _is_running(process: int) -> bool:
    if sys.platform == "win32":
        return True  # `os.kill` ends processes there, so nobody can be asked
    try:
        os.kill(process, 0)
    except OSError as error:  # of another user, or there is none
        return not isinstance(error, ProcessLookupError)
    return True


def _damaged(folder: Path, why: str) -> ValueError:
    return ValueError(
        f"The bundle {str(folder)!r} is damaged: {why}. Expected it as "
        "`tfamp.callbacks.NanRecovery` wrote it. Copy it again, or take another one."
    )


def pack(
    data: Any, name: str, arrays: dict[str, np.ndarray], shapes: Mapping[int, Any]
) -> dict[str, Any]:
    """Returns the description of a part of a batch.

    Args:
        data: Tensors in tuples, lists and dicts, with None among them.
        name: What the names of its arrays begin with.
        arrays: Gets the arrays.
        shapes: For the identity of a tensor the shape that its graph knew, with None
            where it varied; of others their own shape is taken.
    """
    if data is None or isinstance(data, tf.experimental.Optional):
        return {"kind": "none"}
    if isinstance(data, (bool, int, float)):
        return {"kind": "scalar", "value": data}
    described: dict[str, Any]
    if isinstance(data, Mapping):
        described, items = {"kind": "dict", "keys": list(data)}, list(data.values())
    elif isinstance(data, (tuple, list)):
        described = {"kind": "list" if isinstance(data, list) else "tuple"}
        items = list(data)
    elif isinstance(data, tf.RaggedTensor):
        described, items = {"kind": "ragged"}, [data.values, data.row_splits]
    elif isinstance(data, tf.SparseTensor):
        described = {"kind": "sparse"}
        items = [data.indices, data.values, data.dense_shape]
    else:
        tensor = tf.convert_to_tensor(data)
        is_text = tensor.dtype == tf.string
        if is_text:
            text = tf.io.serialize_tensor(tensor).numpy()
            arrays[name] = np.frombuffer(text, np.uint8)
        else:
            arrays[name] = np.asarray(tensor)
        return {
            "kind": "text" if is_text else "tensor",
            "name": name,
            "dtype": tensor.dtype.name,
            "shape": list(tensor.shape),
            "graph_shape": shapes.get(id(data), list(tensor.shape)),
        }
    packed = [pack(item, f"{name}/{i}", arrays, shapes) for i, item in enumerate(items)]
    return {**described, "items": packed}


def unpack(
    description: _Description,
    arrays: Mapping[str, np.ndarray],
    tensor_of: Callable[[_Description], Any] | None = None,
) -> Any:
    """Returns what `pack` described, with tensors again.

    `tensor_of` gives the tensor of each of `leaves`; None takes the arrays. Raises
    ValueError where the description is none, or names an array that is not there.
    """
    kind = description.get("kind")
    if kind in ("tensor", "text"):
        return tensor_of(description) if tensor_of else _tensor(description, arrays)
    items = [unpack(each, arrays, tensor_of) for each in description.get("items", ())]
    if kind == "dict":
        return dict(zip(description["keys"], items, strict=True))
    if kind == "ragged":
        return tf.RaggedTensor.from_row_splits(*items, validate=False)
    if kind == "sparse":
        return tf.SparseTensor(*items)
    if kind in ("tuple", "list"):
        return items if kind == "list" else tuple(items)
    if kind in ("none", "scalar"):
        return description.get("value")
    raise ValueError(
        f"Found a part of a batch of kind {kind!r}; expected a kind that "
        "`tfamp.stepping.bundles.pack` makes. Update tfamp if a later version wrote it."
    )


def leaves(description: _Description) -> list[_Description]:
    """Returns the descriptions of all dense tensors in one, in order."""
    if "dtype" in description:
        return [description]
    return [leaf for item in description.get("items", ()) for leaf in leaves(item)]


def part_of(contents: Contents, number: int, replica: int = 0) -> Any:
    """Returns the part of a batch that a replica trained on, if the batch is kept."""
    return unpack(_batch(contents, number).parts[replica], contents.batches)


def iterator_of(
    contents: Contents, calls: Sequence[Call], strategy: tf.distribute.Strategy
) -> Any:
    """Returns an iterator over the batches of some calls in a row.

    Its batches have the shapes that the graph knew then: a dimension that is known is
    folded into constants, and that can change a bit. With a strategy each replica gets
    its part again.
    """
    parts = [
        part
        for call in calls
        for number in range(call.first, call.first + call.num_batches)
        for part in _batch(contents, number).parts
    ]
    signature = tuple(
        tf.TensorSpec(_common([leaf["graph_shape"] for leaf in same]), same[0]["dtype"])
        for same in zip(*map(leaves, parts), strict=True)
    )

    def generate() -> Iterator[tuple[Any, ...]]:
        for part in parts:
            yield tuple(_tensor(leaf, contents.batches) for leaf in leaves(part))

    def packed(*tensors: Any) -> Any:
        rest = iter(tensors)
        return unpack(parts[0], {}, lambda leaf: next(rest))

    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    dataset = dataset.map(packed)
    if strategy.num_replicas_in_sync == 1:
        return iter(strategy.experimental_distribute_dataset(dataset))
    return iter(strategy.distribute_datasets_from_function(lambda context: dataset))


def _tensor(leaf: _Description, arrays: Mapping[str, np.ndarray]) -> tf.Tensor:
    array = arrays.get(leaf["name"])
    if array is None:
        raise ValueError(
            f"The array {leaf['name']!r} of a batch is missing in the bundle; expected "
            "every array that its record names. Take another bundle."
        )
    if leaf["kind"] == "text":
        return tf.io.parse_tensor(array.tobytes(), tf.string)
    return tf.constant(array, leaf["dtype"])


def _batch(contents: Contents, number: int) -> Batch:
    kept = {batch.number: batch for batch in contents.record.batches}
    if number not in kept:
        raise ValueError(
            f"Batch {number} is not in the bundle, which keeps {tuple(kept)!r}; "
            "expected every batch of its calls. Take another bundle."
        )
    return kept[number]


def _common(shapes: Sequence[Any]) -> tuple[int | None, ...]:
    """Returns the shape that all of some shapes have, None where they differ.

    Example:
        >>> _common([[4, 3], [2, 3]])
        (None, 3)
    """
    sizes = (set(same) for same in zip(*shapes, strict=True))
    return tuple(same.pop() if len(same) == 1 else None for same in sizes)
