"""Arrays as a source: elements, or positions and the elements that lie there.

Random access lets a shuffle move 8 bytes an element instead of the element, which
is exact at any size and holds nothing twice.
"""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data._sources import DATA, RandomAccess
from tfamp.data._stages import Settings, Stage, map_in_order


@dataclasses.dataclass(frozen=True)
class ArraySource(RandomAccess):
    """Tensors in memory."""

    # Every worker holds the same arrays, so each takes its share of the elements.
    shard_policy = DATA

    def explain(self, dataset: tf.data.Dataset) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        total = sum(_nbytes(tensor) for tensor in tf.nest.flatten(self.tensors))
        size = f"{self.num_examples:,} examples, {total / 2**20:.1f} MiB"
        return f"arrays, {size}", "copied once; dtypes kept, the model casts"


@dataclasses.dataclass(frozen=True)
class Gather(Stage):
    """Reads the elements, or batches of them, whose positions arrive.

    Attributes:
        source: Where they are read.
        is_numbered: Whether to give pairs (position, element).
    """

    name = "gather"
    rank = 2
    source: RandomAccess = dataclasses.field(compare=False)
    is_numbered: bool = False

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Gathers in parallel and keeps the order."""
        if self.is_numbered:
            return map_in_order(
                dataset,
                lambda position: (position, self.source.rows(position)),
                settings,
            )
        return map_in_order(dataset, self.source.rows, settings)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        per = "batch" if dataset.element_spec.shape.rank else "element"
        return (
            f"one {per} a call, {settings.parallelism}",
            "order drawn on positions, then read: exact at any size",
        )


def array_source(x: Any, y: Any = None, sample_weight: Any = None) -> ArraySource:
    """Checks arrays and puts them on the CPU as tensors.

    Raises:
        TypeError: An argument is a list, or holds something that is no array.
        ValueError: Lengths differ, no examples, or weights without targets.
    """
    if y is None and sample_weight is not None:
        raise ValueError(
            "`sample_weight` came without `y`; expected both or neither, since Keras "
            "reads a pair as (x, y). Pass `y`, or put the weights into `x`."
        )
    parts = {"x": _arrays(x, "x")}
    if y is not None:
        parts["y"] = _arrays(y, "y")
    if sample_weight is not None:
        parts["sample_weight"] = _arrays(sample_weight, "sample_weight")
    lengths = {
        name: tuple(int(leaf.shape[0]) for leaf in tf.nest.flatten(part))
        for name, part in parts.items()
    }
    distinct = {length for part in lengths.values() for length in part}
    if len(distinct) != 1:
        told = ", ".join(
            f"`{name}` has {' and '.join(str(n) for n in part) or 'no array'}"
            for name, part in lengths.items()
        )
        raise ValueError(
            f"Arrays differ in length: {told}; expected one length for all. Cut them "
            "to the same examples, or check which axis holds the examples (the first)."
        )
    num_examples = distinct.pop()
    if num_examples == 0:
        raise ValueError(
            "`x` has 0 examples; expected at least one. `fit` on an empty dataset "
            "trains nothing and says nothing: check the filter or the file before it."
        )
    # On a GPU machine `tf.constant` would otherwise put the dataset on the GPU.
    with tf.device("CPU:0"):
        tensors = tuple(
            tf.nest.map_structure(tf.convert_to_tensor, part) for part in parts.values()
        )
    return ArraySource(tensors if len(tensors) > 1 else tensors[0], num_examples)


def _arrays(part: Any, name: str) -> Any:
    """Returns the structure `part` with every leaf as an array."""
    if isinstance(part, list):
        raise TypeError(
            f"`{name}` is a list; expected an array, or a dict or tuple of arrays. Use "
            f"`np.asarray({name})` for one array, `tuple({name})` for several inputs."
        )
    return tf.nest.map_structure(lambda leaf: _as_array(leaf, name), part)


def _as_array(leaf: Any, name: str) -> Any:
    """Returns `leaf` as a NumPy array or a tensor, with its own dtype."""
    if isinstance(leaf, tf.Tensor):
        array = leaf
    elif hasattr(leaf, "__array__"):
        array = np.asarray(leaf)
    else:
        raise TypeError(
            f"`{name}` holds a {type(leaf).__name__}; expected NumPy arrays or dense "
            "tensors. Convert it with `np.asarray`; for anything that does not fit in "
            "memory use `Pipeline.from_dataset`."
        )
    if len(array.shape) == 0:
        raise ValueError(
            f"`{name}` holds a scalar; expected arrays whose first dimension counts "
            "the examples. Pass one value for each example."
        )
    if isinstance(array, np.ndarray) and array.dtype == object:
        kinds = {type(value).__name__ for value in array.flat[:100]}
        if kinds - {"str", "bytes"}:
            raise TypeError(
                f"`{name}` is an object array of {', '.join(sorted(kinds))}; expected "
                "numbers or strings. Give it one dtype with `.astype`."
            )
    return array


def _nbytes(tensor: tf.Tensor) -> int:
    return int(np.prod(tensor.shape)) * tensor.dtype.size
